"""scripts/sanitize.py without a card: what it makes of reports; no verdict is not a clean one."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import sanitize

CLEAN = {
    "memcheck": "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
}
FAULTY = {
    "memcheck": (
        "========= Invalid __global__ read of size 4 bytes\n========= ERROR SUMMARY: 2 errors\n"
    ),
    "racecheck": "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n",
}


@pytest.mark.parametrize("tool", list(sanitize.SUMMARIES))
def test_verdicts(tool: str):
    assert sanitize.verdict(tool, CLEAN[tool], "7 passed in 3s", 0).errors == 0
    assert "0 errors in 7 tests" in sanitize.verdict(tool, CLEAN[tool], "7 passed in 3s", 0).text
    assert sanitize.verdict(tool, FAULTY[tool], "7 passed in 3s", 0).errors
    # One report holds a summary for each process.
    assert sanitize.verdict(tool, CLEAN[tool] + FAULTY[tool], "7 passed", 0).errors
    warned = "RACECHECK SUMMARY: 3 hazards displayed (0 errors, 3 warnings)"
    assert sanitize.verdict("racecheck", warned, "7 passed", 0).errors == 3


@pytest.mark.parametrize("tool", list(sanitize.SUMMARIES))
def test_no_verdict_is_not_a_clean_one(tool: str):
    assert sanitize.verdict(tool, "", "7 passed", 0).errors is None
    assert sanitize.verdict(tool, "Error: Device not supported", "7 passed", 0).errors is None
    assert sanitize.verdict(tool, CLEAN[tool], "1 failed, 6 passed", 1).errors is None
    assert sanitize.verdict(tool, CLEAN[tool], "7 skipped", 0).errors is None


class Machine:
    """Stands for the tools: answers each command, writes the reports it is told to."""

    def __init__(self, reports: dict[str, str], alone: tuple[int, str] = (0, "7 passed")) -> None:
        self.reports = reports
        self.alone = alone
        self.commands: list[Sequence[str]] = []

    def run(self, command: Sequence[str]) -> tuple[int, str]:
        self.commands.append(command)
        if "--tool" not in command:
            return self.alone
        log = command[command.index("--log-file") + 1]
        Path(log).write_text(self.reports[command[command.index("--tool") + 1]])
        return 0, "7 passed"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.setattr(sanitize, "REPORTS", tmp_path / "reports")
    monkeypatch.setattr(sanitize.shutil, "which", lambda name, path=None: f"/opt/{name}")
    return monkeypatch


@pytest.mark.parametrize(
    ("reports", "code"),
    [
        (CLEAN, 0),
        (CLEAN | {"memcheck": FAULTY["memcheck"]}, 1),
        (CLEAN | {"racecheck": FAULTY["racecheck"]}, 1),
        (CLEAN | {"racecheck": ""}, 2),
        ({"memcheck": "", "racecheck": FAULTY["racecheck"]}, 1),
    ],
)
def test_exit_codes(installed: pytest.MonkeyPatch, reports: dict[str, str], code: int):
    machine = Machine(reports)
    installed.setattr(sanitize, "run", machine.run)
    assert sanitize.main(["-k", "hc"]) == code
    assert len(machine.commands) == 3  # one tool's finding does not keep the other from running
    for command in machine.commands:
        assert command[-2:] == ["-k", "hc"]


def test_tests_must_pass_without_a_sanitizer(
    installed: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for alone in ((1, "1 failed, 6 passed"), (0, "7 skipped"), (124, "stopped")):
        machine = Machine(CLEAN, alone)
        installed.setattr(sanitize, "run", machine.run)
        assert sanitize.main([]) == 1
        assert len(machine.commands) == 1
        assert "nothing was checked" in capsys.readouterr().out


def test_missing_sanitizer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sanitize.shutil, "which", lambda name, path=None: None)
    assert sanitize.main([]) == 2
    assert "CUDA toolkit" in capsys.readouterr().out


def test_runs_without_caching_and_stops_what_hangs(monkeypatch: pytest.MonkeyPatch):
    code = "import os; print(os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING']); raise SystemExit(3)"
    assert sanitize.run([sys.executable, "-c", code]) == (3, "1\n")
    monkeypatch.setattr(sanitize, "TIMEOUT_S", 0.01)
    status, output = sanitize.run(["sleep", "60"])
    assert status == 124
    assert re.search("stopped after", output)
