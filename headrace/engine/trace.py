"""Recorded inputs of a scheduler, and their replay: the same inputs must give the same plans.

Contract: a trace is text, one JSON value a line: a header (sizes and rules of the scheduler, why it
was recorded), the calls in order with their times, and a footer with what each request drew and the
hash of everything that was planned and put out. What was drawn is kept per request and position, so
a trace can be replayed by a scheduler that plans differently: its hash then differs. No prompt text
or sampling parameters beyond what the scheduler looks at; token ids are in it. Used by tests and
`scripts/record_traces.py`; `RecordingScheduler` can stand in for a `Scheduler` anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import asdict, fields
from hashlib import sha256
from typing import IO, Any

import numpy as np

from headrace.engine.outputs import StepOutput
from headrace.engine.plan import StepPlan, StepResult, Vote
from headrace.engine.scheduler import NewRequest, RowHooks, Scheduler, SchedulerLimits
from headrace.engine.stops import Ended
from headrace.errors import ConfigError, HeadraceError, rebuild_error
from headrace.kv.manager import KVManager
from headrace.kv.pool import BlockPool
from headrace.kv.resume import ResumeRules

VERSION = 1
# Drawn where a replayed request gets further than the recorded one did.
_UNRECORDED = 2


class StreamHash:
    """SHA-256 over plans (with the block tables of their rows) and outputs."""

    def __init__(self) -> None:
        self._hash = sha256()
        self.steps = 0

    def plan(self, plan: StepPlan | None, kv: KVManager) -> None:
        """Add a plan."""
        if plan is None:
            self._hash.update(b"idle")
            return
        for column in (
            plan.rows,
            plan.q_start,
            plan.q_len,
            plan.samples.astype(np.int64),
            plan.window_floor,
            plan.write_from,
            plan.keep_from,
            plan.block_copies,
            plan.slot_copies,
        ):
            self._hash.update(column.astype("<i8").tobytes())
        width = int(kv.num_blocks[plan.rows].max(initial=0))
        self._hash.update(kv.block_tables[plan.rows, :width].astype("<i8").tobytes())

    def output(self, output: StepOutput) -> None:
        """Add an output."""
        self.steps += 1
        for column in (output.numbers, output.index, output.tokens, output.finish):
            self._hash.update(column.astype("<i8").tobytes())

    def hexdigest(self) -> str:
        """The hash of all that was added."""
        return self._hash.hexdigest()


class RecordingScheduler(Scheduler):
    """A scheduler that writes down what it is asked."""

    def __init__(
        self,
        kv: KVManager,
        limits: SchedulerLimits,
        *,
        sink: IO[str],
        reason: str,
        resume: ResumeRules | None = None,
        root_key: bytes | None = None,
        hooks: RowHooks | None = None,
    ) -> None:
        """sink: text file that gets the trace; `finish` writes its last line. reason: one line."""
        super().__init__(kv, limits, resume=resume, root_key=root_key, hooks=hooks)
        self._sink = sink
        self._seen = StreamHash()
        self._streams: dict[int, list[int]] = {}
        self._ends: dict[int, tuple[int, Ended]] = {}
        self._write(
            {
                "version": VERSION,
                "reason": reason,
                "blocks": kv.stats().blocks.total + 1,
                "rows": len(kv.held),
                "max_blocks": kv.block_tables.shape[1],
                "block_tokens": kv.block_tokens,
                "limits": asdict(limits),
                "resume": None if resume is None else asdict(resume),
                "root_key": None if root_key is None else root_key.hex(),
            }
        )

    def enqueue(self, request: NewRequest, now: float) -> int:
        """See `Scheduler`; refused requests are not recorded."""
        number = super().enqueue(request, now)
        known = {field.name: getattr(request, field.name) for field in fields(request)}
        known |= {"prompt": request.prompt.tolist(), "payload": None}
        self._write(["enqueue", now, known])
        return number

    def cancel(self, request_id: str, now: float) -> StepOutput | None:
        """See `Scheduler`."""
        self._write(["cancel", now, request_id])
        output = super().cancel(request_id, now)
        if output is not None:
            self._seen.output(output)
        return output

    def fail(self, request_id: str, error: HeadraceError, now: float) -> StepOutput | None:
        """See `Scheduler`."""
        self._write(["fail", now, request_id, error.message, error.code])
        output = super().fail(request_id, error, now)
        if output is not None:
            self._seen.output(output)
        return output

    def preempt(self, request_id: str, now: float) -> None:
        """See `Scheduler`."""
        self._write(["preempt", now, request_id])
        super().preempt(request_id, now)

    def ready(self, request_id: str, why: str, now: float) -> None:
        """See `Scheduler`."""
        self._write(["ready", now, request_id, why])
        super().ready(request_id, why, now)

    def plan(
        self, now: float, budget: int | None = None, votes: Items[Vote] | None = None
    ) -> StepPlan | None:
        """See `Scheduler`."""
        self._write(["plan", now, budget, votes])
        plan = super().plan(now, budget, votes)
        self._seen.plan(plan, self.kv)
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> StepOutput:
        """See `Scheduler`; a trace has at most one plan in flight."""
        self._write(["commit", now])
        output = super().commit(plan, result, now)
        self._seen.output(output)
        columns = zip(output.numbers.tolist(), output.tokens.tolist(), strict=True)
        for entry, (number, token) in enumerate(columns):
            stream = self._streams.setdefault(number, [])
            if output.ended is not None and entry in output.ended:
                self._ends[number] = (len(stream), output.ended[entry])
            stream.append(token)
        return output

    def finish(self) -> None:
        """Write the last line; the trace is complete."""
        ends = {number: [at, end.stop, end.stop_cut] for number, (at, end) in self._ends.items()}
        self._write(
            {
                "streams": self._streams,
                "ends": ends,
                "steps": self._seen.steps,
                "hash": self._seen.hexdigest(),
            }
        )

    def _write(self, value: object) -> None:
        self._sink.write(json.dumps(value, separators=(",", ":")) + "\n")


class Replay:
    """A trace fed to a fresh scheduler."""

    def __init__(self, lines: Iterable[str]) -> None:
        """lines: of a complete trace. Raises ConfigError for another version."""
        self._header, *self._events, self._footer = map(json.loads, lines)
        if self._header.get("version") != VERSION:
            raise ConfigError(
                f"The trace has version {self._header.get('version')}, not {VERSION}."
            )
        self.reason: str = self._header["reason"]
        self.recorded_hash: str = self._footer["hash"]

    def run(self, sink: IO[str] | None = None, reason: str = "") -> tuple[str, Scheduler]:
        """Replay all calls: the hash, and the scheduler as it is then.

        sink: gets a trace of this run, with `reason`.
        """
        scheduler = self._scheduler(sink, reason)
        seen = StreamHash()
        plan: StepPlan | None = None
        for call, now, *arguments in self._events:
            if call == "plan":
                budget, votes = arguments
                plan = scheduler.plan(now, budget, votes and [Vote(*vote) for vote in votes])
                seen.plan(plan, scheduler.kv)
            elif call == "commit":
                if plan is not None:
                    seen.output(scheduler.commit(plan, self._result(scheduler, plan), now))
            elif call == "enqueue":
                scheduler.enqueue(_request(arguments[0]), now)
            else:
                if call == "fail":
                    request_id, message, code = arguments
                    arguments = [request_id, rebuild_error(code, message)]
                output = getattr(scheduler, call)(*arguments, now)
                if output is not None:
                    seen.output(output)
        if isinstance(scheduler, RecordingScheduler):
            scheduler.finish()
        return seen.hexdigest(), scheduler

    def _scheduler(self, sink: IO[str] | None, reason: str) -> Scheduler:
        header = self._header
        kv = KVManager(
            BlockPool(header["blocks"]),
            header["rows"],
            header["max_blocks"],
            block_tokens=header["block_tokens"],
        )
        limits = SchedulerLimits(**header["limits"])
        resume = None if header["resume"] is None else ResumeRules(**header["resume"])
        root = None if header["root_key"] is None else bytes.fromhex(header["root_key"])
        if sink is None:
            return Scheduler(kv, limits, resume=resume, root_key=root)
        return RecordingScheduler(
            kv, limits, sink=sink, reason=reason, resume=resume, root_key=root
        )

    def _result(self, scheduler: Scheduler, plan: StepPlan) -> StepResult:
        """What the requests of a plan drew at these positions when the trace was recorded."""
        streams, ends = self._footer["streams"], self._footer["ends"]
        positions = (plan.q_start + plan.q_len)[plan.samples].tolist()
        tokens, ended = [], {}
        for place, (row, position) in enumerate(
            zip(plan.sampling_rows.tolist(), positions, strict=True)
        ):
            if not scheduler.kv.held[row]:  # cancelled since
                tokens.append(_UNRECORDED)
                continue
            sequence = scheduler.sequence(row)
            number, index = str(sequence.number), position - sequence.prompt_length
            stream = streams.get(number, [])
            tokens.append(stream[index] if index < len(stream) else _UNRECORDED)
            if number in ends and ends[number][0] == index:
                ended[place] = Ended(*ends[number][1:])
        return StepResult(np.array(tokens, dtype=np.int32), ended or None)


def _request(known: dict[str, Any]) -> NewRequest:
    known = {name: tuple(v) if isinstance(v, list) else v for name, v in known.items()}
    return NewRequest(**{**known, "prompt": np.array(known["prompt"], dtype=np.int32)})
