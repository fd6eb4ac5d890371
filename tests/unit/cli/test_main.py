"""The frame of the command line: Ctrl-C at any time, names in errors, what tables say."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.cli.serve_run import StartUpScreen, other_logs
from headrace.config.server import ServerConfig
from headrace.serve.log import RequestLogger
from headrace.serve.run import open_socket
from headrace.serve.state import ModelCard

# Sends SIGINT to itself when a module is imported, so that it always comes in the same place.
# A test run in the background of a script inherits an ignored SIGINT: take the usual one back.
INTERRUPTED_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupt:
    due = True
    def find_spec(self, name, path=None, target=None):
        if name == {module!r} and self.due:
            self.due = False
            for _ in range({signals}):
                os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from headrace.cli.main import main
main({arguments!r})
"""


def exit_and_text(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("cyclopts", ["--help"]),
        ("headrace.cli.ops", ["ops"]),
        ("torch", ["ops"]),
        ("headrace.config", ["serve", "nowhere"]),
        ("headrace.recipe", ["generate", "nowhere", "hello"]),
    ],
)
def test_ctrl_c_while_modules_load(module: str, arguments: list[str], signals: int) -> None:
    code = INTERRUPTED_IMPORT.format(module=module, arguments=arguments, signals=signals)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 130, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    # The second one may come before the first one has been reported.
    assert result.stderr in (
        ["error: interrupted.\n"] if signals == 1 else ["", "error: interrupted.\n"]
    )


def test_the_handler_of_ctrl_c_is_given_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert exit_and_text(capsys, "--version")[0] == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_unknown_words_of_a_group_get_the_groups_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_and_text(capsys, "check", "ops") == (
        2,
        "",
        "error: unknown command 'ops'. Known: model, recipe.\nSee `headrace check --help`.\n",
    )
    assert (
        "Known: chat, check, eval, generate, ops, plan, recipe, serve, tiny."
        in exit_and_text(capsys, "xyzzy")[2]
    )


def test_case_directories_are_positional_only(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = exit_and_text(capsys, "check", "model", "--help")
    assert code == 0
    assert "--DIR" not in text
    assert "--empty" not in text
    code, _, text = exit_and_text(capsys, "check", "model", "/nowhere/a", "/nowhere/b")
    assert (code, "/nowhere/a" in text) == (3, True)


def test_ops_has_a_header_and_reasons_that_explain(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = exit_and_text(capsys, "ops")
    header, *rows = text.splitlines()
    assert (code, header.split()) == (0, ["OPERATOR", "USES", "OTHERS"])
    assert any("fixed_tile: slower, only chosen for batch_invariant" in row for row in rows)
    assert "priority" not in text
    code, text, _ = exit_and_text(capsys, "ops", "--json")
    assert all(json.loads(line)["chosen"] for line in text.splitlines())


def test_errors_name_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, text = exit_and_text(capsys, "serve", str(tmp_path), "--port", "99999")
    assert (code, "--port (server.port): must be" in text) == (2, True)
    code, _, text = exit_and_text(capsys, "generate", str(tmp_path), "hello", "--batch", "0")
    assert (code, "--batch (engine.max_num_seqs) must be" in text) == (2, True)


def test_a_port_in_use_is_said_once() -> None:
    with open_socket(ServerConfig(port=0)) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(Exception, match="in use") as caught:
            open_socket(ServerConfig(port=port))
    assert str(caught.value).lower().count("address") == 1
    assert str(caught.value).count(str(port)) == 1


# --- what `serve` says ------------------------------------------------------------------------


def speak(log_format: str, capsys: pytest.CaptureFixture[str]) -> str:
    config = ServerConfig(log_format=log_format)
    screen = StartUpScreen(Path("my-model"), config, RequestLogger(log_format))
    screen.warn("HEADRACE_X is no variable")
    screen.listening("http://here")
    screen.progress(1, 2)
    screen.ready("http://here", ModelCard("m", 0, 99, description="Random weights"))
    for running in (0, 1, 2):
        screen.draining(running, 60)
    screen.stopped(1, 2)
    return capsys.readouterr().err


def test_sentences_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    text = speak("text", capsys)
    for sentence in (
        "headrace: warning: HEADRACE_X is no variable",
        "headrace: serving m at http://here (context 99 tokens)",
        "headrace: stopping; no request is running",
        "headrace: stopping; 1 running request has 60 s to finish",
        "headrace: stopping; 2 running requests have 60 s to finish",
        "headrace: stopped; 1 running request finished, 2 cut off",
    ):
        assert f"{sentence}" in text


def test_every_line_is_json_where_json_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    events = [json.loads(line) for line in speak("json", capsys).splitlines()]
    names = ["warning", "loading", "serving", "note", *["stopping"] * 3, "stopped"]
    assert [event["event"] for event in events] == names
    assert (events[2]["model"], events[2]["url"]) == ("m", "http://here")
    assert (events[-1]["finished"], events[-1]["cut"]) == (1, 2)


def test_lines_of_uvicorn_are_lines_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("uvicorn.error")
    with other_logs("json"):
        log.warning("Exceeded concurrency limit.\n")
        try:
            raise ValueError("broken")
        except ValueError as error:
            log.error("Exception in ASGI application", exc_info=error)
    assert log.handlers == []
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["event"], first["level"]) == ("Exceeded concurrency limit.", "warning")
    assert (second["level"], "ValueError: broken" in second["exception"]) == ("error", True)
