"""An evaluation in several processes: the same results, and an end whatever happens to them."""

from __future__ import annotations

import os
import signal
import threading
import time
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
    def kill() -> None:
        # Whoever is a child of ours and spawned by the pool: wait until one is there.
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for entry in (
                Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            ):
                if b"spawn_main" in Path(f"/proc/{entry}/cmdline").read_bytes():
                    os.kill(int(entry), signal.SIGKILL)
                    return
            time.sleep(0.05)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(HeadraceError, match="--jobs 1"):
        evaluate(OPTIONS, TODO, processes=2)
    killer.join()
    assert not jobs._worker  # this process did nothing itself
