"""An evaluation in several processes: the same results, and an end whatever happens to them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest

from headrace.assets import embedded_model
from headrace.errors import CheckpointError, HeadraceError
from headrace.eval import jobs
from headrace.eval.items import FIRST_TEST_SEED
from headrace.eval.jobs import evaluate, tasks
from headrace.eval.run import EvalOptions

OPTIONS = EvalOptions(embedded_model())
TODO = tasks(("copying", "sorting"), FIRST_TEST_SEED, 2)


def test_two_processes_find_what_one_finds() -> None:
    told: list[str] = []
    alone, shared = (
        evaluate(OPTIONS, TODO, processes=n, progress=lambda task: told.append(task.family))
        for n in (1, 2)
    )
    assert sorted(map(str, alone.results)) == sorted(map(str, shared.results))
    assert alone.prompt_work == shared.prompt_work and set(shared.prompt_work) == set(told)
    assert sorted(told) == ["copying", "copying", "sorting", "sorting"]


def test_what_a_checkpoint_raises_in_a_process_comes_back(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((embedded_model() / name).read_bytes())
    with pytest.raises(CheckpointError, match="holds neither"):
        evaluate(EvalOptions(tmp_path), TODO, processes=2)


def test_a_process_that_is_killed_ends_the_evaluation() -> None:
    over = threading.Event()

    def kill() -> None:
        # Every child that was spawned, until the evaluation has noticed.
        own = os.getpid()
        while not over.wait(0.02):
            for child in Path(f"/proc/{own}/task/{own}/children").read_text().split():
                with contextlib.suppress(OSError):
                    if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                        os.kill(int(child), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(HeadraceError, match="--jobs 1"):
            evaluate(OPTIONS, TODO, processes=2)
    finally:
        over.set()
        killer.join()
    assert not jobs._worker  # this process did nothing itself
