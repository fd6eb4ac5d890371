"""Recorded traces: the scheduler plans today what it planned when they were recorded."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest

from headrace.engine.scheduler import Scheduler
from headrace.engine.trace import Replay
from headrace.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "golden" / "traces"
TRACES = sorted(FOLDER.glob("*.jsonl.gz"))


def lines(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines()


@pytest.mark.parametrize("path", TRACES, ids=[path.name.split(".")[0] for path in TRACES])
def test_a_recorded_trace_is_planned_bit_for_bit_as_it_was(path: Path) -> None:
    replay = Replay(lines(path))
    digest, scheduler = replay.run()
    assert digest == replay.recorded_hash, (
        "The scheduler plans something else than recorded. If that is meant: "
        "python scripts/record_traces.py --reason '...'"
    )
    assert replay.reason
    stats = scheduler.stats(0.0)
    assert len(scheduler) == 0 and stats.free_blocks == stats.total_blocks
    scheduler.kv.check()


def test_the_traces_reach_what_is_rare() -> None:
    totals: dict[str, float] = {}
    for path in TRACES:
        _, scheduler = Replay(lines(path)).run()
        stats = scheduler.stats(0.0)
        for name in ("preemptions", "aborted", "failed", "prefix_hit_tokens", "replayed_rows"):
            totals[name] = totals.get(name, 0) + getattr(stats, name)
        totals["copied"] = totals.get("copied", 0) + scheduler.forks
    assert len(TRACES) == 3 and all(totals.values()), totals


def test_recording_a_replay_gives_the_trace_again() -> None:
    before = lines(TRACES[0])
    sink = io.StringIO()
    Replay(before).run(sink, reason="another reason")
    after = sink.getvalue().splitlines()
    assert json.loads(after[0]) == json.loads(before[0]) | {"reason": "another reason"}
    assert after[1:] == before[1:]


def test_another_policy_gives_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(lines(TRACES[0]))
    plain = Scheduler.plan
    monkeypatch.setattr(Scheduler, "plan", lambda self, now, *rest: plain(self, now, 10))
    digest, _ = replay.run()
    assert digest != replay.recorded_hash


def test_a_trace_of_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="version 0"):
        Replay(['{"version":0}', '{"hash":""}'])
