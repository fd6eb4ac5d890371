"""`headrace chat` with a scripted model: history, commands, Ctrl-C, pipes, calls, terminals."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.assets import embedded_model
from headrace.cli.chat_screen import AnswerInterrupts, ChatScreen
from headrace.cli.chat_session import ChatOptions, ChatSession, read_tools
from headrace.cli.checkpoint import checkpoint_path
from headrace.cli.prompt_file import PromptEncoder
from headrace.core.output import FinishReason
from headrace.core.sampling import SamplingParams
from headrace.engine.answers import TextChunk
from headrace.errors import InvalidRequest
from headrace.recipe import Codec
from tests.unit.cli.generate_fakes import write_codec_files

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


class ScriptedModel:
    """Gives the next text of a script token by token, or raises the next error."""

    def __init__(self, codec: Codec, *script: Any) -> None:
        self.codec = codec
        self.script = list(script)
        self.prompts: list[str] = []
        self.sampling: list[SamplingParams] = []
        self.closed = 0
        self.on_token: Any = lambda index: None

    def stream(self, prompt: tuple[int, ...], /, sampling: SamplingParams) -> Iterator[TextChunk]:
        self.prompts.append(self.codec.tokenizer.decode(prompt, skip_special=False))
        self.sampling.append(sampling)
        step = self.script.pop(0)
        try:
            if isinstance(step, Exception):
                raise step
            for index, token in enumerate(encode(self.codec, step)):
                self.on_token(index)
                yield TextChunk("", (token,))
            yield TextChunk("", (1,), FinishReason.STOP)
        finally:
            self.closed += 1


def encode(codec: Codec, text: str) -> list[int]:
    """Ids of a text in which control tokens are spelled out."""
    ids: list[int] = []
    for number, part in enumerate(text.split(codec.special.dsml)):
        ids += [codec.tokenizer.added[codec.special.dsml]] * (number > 0)
        for place, piece in enumerate(part.split(codec.special.thinking_end)):
            ids += [codec.tokenizer.added[codec.special.thinking_end]] * (place > 0)
            ids += codec.tokenizer.encode(piece)
    return ids


class Chat:
    """A session over a scripted model."""

    def __init__(self, directory: Path) -> None:
        self.codec = Codec.from_directory(directory)
        self.options = ChatOptions(
            checkpoint=directory, sampling=SamplingParams(temperature=0.0), thinking=False
        )

    def session(self, *script: Any, tools: Any = (), **changes: Any) -> ChatSession:
        self.model = ScriptedModel(self.codec, *script)
        return ChatSession(
            self.model,
            PromptEncoder(self.codec, 0, 4096),
            ChatScreen(),
            dataclasses.replace(self.options, **changes),
            tools,
        )


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat(write_codec_files(tmp_path_factory.mktemp("chat") / "model"))


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Any:
    def say(session: ChatSession, *lines: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return session.run()

    return say


def test_each_line_is_answered_and_the_history_is_kept(
    chat: Chat, say: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    session = chat.session("First.", "Second.", system="Be brief.")
    assert say(session, "one", "", "two") == 0
    assert capsys.readouterr().out == "First.\nSecond.\n"
    prompt = chat.model.prompts[1]
    places = [prompt.index(text) for text in ("Be brief.", "one", "First.", "two")]
    assert places == sorted(places)
    assert chat.model.closed == 2


def test_reset_forgets_all_but_the_instructions(chat: Chat, say: Any) -> None:
    session = chat.session("First.", "Second.", system="Be brief.")
    say(session, "one", "/reset", "two")
    assert "Be brief." in chat.model.prompts[1]
    assert "one" not in chat.model.prompts[1] and "First." not in chat.model.prompts[1]


def test_thinking_is_switched_and_thoughts_go_to_standard_error(
    chat: Chat, say: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    session = chat.session("A thought</think>An answer", "Plain.")
    assert say(session, "/think on", "one", "/think off", "two") == 0
    captured = capsys.readouterr()
    assert captured.out == "An answer\nPlain.\n"
    assert "A thought\n" in captured.err
    assert session.messages[1].reasoning_content == "A thought"  # type: ignore[union-attr]
    assert chat.model.prompts[0].endswith("<think>")
    assert not chat.model.prompts[1].endswith("<think>")


def test_exit_leaves_and_later_lines_are_not_read(chat: Chat, say: Any) -> None:
    session = chat.session("First.")
    assert say(session, "one", "/exit", "two") == 0
    assert len(chat.model.prompts) == 1


def test_a_slash_can_be_said_and_unknown_commands_fail(
    chat: Chat, say: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    session = chat.session("Yes.")
    assert say(session, "/tmp", "/think maybe", "//tmp") == 1
    assert capsys.readouterr().err.count("unknown command") == 2
    assert "/tmp" in chat.model.prompts[0] and "//tmp" not in chat.model.prompts[0]


def test_a_failed_turn_leaves_no_trace(
    chat: Chat, say: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    session = chat.session(InvalidRequest("refused."), "Fine.")
    assert say(session, "bad one", "good one") == 1
    assert "error: refused." in capsys.readouterr().err
    assert "bad one" not in chat.model.prompts[1]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    session = chat.session("word " * 50, "Again.")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with AnswerInterrupts(True) as interrupts:
            chat.model.on_token = lambda n: n == 10 and os.kill(os.getpid(), signal.SIGINT)
            assert session.take("one", interrupts)
            chat.model.on_token = lambda n: None
            assert session.take("two", interrupts)
            with pytest.raises(KeyboardInterrupt):  # at the prompt it is one
                os.kill(os.getpid(), signal.SIGINT)
                signal.sigtimedwait([], 1)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    captured = capsys.readouterr()
    assert "(stopped)" in captured.err
    assert 0 < captured.out.count("word") < 50
    assert "Again." in captured.out
    assert chat.model.prompts[1].count("word") == captured.out.count("word")


def test_ctrl_c_before_the_first_word_takes_the_question_back(chat: Chat) -> None:
    session = chat.session("A thought", "Again.", thinking=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with AnswerInterrupts(True) as interrupts:
            chat.model.on_token = lambda n: n == 0 and os.kill(os.getpid(), signal.SIGINT)
            session.take("one", interrupts)
    finally:
        signal.signal(signal.SIGINT, before)
    assert session.messages == ()


def test_calls_are_shown_and_their_results_asked_for(
    chat: Chat, say: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([TOOL]))
    session = chat.session(
        call_text(chat.codec), "It is sunny.", tools=read_tools(path, chat.codec)
    )
    assert say(session, "/result x", "Weather?", "Well?", "/result sunny") == 1
    captured = capsys.readouterr()
    lines = captured.out.strip().split("\n")
    assert json.loads(lines[-2]) == {"call": "get_weather", "arguments": {"city": "Rome"}}
    assert lines[-1] == "It is sunny."
    assert "no tool call waits" in captured.err
    assert "give the result of get_weather first" in captured.err
    assert "sunny" in chat.model.prompts[1] and "Rome" in chat.model.prompts[1]


def call_text(codec: Codec) -> str:
    """A call as the model writes it: taken from a prompt that has one in its history."""
    from headrace.recipe import Conversation, PromptText, UserMessage
    from headrace.recipe.conversation import AssistantMessage, ToolCall, ToolDefinition

    call = ToolCall("x", "get_weather", '{"city": "Rome"}')
    said = UserMessage(PromptText.of("Q"))
    tools = (ToolDefinition("get_weather"),)
    start, whole = (
        codec.tokenizer.decode(
            codec.encode(Conversation(messages, False, tools)), skip_special=False
        )
        for messages in ((said,), (said, AssistantMessage("", None, (call,)), said))
    )
    assert whole.startswith(start)
    return whole[len(start) :].partition("<｜end▁of▁sentence｜>")[0]


@pytest.mark.parametrize("content", ["{", '{"a": 1}', '"x"', None])
def test_bad_tools_are_refused(chat: Chat, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tools.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidRequest):
        read_tools(path, chat.codec)


def test_a_terminal_dims_thoughts_and_gets_no_control_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    leader, follower = pty.openpty()
    with open(follower, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr(sys, "stdout", terminal)
        screen = ChatScreen()
        assert screen.interactive
        screen.thought("hidden")
        screen.content("shown\x1b]0;title\x07[bold]")
        screen.answer_ended()
        screen.call("f\x1b", '{"a": [1, "ä"]}')
        terminal.flush()
        # A terminal hands over what it has: the last thing written is the end.
        data = b""
        while 'ä"'.encode() not in data:
            data += os.read(leader, 10_000)
        shown = data.decode()
    os.close(leader)
    assert "\x1b[2mhidden" in shown
    assert "\x1b]0" not in shown and "\x07" not in shown
    assert "[bold]" in shown
    assert '"a": [' in shown and '"ä"' in shown


def shown(capsys: pytest.CaptureFixture[str], *steps: tuple[str, str]) -> tuple[str, str]:
    """What a pipe gets of thoughts and content in this order: (stdout, stderr)."""
    screen = ChatScreen(interactive=False)
    for kind, text in steps:
        (screen.thought if kind == "thought" else screen.content)(text)
    screen.answer_ended()
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_white_space_around_thoughts_and_answers_is_not_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = [
        ("thought", "\n Let me"),
        ("thought", " see. \n"),
        ("content", "\n\n"),
        ("content", "4"),
    ]
    assert shown(capsys, *steps) == ("4\n", "Let me see.\n")
    # Inside it stays, wherever the pieces are cut.
    pieces = [("content", piece) for piece in ("a", " ", "\n", " b\n\n", "c ", "\n")]
    assert shown(capsys, *pieces) == ("a \n b\n\nc\n", "")
    # Before calls models write empty lines: nothing is left of them.
    assert shown(capsys, ("thought", "Use f."), ("content", "\n\n")) == ("", "Use f.\n")
    assert shown(capsys) == ("", "")


def test_answers_do_not_inherit_white_space(capsys: pytest.CaptureFixture[str]) -> None:
    screen = ChatScreen(interactive=False)
    for text in ("one \n", "two"):
        screen.content(text)
        screen.answer_ended()
    screen.call("f", "{}")
    assert capsys.readouterr().out == 'one\ntwo\n{"call": "f", "arguments": {}}\n'


def test_ctrl_d_and_ctrl_c_at_the_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[Any] = ["one", KeyboardInterrupt(), "  ", "two", EOFError()]

    def answer(prompt: str) -> str:
        step = steps.pop(0)
        if isinstance(step, BaseException):
            raise step
        return str(step)

    monkeypatch.setattr("builtins.input", answer)
    assert list(ChatScreen(interactive=True).lines()) == ["one", "two"]
    assert "/exit" in capsys.readouterr().out


def test_the_word_tiny_is_the_embedded_model_unless_a_directory_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert checkpoint_path(None) == checkpoint_path(Path("tiny")) == embedded_model()
    assert checkpoint_path(Path("other")) == Path("other")
    (tmp_path / "tiny").mkdir()
    assert checkpoint_path(Path("tiny")) == Path("tiny")
