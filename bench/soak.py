"""The engine under a random load that its memory is too small for; then every answer is checked.

Requests of all kinds (long and short, shared prefixes, several choices, stop strings, penalties,
log probabilities, priorities) come in waves, are cancelled and preempted. After `--seconds` the
engine is drained: all blocks and rows are free, every choice has had gapless indices and exactly
one end. Then answers are run again, each alone on a fresh engine without prefix cache: the same
tokens, stops and bits of log probabilities (fp32, batch-invariant operators, `exact` replay). With
`--default` the numeric mode of serving runs, in which answers may differ. One line of JSON; exit
code 1 on any violation. All choices come from `--seed` and the engine's own steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from soak_answers import Answer, Ledger, difference, repeated_share
from soak_load import MAX_TOKENS, Amount, Load

from headrace.config import EngineConfig
from headrace.core.output import FinishReason
from headrace.core.protocols import Tokenizer
from headrace.core.request import Request
from headrace.core.rng import choice_seed
from headrace.engine.engine import Engine
from headrace.engine.load import numerics_of
from headrace.engine.stats import EngineStats
from headrace.errors import Overloaded
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from headrace.platforms import CpuPlatform

EXACT = EngineConfig(
    batch_invariant=True,
    replay="exact",
    max_model_len=MAX_TOKENS,
    num_blocks=15,  # hardly two requests of full length, or half a dozen short ones
    max_num_seqs=12,
    max_num_batched_tokens=192,
    max_waiting=40,
    ageing_steps=100,
)
DEFAULT = replace(EXACT, batch_invariant=False, replay="bounded")
FEWEST_OF_BURST = 10
CHECK_STEPS = 64  # the block accounting is verified whenever so many steps have passed
# Bounded replay and batches change answers in the default mode, they must not make them repeat.
MAX_MORE_REPEATED = 0.1


class Soak:
    """One engine under load, with its ledger."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        config: EngineConfig,
        seed: int,
        amount: Amount = Amount(),  # noqa: B008 - frozen
    ) -> None:
        self.engine = Engine(config, model, tokenizer=tokenizer)
        self.load = Load(seed, model.spec.vocab_size, amount)
        self._amount = amount
        self.ledger = Ledger()
        self.refused = 0
        self.forced_preemptions = 0
        self.preempted: set[str] = set()  # by force
        self.aborts: set[str] = set()

    def run(self, over: Callable[[int], bool]) -> None:
        """Load the engine until `over(steps)`, then let it finish what it has."""
        steps = 0
        while not over(steps):
            self._arrive()
            self._interfere()
            self._step()
            steps += 1
            if steps % CHECK_STEPS == 0:
                self._check_blocks()
        while self.engine.has_work():
            self._step()
        self._check_blocks()
        self._check_drained()

    def _arrive(self) -> None:
        load, count = self.load, self.load.arrivals()
        for _ in range(count):
            # Bursts overfill the queue, the usual load stays below its limit.
            if count < FEWEST_OF_BURST and len(self.ledger.live) >= self._amount.in_flight:
                break
            request = load.request()
            try:
                self.engine.add(request)
            except Overloaded:
                self.refused += 1
                continue
            self.ledger.open(request)
            if load.chance(0.01):
                self._abort(request.request_id)

    def _interfere(self) -> None:
        load, live = self.load, list(self.ledger.live)
        if live and load.chance(self._amount.aborts):
            self._abort(live[load.below(len(live))])
        rows = np.flatnonzero(self.engine.scheduler.kv.held)
        if rows.size and load.chance(self._amount.preemptions):
            name = self.engine.scheduler.sequence(int(rows[load.below(rows.size)])).name[0]
            before = self.engine.stats().preemptions
            self.engine.scheduler.preempt(name, time.monotonic())
            self.forced_preemptions += self.engine.stats().preemptions - before
            self.preempted.add(name)
        if load.chance(0.01):
            self._abort(f"r{load.below(10_000)}")  # most likely one that has ended, or nobody's

    def _abort(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self.aborts.add(request_id)

    def _step(self) -> None:
        for chunk in self.engine.step():
            answer = self.ledger.take(chunk)
            if answer is not None and answer.finish is not FinishReason.ABORT:
                self.load.answered(answer.request.prompt_token_ids, tuple(answer.tokens))

    def _check_blocks(self) -> None:
        kv = self.engine.scheduler.kv
        kv.check()  # raises InternalError
        blocks = kv.stats().blocks
        if blocks.free + blocks.used + blocks.pinned != blocks.total:
            self.ledger.violations.append(f"blocks do not add up: {blocks}")

    def _check_drained(self) -> None:
        violations, stats = self.ledger.violations, self.engine.stats()
        if self.ledger.live:
            violations.append(f"never ended: {sorted(self.ledger.live)}")
        if stats.free_blocks != stats.total_blocks:
            violations.append(f"{stats.total_blocks - stats.free_blocks} blocks are not free")
        if self.rows_held or stats.running or stats.waiting:
            violations.append(f"{self.rows_held} rows held, {stats.running} run, {stats.waiting}")
        aborted = {
            name for (name, _), a in self.ledger.answers.items() if a.finish is FinishReason.ABORT
        }
        if aborted - self.aborts:
            violations.append(f"cancelled by nobody: {sorted(aborted - self.aborts)}")

    @property
    def rows_held(self) -> int:
        """Rows (with their slots) in use."""
        return int(np.count_nonzero(self.engine.scheduler.kv.held))


class Alone:
    """Runs one choice of a request as the only request of a fresh engine."""

    def __init__(self, model: Model, tokenizer: Tokenizer, config: EngineConfig) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._config = replace(
            config,
            prefix_cache=False,
            num_blocks=MAX_TOKENS // 128 + 1,
            max_num_seqs=1,
            max_num_batched_tokens=MAX_TOKENS,
        )

    def run(self, request: Request, choice: int, max_tokens: int | None) -> Answer:
        """The answer; `max_tokens` as it should be or, for a cancelled request, as far as it got.

        Choice k of a request is a request of its own with the k-th seed.
        """
        params = request.sampling
        params = replace(
            params,
            n=1,
            seed=choice_seed(params.seed or 0, choice),
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens or params.min_tokens),
        )
        engine = Engine(self._config, self._model, tokenizer=self._tokenizer)
        ledger = Ledger()
        ledger.open(replace(request, sampling=params))
        engine.add(replace(request, sampling=params))
        while engine.has_work():
            for chunk in engine.step():
                ledger.take(chunk)
        (answer,) = ledger.answers.values()
        return answer


