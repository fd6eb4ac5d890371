"""What `headrace eval tiny` does once its arguments are read. Called by `cli/eval.py`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.cli.checkpoint import checkpoint_path
from headrace.errors import ConfigError
from headrace.eval.ablation import Ablation
from headrace.eval.english import perplexities
from headrace.eval.items import FIRST_TEST_SEED
from headrace.eval.jobs import EVERYTHING, Outcome, Task, evaluate, tasks
from headrace.eval.run import EvalOptions
from headrace.eval.scores import Score, flat, scores, table

# Exit code of the command line when a gate is missed.
EVAL_FAILED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalCommand:
    """The command line; None and () mean the defaults."""

    model: Path | None
    families: tuple[str, ...]
    seed: int
    count: int
    as_json: bool
    replay: str
    truncate: str | None
    ablation: str
    failures: int
    jobs: int | None
    dtype: str


def run(command: EvalCommand) -> int:
    """Evaluate and print; returns the exit code. Raises HeadraceError."""
    _check(command)
    options = EvalOptions(
        model=checkpoint_path(command.model),
        replay=command.replay,
        truncate=command.truncate,
        ablation=Ablation(command.ablation),
        dtype=command.dtype,
    )
    todo = tasks(command.families or EVERYTHING, command.seed, command.count)
    started = time.monotonic()
    with _progress(todo) as advance:
        outcome = evaluate(options, todo, processes=_processes(command.jobs), progress=advance)
    seconds = time.monotonic() - started
    lines = scores(outcome.results)
    perplexity = perplexities(outcome.losses)
    passed = all(line.passed for line in lines) and (not perplexity or flat(perplexity))
    if command.as_json:
        print(json.dumps(_as_json(command, outcome, lines, perplexity, seconds, passed)))
    else:
        print(table(lines, perplexity))
        _show_failures(outcome, command.failures)
        print(f"\n{len(outcome.results)} answers in {seconds:.0f} s")
    return 0 if passed else EVAL_FAILED


def _check(command: EvalCommand) -> None:
    unknown = [name for name in command.families if name not in EVERYTHING]
    if unknown:
        raise ConfigError(
            f"--family {unknown[0]} is unknown, allowed: {', '.join(EVERYTHING)}.", param="family"
        )
    if command.count < 1:
        raise ConfigError(f"--n must be at least 1, got {command.count}.", param="n")
    if command.seed < 0:
        raise ConfigError(f"--seed must be at least 0, got {command.seed}.", param="seed")
    if command.jobs is not None and command.jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {command.jobs}.", param="jobs")
    if command.seed < FIRST_TEST_SEED:
        print(
            f"note: seeds below {FIRST_TEST_SEED} were used in training: the answers may be known.",
            file=sys.stderr,
        )


def _processes(jobs: int | None) -> int:
    # The operators use one thread each for models of this size.
    return jobs or max(2, min(8, (os.cpu_count() or 2) // 2))


def _as_json(
    command: EvalCommand,
    outcome: Outcome,
    lines: list[Score],
    perplexity: dict[int, float],
    seconds: float,
    passed: bool,
) -> dict[str, object]:
    wrong = [asdict(result) for result in outcome.results if not result.right]
    return {
        "model": str(command.model or "embedded"),
        "seed": command.seed,
        "n": command.count,
        "replay": command.replay,
        "truncate": command.truncate,
        "ablation": command.ablation,
        "scores": [line.as_dict() for line in lines],
        "perplexity": perplexity,
        "seconds": round(seconds, 1),
        "passed": passed,
        "failures": wrong[: command.failures],
    }


def _show_failures(outcome: Outcome, limit: int) -> None:
    shown: dict[str, int] = {}
    for result in outcome.results:
        if result.right or shown.get(result.family, 0) >= limit:
            continue
        shown[result.family] = shown.get(result.family, 0) + 1
        print(f"\n{result.family} ({result.part}), seed {result.seed}:")
        print(f"  expected {result.expected!r}\n  got      {result.answer!r}")


@contextmanager
def _progress(todo: list[Task]) -> Iterator[Callable[[Task], None]]:
    """A bar on stderr while people watch."""
    if not sys.stderr.isatty():
        yield lambda task: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        number = bar.add_task("questions", total=sum(task.last - task.first for task in todo))
        yield lambda task: bar.advance(number, task.last - task.first)
