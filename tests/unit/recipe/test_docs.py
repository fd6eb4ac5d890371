"""docs/recipe.md: its examples run, and its tables name every difference and its tests."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import headrace.recipe
from tests.unit.recipe import golden

ROOT = Path(__file__).resolve().parents[3]
TESTS = Path(__file__).parent
DOC = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([a-z0-9-]+)` \|.*\| (.+) \|$", re.MULTILINE)
# In a comment, or at the start of a docstring.
MARK = re.compile(r'(?:# |""")clients: (\S+)')


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOC, re.MULTILINE | re.DOTALL)


def marks() -> set[str]:
    found: set[str] = set()
    for path in Path(headrace.recipe.__file__).parent.rglob("*.py"):
        found |= set(MARK.findall(path.read_text(encoding="utf-8")))
    return {name.rstrip(".,;") for name in found}


def test_every_difference_in_the_code_has_a_row() -> None:
    names = [name for name, _ in ROW.findall(DOC)]
    assert len(names) == len(set(names)) > 60
    assert sorted(marks() - set(names)) == []


def test_every_row_names_tests_that_exist() -> None:
    missing = []
    for name, cell in ROW.findall(DOC):
        tests = re.findall(r"`(\w+)::(\w+)`", cell)
        if not tests:
            missing.append(name)
        for module, function in tests:
            tree = ast.parse((TESTS / f"{module}.py").read_text(encoding="utf-8"))
            defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            if function not in defined:
                missing.append(f"{name}: {module}::{function}")
    assert missing == []


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that the examples need."""
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "tokenizer.json").write_bytes(golden.patched_json())
    cases = tmp_path / "golden" / "recipe"
    cases.mkdir(parents=True)
    for name in ("tokenizer_patch.json", "image_tokens.jsonl.gz"):
        shutil.copy(golden.GOLDEN / name, cases)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_python_examples_run(workplace: Path) -> None:
    names: dict[str, object] = {}
    examples = blocks("python")
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, "docs/recipe.md", "exec"), names)


def test_the_shell_examples_run(workplace: Path) -> None:
    shown = []
    for example in blocks("sh"):
        command = re.sub(r"\bheadrace (?=recipe|check)", "python -m headrace.cli.main ", example)
        command = command.replace("python -m", f"'{sys.executable}' -m")
        done = subprocess.run(
            ["sh", "-ec", command],
            cwd=workplace,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout)
    requests, check = shown
    assert "Hi<｜Assistant｜><think>" in requests
    assert '"reasoning_content":"Hm."' in requests and requests.endswith("data: [DONE]\n\n")
    assert "ok   image_tokens" in check
