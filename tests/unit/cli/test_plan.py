"""`headrace plan memory` prints the plan, or says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from tests.unit.model.released_configs import v41_flash


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "memory", *arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(v41_flash()))
    return path


def test_text(config: Path, capsys: pytest.CaptureFixture[str]):
    assert run("--model", str(config), "--gpus", "8xH200") == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "4", "8"]
    assert "GiB a GPU" in out and "188.8 GiB of host memory" in out


def test_json_of_a_directory(config: Path, capsys: pytest.CaptureFixture[str]):
    code = run("--model", str(config.parent), "--gpus", "2x80GB", "--json", "--context", "100")
    plan = json.loads(capsys.readouterr().out)
    assert code == 1  # nothing fits
    assert (plan["context"], [row["gpus"] for row in plan["rows"]]) == (100, [1, 2])
    assert all(row["short_bytes"] > 0 for row in plan["rows"])


def test_the_default_context_is_one_that_the_model_has(
    config: Path, capsys: pytest.CaptureFixture[str]
):
    for most, expected in ((None, 8192), (1000, 1000)):
        fields = v41_flash()
        if most is not None:
            fields["text_config"]["max_position_embeddings"] = most
        config.write_text(json.dumps(fields))
        run("--model", str(config), "--gpus", "8xH200", "--json")
        assert json.loads(capsys.readouterr().out)["context"] == expected


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--gpus", "8xH999"), 2, "--gpus '8xH999' is unknown, allowed: 8xH200"),
        (("--gpus", "-1xH200"), 2, "--gpus '-1xH200' is unknown, allowed: 8xH200"),
        (("--gpus", "8xH200", "--context", "0"), 2, "--context must be in"),
        (("--gpus", "8xH200", "--model", "missing.json"), 3, "missing.json"),
    ],
)
def test_errors(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    words: str,
):
    given = arguments if "--model" in arguments else ("--model", str(config), *arguments)
    assert run(*given) == code
    assert words in capsys.readouterr().err
