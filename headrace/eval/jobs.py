"""The whole evaluation, cut into tasks for several processes.

Contract: results do not depend on the number of processes. Called by `headrace eval tiny`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache

from headrace.errors import HeadraceError
from headrace.eval.english import Loss, held_out, losses
from headrace.eval.families import FAMILIES
from headrace.eval.plan import Question, questions
from headrace.eval.run import EvalOptions, Examiner, PromptWork, Result

ENGLISH = "english"
EVERYTHING = (*FAMILIES, ENGLISH)
# Questions of one task. In the last steps of a task only its longest answers are left.
_PART = 128


@dataclass(frozen=True, slots=True)
class Task:
    """Questions first .. last-1 of a family, or one piece of English (`first`)."""

    family: str
    seed: int
    count: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Done:
    """What one task found out. prompt_work: None for English, which asks nothing."""

    task: Task
    results: list[Result] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    prompt_work: PromptWork | None = None


@dataclass(slots=True)
class Outcome:
    """What was found out so far. prompt_work: by family that was asked."""

    results: list[Result] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    prompt_work: dict[str, PromptWork] = field(default_factory=dict)

    def add(self, done: Done) -> None:
        """Take the findings of one task in."""
        self.results += done.results
        self.losses += done.losses
        family = done.task.family
        if done.prompt_work is not None:
            before = self.prompt_work.get(family, PromptWork())
            self.prompt_work[family] = before + done.prompt_work


def tasks(families: Sequence[str], seed: int, count: int) -> list[Task]:
    """All tasks, the longest first."""
    result = []
    for family in sorted(families, key=lambda name: name not in ("recall", ENGLISH, "tools")):
        if family == ENGLISH:
            result += [Task(family, seed, count, piece, piece + 1) for piece in first_pieces()]
            continue
        first = 0
        for part in _parts(questions(family, seed, count), family):
            result.append(Task(family, seed, count, first, first + len(part)))
            first += len(part)
    return result


def first_pieces() -> list[int]:
    """The first held-out piece of every source of English."""
    places: dict[str, int] = {}
    for place, (source, _) in enumerate(held_out()):
        places.setdefault(source, place)
    return list(places.values())


def _parts(asked: list[Question], family: str) -> Iterator[list[Question]]:
    """Runs of questions; those of one sample stay together, since they share their text."""
    size = 32 if family == "recall" else _PART
    part: list[Question] = []
    for question in asked:
        new = not part or (question.seed, question.item.part) != (part[-1].seed, part[-1].item.part)
        if len(part) >= size and new:
            yield part
            part = []
        part.append(question)
    if part:
        yield part


class Worker:
    """Does tasks with one examiner."""

    def __init__(self, options: EvalOptions) -> None:
        self._examiner = Examiner(options)

    def do(self, task: Task) -> Done:
        """The results of one task."""
        examiner = self._examiner
        if task.family == ENGLISH:
            model = examiner.model
            found = losses(model, examiner.tokenizer, task.first, model.spec.bos_id)
            return Done(task, losses=found)
        asked = _questions(task.family, task.seed, task.count)[task.first : task.last]
        before = examiner.prompt_work()
        results = examiner.ask(asked)
        return Done(task, results, prompt_work=examiner.prompt_work() - before)


@lru_cache(maxsize=16)
def _questions(family: str, seed: int, count: int) -> list[Question]:
    return questions(family, seed, count)


# Options of a process of the pool, and its worker once it has had a task.
_options: list[EvalOptions] = []
_worker: list[Worker] = []


def _start(options: EvalOptions) -> None:
    _options.append(options)


def _do(task: Task) -> Done:
    if not _worker:  # here, so that what a checkpoint raises comes back like any other error
        _worker.append(Worker(_options[0]))
    return _worker[0].do(task)


def evaluate(
    options: EvalOptions,
    todo: Sequence[Task],
    *,
    processes: int = 1,
    progress: Callable[[Task], None] = lambda task: None,
) -> Outcome:
    """Do all tasks. `progress` is told every finished one.

    Raises the errors of a checkpoint and of an engine config, and HeadraceError where a process of
    the pool is killed.
    """
    outcome = Outcome()
    for done in _done(options, todo, processes):
        outcome.add(done)
        progress(done.task)
    return outcome


def _done(options: EvalOptions, todo: Sequence[Task], processes: int) -> Iterator[Done]:
    if processes == 1:
        yield from map(Worker(options).do, todo)
        return
    # Spawned: operators may have threads, which a fork would lose.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(todo)), context, _start, (options,)) as pool:
        futures = [pool.submit(_do, task) for task in todo]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise HeadraceError(
                "A process of the evaluation was ended, perhaps because memory ran out. Try again "
                "with fewer (--jobs 1)."
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
