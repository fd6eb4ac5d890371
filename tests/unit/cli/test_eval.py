from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.assets import embedded_model
from headrace.cli import eval_run
from headrace.cli.eval_run import EvalCommand, run
from headrace.errors import ConfigError
from headrace.eval.english import LENGTHS, Loss
from headrace.eval.items import FIRST_TEST_SEED
from headrace.eval.jobs import Outcome
from headrace.eval.run import EvalOptions, PromptWork, Result
from headrace.model.tiny import write_tiny

RIGHT = Result("copying", "words", True, FIRST_TEST_SEED, True, None, "a b", "a b", 3, 97)
WRONG = Result("copying", "words", True, FIRST_TEST_SEED + 1, False, None, "x", "a b", 2, 1000)


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
        english = any(t.family == "english" for t in todo)
        return Outcome(results, losses if english else [], {"copying": PromptWork(1097, 768, 128)})

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
    answered: list[EvalOptions], tmp_path: Path
) -> None:
    run(command(replay="exact", truncate="off", ablation="no-engram", kv_quant=False))
    shutil.copy(embedded_model() / "config.json", tmp_path)
    run(command(model=tmp_path))
    assert answered[0].model.parts[-3:] == ("headrace", "assets", "tiny")
    assert (answered[0].replay, answered[0].truncate) == ("exact", "off")
    assert answered[0].ablation == "no-engram"
    assert (answered[0].kv_quant, answered[1].kv_quant) == (False, True)
    assert answered[1].model == tmp_path


def test_json_names_the_numerics_and_what_the_prefix_cache_did(
    answered: list[EvalOptions], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = json.loads((embedded_model() / "config.json").read_text("utf-8"))
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    run(command(as_json=True))
    run(command(as_json=True, model=tmp_path, dtype="bfloat16", kv_quant=False))
    stored, plain = map(json.loads, capsys.readouterr().out.splitlines())
    assert stored["numerics"]["weights"] == "fp8, experts fp4"
    assert (stored["numerics"]["kv_quant"], stored["numerics"]["dtype"]) == (True, "float32")
    assert plain["numerics"]["weights"] == "bf16"
    assert (plain["numerics"]["kv_quant"], plain["numerics"]["dtype"]) == (False, "bfloat16")
    assert stored["prompt_work"] == {"copying": {"prompt": 1097, "hit": 768, "replayed": 128}}


def test_an_ablation_says_what_it_cannot_reach(
    answered: list[EvalOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    run(command(count=1, ablation="half-candidates"))
    assert "none is as long in: copying" in capsys.readouterr().out
    run(command(ablation="half-candidates"))
    assert "changes contexts of 129 tokens and up\n" in capsys.readouterr().out
    run(command(ablation="half-candidates", as_json=True))
    shown = json.loads(capsys.readouterr().out)
    assert (shown["ablation_reach"], shown["scores"][0]["reached"]) == (129, 1)


def test_an_ablation_of_a_part_that_is_not_there_is_refused(
    answered: list[EvalOptions], tmp_path: Path
) -> None:
    write_tiny(tmp_path, preset="v4-tiny", seed=1)
    with pytest.raises(ConfigError, match="no such part"):
        run(command(model=tmp_path, ablation="no-engram"))
    assert not answered


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
