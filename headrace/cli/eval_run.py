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
from headrace.engine.load import numerics_of
from headrace.errors import ConfigError
from headrace.eval.ablation import Ablation, reach
from headrace.eval.english import perplexities
from headrace.eval.items import FIRST_TEST_SEED
from headrace.eval.jobs import EVERYTHING, Outcome, Task, evaluate, tasks
from headrace.eval.run import EvalOptions, PromptWork
from headrace.eval.scores import Score, flat, scores, table
from headrace.model.spec import ModelSpec

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
    kv_quant: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """What is printed. reach: see `ablation.reach`; None without an ablation."""

    command: EvalCommand
    numerics: dict[str, object]
    reach: int | None
    outcome: Outcome
    lines: list[Score]
    perplexity: dict[int, float]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether no gate is missed."""
        flat_enough = not self.perplexity or flat(self.perplexity)
        return flat_enough and all(line.passed for line in self.lines)


def run(command: EvalCommand) -> int:
    """Evaluate and print; returns the exit code. Raises HeadraceError."""
    _check(command)
    options = EvalOptions(
        model=checkpoint_path(command.model),
        replay=command.replay,
        truncate=command.truncate,
        ablation=Ablation(command.ablation),
        dtype=command.dtype,
        kv_quant=command.kv_quant,
    )
    spec = ModelSpec.from_directory(options.model)
    needed = _reach(spec, options.ablation)
    todo = tasks(command.families or EVERYTHING, command.seed, command.count)
    started = time.monotonic()
    with _progress(todo) as advance:
        outcome = evaluate(options, todo, processes=_processes(command.jobs), progress=advance)
    report = _Report(
        command=command,
        numerics=_numerics(options, spec),
        reach=needed,
        outcome=outcome,
        lines=scores(outcome.results, needed or 0),
        perplexity=perplexities(outcome.losses),
        seconds=time.monotonic() - started,
    )
    if command.as_json:
        print(json.dumps(_as_json(report)))
    else:
        _show(report)
    return 0 if report.passed else EVAL_FAILED


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


def _reach(spec: ModelSpec, ablation: Ablation) -> int | None:
    needed = reach(spec, ablation)
    if ablation is not Ablation.NONE and needed is None:
        raise ConfigError(
            f"--ablation {ablation} would change nothing: the model has no such part.",
            param="ablation",
        )
    return needed


def _numerics(options: EvalOptions, spec: ModelSpec) -> dict[str, object]:
    """What was computed with: how the weights are stored, and the numeric mode of the engine."""
    weights = "bf16" if spec.quant is None else f"fp8, experts {spec.quant.expert_dtype}"
    return {"weights": weights, **asdict(numerics_of(options.engine_config()))}


def _as_json(report: _Report) -> dict[str, object]:
    command, outcome = report.command, report.outcome
    wrong = [asdict(result) for result in outcome.results if not result.right]
    return {
        "model": str(command.model or "embedded"),
        "numerics": report.numerics,
        "seed": command.seed,
        "n": command.count,
        "replay": command.replay,
        "truncate": command.truncate,
        "ablation": command.ablation,
        "ablation_reach": report.reach,
        "scores": [line.as_dict() for line in report.lines],
        "perplexity": report.perplexity,
        "prompt_work": {family: asdict(work) for family, work in outcome.prompt_work.items()},
        "seconds": round(report.seconds, 1),
        "passed": report.passed,
        "failures": wrong[: command.failures],
    }


def _show(report: _Report) -> None:
    command, outcome = report.command, report.outcome
    print(table(report.lines, report.perplexity))
    _show_failures(outcome, command.failures)
    print(f"\n{len(outcome.results)} answers in {report.seconds:.0f} s")
    print(f"numerics: {', '.join(f'{name} {value}' for name, value in report.numerics.items())}")
    # A comparison whose option touched nothing says nothing.
    work = sum(outcome.prompt_work.values(), PromptWork())
    if work.prompt:
        print(
            f"prefix cache: {work.hit} of {work.prompt} prompt tokens found, {work.replayed} rows "
            f"replayed ({command.replay})"
        )
    if report.reach is not None:
        unreached = sorted({line.family for line in report.lines if line.reached == 0})
        print(
            f"{command.ablation} changes contexts of {report.reach} tokens and up"
            + (f"; none is as long in: {', '.join(unreached)}" if unreached else "")
        )


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