@dataclass(slots=True)
class Comparison:
    """Answers that were run again alone."""

    checked: int = 0
    checked_tokens: int = 0
    checked_preempted: int = 0  # by force
    different: list[str] = field(default_factory=list)
    repeated: list[tuple[float, float]] = field(default_factory=list)  # under load, alone

    def mean_repeated(self) -> tuple[float, float]:
        """Mean of `repeated_share` over long answers under load, and alone."""
        under_load, alone = np.array(self.repeated).reshape(-1, 2).T
        return (float(under_load.mean()), float(alone.mean())) if self.repeated else (0.0, 0.0)


def compare(soak: Soak, alone: Alone, seed: int, over: Callable[[int], bool]) -> Comparison:
    """Run answers alone until all are done or `over(checked)`.

    Their order is random: an answer comes first with a probability that falls with its length, and
    is four times as great for requests that were preempted by force.
    """
    answers = soak.ledger.answers
    names = [name for name, answer in answers.items() if answer.tokens]
    cost = np.array([16 + len(answers[name].tokens) for name in names], dtype=np.float64)
    cost /= [4 if name in soak.preempted else 1 for name, _ in names]
    result = Comparison()
    for number in np.argsort(np.random.default_rng(seed).exponential(cost)).tolist():
        if over(result.checked):
            break
        name = names[number]
        found = answers[name]
        cut = len(found.tokens) if found.finish is FinishReason.ABORT else None
        again = alone.run(found.request, name[1], cut or found.request.sampling.max_tokens)
        what = difference(name, found, again)
        if what is not None:
            result.different.append(f"{name}: {what}")
        if len(again.tokens) >= 32:
            result.repeated.append((repeated_share(found.tokens), repeated_share(again.tokens)))
        result.checked += 1
        result.checked_tokens += len(again.tokens)
        result.checked_preempted += name[0] in soak.preempted
    return result


