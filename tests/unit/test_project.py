"""The project itself: command line frame, import rules, scripts."""

from __future__ import annotations

import ast
import errno
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nvidia_packages
import pack_golden
import pytest
import readme_check
import size_budget

import headrace
from headrace import errors
from headrace.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(headrace.__file__).resolve().parent
COMMANDS = [
    ["serve"],
    ["generate"],
    ["chat"],
    ["tiny"],
    ["check", "model"],
    ["check", "recipe"],
    ["recipe", "render"],
    ["recipe", "encode"],
    ["recipe", "count"],
    ["recipe", "decode"],
    ["eval", "tiny"],
    ["ops"],
]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )


def run_cli(*arguments: str, stdout: object = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        cwd=ROOT,
    )


def exit_code(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    return int(stopped.value.code), capsys.readouterr().err


# --- command line ----------------------------------------------------------------------------


def test_help_teaches_and_loads_no_command():
    result = run_python(
        "import sys\n"
        "from headrace.cli.main import run\n"
        "run(['--help'])\n"
        "loaded = {'torch', 'numpy', 'starlette', 'headrace.cli.serve'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    assert result.returncode == 0, result.stderr
    for word in (
        "serve",
        "generate",
        "tiny",
        "check",
        "ops",
        "headrace serve my-model",
        "Exit codes",
    ):
        assert word in result.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_of_each_command(command: list[str]):
    result = run_cli(*command, "--help")
    assert result.returncode == 0, result.stderr
    assert f"headrace {' '.join(command)}" in result.stdout
    assert "Parameters" in result.stdout
    summary = next(c.summary for c in cli._COMMANDS if list(c.path) == command)
    # The docstring of the command itself, not the line of the overview.
    assert len(result.stdout) > len(summary) + 400


def test_version(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == headrace.__version__


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["serv"], "unknown command 'serv'. Did you mean 'serve'?\nSee `headrace --help`."),
        (["check", "modl"], "Did you mean 'model'?\nSee `headrace check --help`."),
        (["tiny", "--no-such-option"], "See `headrace tiny --help`."),
    ],
)
def test_usage_errors_exit_2(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str):
    code, stderr = exit_code(capsys, *arguments)
    assert code == 2
    assert stderr.startswith("error: ")
    assert text in stderr


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (errors.InvalidRequest("bad field"), 2, "error: bad field\n"),
        (errors.CheckpointError("no shard"), 3, "error: no shard\n"),
        (errors.OutputError("disk full"), 4, "error: disk full\n"),
        (errors.EngineLost("gone"), 1, "error: gone\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 4, "error: output could not be written"),
        (KeyboardInterrupt(), 130, "error: interrupted.\n"),
        (BrokenPipeError(), 141, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_exceptions_become_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: BaseException,
    code: int,
    text: str,
):
    def fail(arguments: list[str]) -> int:
        raise raised

    monkeypatch.setattr(cli, "run", fail)
    got, stderr = exit_code(capsys, "ops")
    assert got == code
    assert stderr.startswith(text)
    assert "Traceback" not in stderr


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    def fail(arguments: list[str]) -> int:
        raise FileNotFoundError(errno.ENOENT, "a bug")

    monkeypatch.setattr(cli, "run", fail)
    with pytest.raises(FileNotFoundError):
        cli.main(["ops"])


def test_full_disk_on_stdout_exits_4():
    with open("/dev/full", "w") as full:
        result = run_cli("--version", stdout=full)
    assert result.returncode == 4
    assert result.stderr.startswith("error: output could not be written")
    assert "Traceback" not in result.stderr


# --- import and house rules ------------------------------------------------------------------


@pytest.mark.parametrize(
    "modules",
    [
        "headrace",
        "headrace.core.request, headrace.core.kv, headrace.core.sampling, headrace.core.output",
        "headrace.recipe",
        "headrace.engine.scheduler, headrace.kv, headrace.kv.resume, headrace.core.hashing",
    ],
)
def test_import_does_not_load_torch(modules: str):
    result = run_python(f"import sys, {modules}\nassert 'torch' not in sys.modules")
    assert result.returncode == 0, result.stderr


def test_public_names_resolve():
    assert len(headrace.__all__) <= 15
    for name in headrace.__all__:
        assert getattr(headrace, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = headrace.no_such_name


def test_environment_is_read_in_config_only():
    reads = re.compile(r"os\.environ|getenv|environb")
    found = [
        path.relative_to(ROOT).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        if "config" not in path.relative_to(PACKAGE).parts[:1]
        and reads.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_dependencies_are_declared_and_used():
    imported = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                imported.add(node.module.split(".")[0])
            elif (
                isinstance(node, ast.Call)
                and getattr(node.func, "attr", "") == "import_module"
                and isinstance(node.args[0], ast.Constant)
            ):
                imported.add(node.args[0].value.split(".")[0])
    imported = {{"PIL": "pillow"}.get(name, name) for name in imported}
    imported -= sys.stdlib_module_names | {"headrace"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = list(project["dependencies"])
    for extra in ("compiled", "triton", "xgrammar"):
        lines += extras[extra]
    declared = {re.split("[<>=;]", line)[0].replace("-", "_") for line in lines}
    assert imported == declared


@pytest.mark.parametrize("script", sorted((ROOT / "bench").glob("*.py")), ids=lambda p: p.name)
def test_what_benchmarks_import_exists(script: Path):
    """They run seldom, and what they use may be renamed meanwhile."""
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace")):
            continue
        try:
            module = importlib.import_module(node.module)
        except ModuleNotFoundError as error:
            assert not (error.name or "").startswith("headrace"), node.module
            continue  # a library of an extra that is not installed here
        for alias in node.names:
            place = (
                importlib.util.find_spec(f"{node.module}.{alias.name}")
                if hasattr(module, "__path__")
                else None
            )
            assert hasattr(module, alias.name) or place, f"{node.module}.{alias.name}"


def test_version_is_stated_once():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{headrace.__version__}"' in project
    assert f"## {headrace.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_links_in_documents_lead_somewhere():
    link = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("tests/**/*.md")]
    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in documents
        for target in link.findall(document.read_text(encoding="utf-8"))
        if not (document.parent / target).exists()
    ]
    assert broken == []


# --- scripts ---------------------------------------------------------------------------------


def test_size_budget_finds_long_functions_and_files():
    body = "\n".join(["    pass"] * size_budget.MAX_FUNCTION_LINES)
    long = f"def long():\n{body}\n"
    short = f"def short():\n{body[:-9]}\n"
    assert list(size_budget.findings("headrace/a.py", short)) == []
    assert "function long has 61 lines" in next(size_budget.findings("headrace/a.py", long))
    told = long.replace("def long():", 'def long():\n    """One.\n\n    More.\n    """')
    assert "function long has 61 lines" in next(size_budget.findings("headrace/a.py", told))
    assert list(size_budget.findings("tests/a.py", long)) == []
    assert list(size_budget.findings("headrace/ops/triton/a.py", long)) == []
    assert list(size_budget.findings("headrace/a.py", "\n" * 600)) == []
    assert "601 lines" in next(size_budget.findings("tests/a.py", "\n" * 601))


def test_size_budget_reads_the_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "headrace").mkdir()
    (tmp_path / "headrace" / "a.py").write_text("x = 1\n")
    assert size_budget.main(tmp_path) == 0
    (tmp_path / "headrace" / "b.py").write_text("x = 1\n" * 601)
    assert size_budget.main(tmp_path) == 1
    assert capsys.readouterr().out.startswith("headrace/b.py: 601 lines")


def test_cuda_packages_are_recognised():
    plan = {"install": [{"metadata": {"name": n}} for n in ("torch", "nvidia-cublas", "numpy")]}
    assert nvidia_packages.cuda_packages(plan) == ["nvidia-cublas"]
    listed = json.loads(
        '[{"name": "torch"}, {"name": "NVIDIA-nccl-cu13"}, {"name": "cuda-bindings"}]'
    )
    assert nvidia_packages.cuda_packages(listed) == ["NVIDIA-nccl-cu13", "cuda-bindings"]
    assert nvidia_packages.cuda_packages([{"name": "torch"}]) == []


def test_golden_cases_round_trip(tmp_path: Path):
    source = tmp_path / "source" / "a_case"
    source.mkdir(parents=True)
    (source / "big.bin").write_bytes(bytes(range(256)) * 4)
    (source / "config.json").write_text("{}")
    packed = tmp_path / "packed"
    pack_golden.pack(source.parent, packed)
    first = {path.name: path.read_bytes() for path in packed.iterdir()}
    pack_golden.pack(source.parent, packed)
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == first
    folder = pack_golden.unpack("a_case", tmp_path / "out", packed)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        p.name: p.read_bytes() for p in source.iterdir()
    }
    assert pack_golden.unpack("a_case", tmp_path / "out", packed) == folder


