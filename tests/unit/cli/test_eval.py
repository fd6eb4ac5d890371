from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import eval_run
from headrace.cli.eval_run import EvalCommand, run
from headrace.errors import ConfigError
from headrace.eval.english import LENGTHS, Loss
from headrace.eval.items import FIRST_TEST_SEED
from headrace.eval.jobs import Outcome
from headrace.eval.run import EvalOptions, Result

RIGHT = Result("copying", "words", True, FIRST_TEST_SEED, True, None, "a b", "a b", 3)
WRONG = Result("copying", "words", True, FIRST_TEST_SEED + 1, False, None, "x", "a b", 2)


def command(**changes: Any) -> EvalCommand:
    defaults: dict[str, Any] = {
        "model": None,
        "families": ("copying",),
        "seed": FIRST_TEST_SEED,
        "count": 2,
        "as_json": False,
        "replay": "bounded",
        "truncate": None,
        "ablation": "none",
        "failures": 0,
        "jobs": 1,
        "dtype": "float32",
    }
    return EvalCommand(**{**defaults, **changes})


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[EvalOptions]:
    """`evaluate` gives one right and, for seeds from the next one on, one wrong answer."""
    seen: list[EvalOptions] = []

    def evaluate(options: EvalOptions, todo: Any, **_: Any) -> Outcome:
        seen.append(options)
        results = [RIGHT] if todo[0].count == 1 else [RIGHT, WRONG]
        losses = [Loss(length, 0, "x", 512.0, 256) for length in LENGTHS]
        return Outcome(results, losses if any(t.family == "english" for t in todo) else [])

    monkeypatch.setattr(eval_run, "evaluate", evaluate)
    return seen


def test_all_gates_reached_is_exit_code_0_and_a_missed_one_1(
    answered: list[EvalOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(count=1)) == 0
    assert "MISS" not in capsys.readouterr().out
    assert run(command(failures=1)) == 1
    shown = capsys.readouterr().out
    assert "MISS" in shown
    assert f"seed {FIRST_TEST_SEED + 1}" in shown and "'x'" in shown


def test_json_has_scores_perplexity_and_failures(
    answered: list[EvalOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(families=("copying", "english"), as_json=True, failures=3)) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["scores"][0]["share"] == 0.5 and not shown["scores"][0]["passed"]
    assert shown["perplexity"]["8192"] == pytest.approx(2.718281828**2)
    assert [failure["answer"] for failure in shown["failures"]] == ["x"]


def test_the_options_reach_the_examiner_and_the_embedded_model_is_the_default(
    answered: list[EvalOptions],
) -> None:
    run(command(replay="exact", truncate="off", ablation="no-engram"))
    run(command(model=Path("/some/where")))
    assert answered[0].model.parts[-3:] == ("headrace", "assets", "tiny")
    assert (answered[0].replay, answered[0].truncate) == ("exact", "off")
    assert answered[0].ablation == "no-engram"
    assert answered[1].model == Path("/some/where")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"families": ("recal",)}, "family"),
        ({"count": 0}, "n"),
        ({"seed": -1}, "seed"),
        ({"jobs": 0}, "jobs"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(command(**changes))
    assert caught.value.param == named


def test_training_seeds_are_pointed_out(
    answered: list[EvalOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    run(command(seed=5))
    assert "training" in capsys.readouterr().err
    run(command())
    assert "training" not in capsys.readouterr().err