def violations(soak: Soak, comparison: Comparison, equal: bool) -> list[str]:
    """All that was wrong. equal: whether answers must be those of running alone."""
    found = list(soak.ledger.violations)
    if equal:
        found += comparison.different
    under_load, alone = comparison.mean_repeated()
    if under_load > alone + MAX_MORE_REPEATED:
        found.append(f"answers repeat themselves: {under_load:.3f}, alone {alone:.3f}")
    return found


def summary(soak: Soak, comparison: Comparison) -> dict[str, Any]:
    """The numbers of a run."""
    stats: EngineStats = soak.engine.stats()
    answers = soak.ledger.answers
    aborted = {name for (name, _), a in answers.items() if a.finish is FinishReason.ABORT}
    requests = {name for name, _ in answers}
    rows = soak.engine.capacity.num_slots - 1
    return {
        "requests": len(requests),
        "finished": len(requests - aborted - set(soak.ledger.live)),
        "aborted": len(aborted),
        "refused": soak.refused,
        "answers": len(answers),
        "steps": stats.steps,
        "drawn_tokens": stats.drawn_tokens,
        "preemptions": stats.preemptions,
        "forced_preemptions": soak.forced_preemptions,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "replayed": stats.replayed_rows,
        "forks": soak.engine.scheduler.forks,
        "checked_alone": comparison.checked,
        "checked_tokens": comparison.checked_tokens,
        "checked_preempted": comparison.checked_preempted,
        "different": len(comparison.different),
        "repeated_share": [round(share, 4) for share in comparison.mean_repeated()],
        "free": stats.free_blocks,
        "total": stats.total_blocks,
        "free_rows": rows - soak.rows_held,
        "total_rows": rows,
    }


def _until(seconds: float, what: str, soak: Soak) -> Callable[[int], bool]:
    """Whether the time is over; says on stderr how it goes."""
    start = time.monotonic()
    told = [start]

    def over(count: int) -> bool:
        now = time.monotonic()
        if now - told[0] >= 10:
            told[0] = now
            stats = soak.engine.stats()
            print(
                f"{now - start:.0f}/{seconds:.0f} s, {count} {what}, {len(soak.ledger.answers)} "
                f"answers, {stats.running} run, {stats.waiting} wait, {stats.preemptions} "
                f"preemptions, {len(soak.ledger.violations)} violations",
                file=sys.stderr,
            )
        return now - start >= seconds

    return over


def _lines(options: argparse.Namespace, directory: Path) -> Iterator[str]:
    """Run; the violations."""
    from headrace.model.tiny import write_tiny
    from headrace.recipe.tokenizer import Tokenizer as RecipeTokenizer

    config = DEFAULT if options.default else EXACT
    write_tiny(directory, preset="tiny-8", seed=1)
    model = load_model(directory, numerics_of(config))
    tokenizer = RecipeTokenizer.from_directory(directory)
    soak = Soak(model, tokenizer, config, options.seed)
    soak.run(_until(options.seconds, "steps", soak))
    alone = Alone(model, tokenizer, config)
    seconds = options.seconds / 2 if options.alone_seconds is None else options.alone_seconds
    over = _until(seconds, "run again alone", soak)
    comparison = compare(soak, alone, options.seed, over)
    line = {
        "name": "soak.default" if options.default else "soak",
        "seconds": options.seconds,
        "seed": options.seed,
        **summary(soak, comparison),
        "env": {**asdict(CpuPlatform().fingerprint()), "cores": CpuPlatform().cores()},
    }
    print(json.dumps(line), flush=True)
    yield from violations(soak, comparison, equal=not options.default)


def main() -> int:
    """Run and print; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="of load (default 600)")
    parser.add_argument("--alone-seconds", type=float, help="of the check (default: half)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--default", action="store_true", help="numeric mode of serving, no claim of equality"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = list(_lines(options, Path(scratch) / "tiny-8"))
    for line in found[:20]:
        print(f"violation: {line}", file=sys.stderr)
    if len(found) > 20:
        print(f"and {len(found) - 20} more", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