def test_golden_damage_and_unknown_cases_are_refused(tmp_path: Path):
    source = tmp_path / "source" / "a_case"
    source.mkdir(parents=True)
    (source / "config.json").write_text("{}")
    packed = tmp_path / "packed"
    pack_golden.pack(source.parent, packed)
    sums = packed / pack_golden.SUMS
    sums.write_text(sums.read_text().replace(sums.read_text()[:4], "0000", 1))
    with pytest.raises(ValueError, match=r"a_case/config\.json"):
        pack_golden.unpack("a_case", tmp_path / "out", packed)
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(ValueError, match="there are: a_case"):
        pack_golden.unpack("other", tmp_path / "out", packed)


def test_golden_files_are_small():
    files = [path for path in (ROOT / "tests" / "golden").rglob("*") if path.is_file()]
    assert max(path.stat().st_size for path in files) <= 2 * 1024**2
    assert pack_golden.cases() == ["v41_a", "v41_dims", "v41_fp8", "v41_smooth", "v4_tiny"]


def test_readme_blocks_have_the_parts_the_check_needs():
    blocks = readme_check.code_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    kinds = [readme_check.kind(block) for block in blocks]
    assert kinds.count("serve") == 1
    assert kinds.count("test") == 1
    assert kinds.count("request") == 1
    assert kinds.index("serve") < kinds.index("request") < kinds.index("test")


def test_readme_check_recognises_a_streamed_answer():
    chunk = '{"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}'
    last = '{"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}'
    stream = f"data: {chunk}\n\ndata: {chunk}\n\ndata: {last}\n\ndata: [DONE]\n\n"
    assert readme_check.streamed_chunks(stream) == 3
    with pytest.raises(ValueError, match=r"\[DONE\]"):
        readme_check.streamed_chunks(f"data: {chunk}\n\n")
    with pytest.raises(ValueError, match="finish_reason"):
        readme_check.streamed_chunks(f"data: {chunk}\n\ndata: [DONE]\n\n")
    with pytest.raises(ValueError, match="error"):
        readme_check.streamed_chunks('{"error":{"message":"no"}}')
