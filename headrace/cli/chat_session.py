"""What `headrace chat` does once its arguments are read: load, then question and answer in turn.

Contract: settings, tokenizer and tools are refused before weights are read. A turn is either in the
history as a whole (question, and the answer as far as it was shown) or not at all: one that failed,
or was stopped before it said anything, leaves no trace. Called by `cli/chat.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from headrace.assets import embedded_model
from headrace.cli.chat_screen import AnswerInterrupts, ChatScreen
from headrace.cli.generate_progress import GenerateScreen
from headrace.cli.prompt_file import PromptEncoder
from headrace.config import (
    EngineConfig,
    build_section,
    check_sections,
    read_settings,
    unknown_variables,
)
from headrace.core.files import require_checkpoint
from headrace.core.output import FinishReason
from headrace.core.sampling import SamplingParams
from headrace.engine.answers import TextChunk
from headrace.errors import HeadraceError, InvalidRequest
from headrace.recipe import Codec, Conversation, PromptText, SystemMessage, UserMessage
from headrace.recipe.conversation import (
    AssistantMessage,
    Message,
    ToolCall,
    ToolDefinition,
    ToolMessage,
)
from headrace.recipe.converted import ParsingOptions, ThinkingStage
from headrace.recipe.protocols.chat import convert_chat
from headrace.serve.model_card import read_note

EXIT_LINES_FAILED = 1
HELP = """/reset          forget the conversation
/think on|off   switch thinking
/result TEXT    give the result of a tool call
/exit           leave (also Ctrl-D); Ctrl-C stops an answer
//...           a message that begins with a slash"""

_EMBEDDED = (
    'A small test model. It knows sums, sorting, counting, copying and capitals: "What is 27 + 58?"'
)


class ChatModel(Protocol):
    """What a chat needs of a model; `LLM` has it."""

    def stream(self, prompt: tuple[int, ...], /, sampling: SamplingParams) -> Iterator[TextChunk]:
        """An answer as it grows; closing the iterator aborts it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The command line. overrides: dotted settings, None = not given."""

    checkpoint: Path
    sampling: SamplingParams
    system: str | None = None
    tools_path: Path | None = None
    thinking: bool = True
    config_path: Path | None = None
    overrides: Mapping[str, object] = field(default_factory=dict)


def chat(options: ChatOptions) -> int:
    """Run the command; returns its exit code. Raises HeadraceError."""
    settings = read_settings(options.config_path, overrides=options.overrides)
    check_sections(settings, ("engine", "server"))
    config = build_section(EngineConfig, "engine", settings)
    require_checkpoint(options.checkpoint)
    codec = Codec.from_directory(options.checkpoint)
    tools = () if options.tools_path is None else read_tools(options.tools_path, codec)
    screen, loading = ChatScreen(), GenerateScreen()
    for warning in unknown_variables():
        loading.note(f"warning: {warning}")
    if read_note(options.checkpoint).get("random") is True:
        loading.note("NOTE: random weights, every answer is random text")
    # Imported here: torch takes seconds, and most refusals come before it is needed.
    from headrace.engine.llm import LLM

    try:
        llm = LLM(options.checkpoint, config, progress=loading.loading)
    finally:
        loading.close()
    with llm:
        encoder = PromptEncoder(codec, llm.engine.spec.bos_id, llm.engine.max_model_len)
        session = ChatSession(llm, encoder, screen, options, tools)
        if screen.interactive:
            screen.note(f"{options.checkpoint.name}: /help lists commands, Ctrl-D leaves")
            if options.checkpoint == embedded_model():
                screen.note(_EMBEDDED)
        return session.run()


def read_tools(path: Path, codec: Codec) -> tuple[ToolDefinition, ...]:
    """The tools of a JSON file, by the rules of the server. Raises InvalidRequest."""
    try:
        tools = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}.", param="tools") from error
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON: {error}.", param="tools") from error
    body = {"model": "chat", "messages": [{"role": "user", "content": "-"}], "tools": tools}
    return convert_chat(msgspec.json.encode(body), codec.options("chat")).conversation.tools


class ChatSession:
    """The conversation so far, and what a line of the user does to it."""

    def __init__(
        self,
        model: ChatModel,
        encoder: PromptEncoder,
        screen: ChatScreen,
        options: ChatOptions,
        tools: tuple[ToolDefinition, ...] = (),
    ) -> None:
        self._model = model
        self._encoder = encoder
        self._screen = screen
        self._options = options
        self._tools = tools
        self.thinking = options.thinking
        self.failed = 0
        self._unanswered: list[ToolCall] = []  # calls whose results have not been given
        self._results: list[Message] = []
        self.messages: tuple[Message, ...] = ()
        self._reset()

    def run(self) -> int:
        """Answer lines until the user leaves; returns the exit code."""
        with AnswerInterrupts(self._screen.interactive) as interrupts:
            for line in self._screen.lines():
                try:
                    if not self.take(line, interrupts):
                        break
                except HeadraceError as error:
                    self.failed += 1
                    self._screen.note(f"error: {error.message}")
        return EXIT_LINES_FAILED if self.failed and not self._screen.interactive else 0

    def take(self, line: str, interrupts: AnswerInterrupts) -> bool:
        """One line: a message or a command; False: the user leaves. Raises HeadraceError."""
        if line.startswith("//"):
            self._ask(line[1:], interrupts)
        elif not line.startswith("/"):
            self._ask(line, interrupts)
        else:
            return self._command(line, interrupts)
        return True

    def _command(self, line: str, interrupts: AnswerInterrupts) -> bool:
        match line.split(maxsplit=1):
            case ["/exit" | "/quit"]:
                return False
            case ["/help"]:
                self._screen.note(HELP)
            case ["/reset"]:
                self._reset()
                self._screen.note("The conversation is forgotten.")
            case ["/think", "on" | "off" as word]:
                self.thinking = word == "on"
                self._screen.note(f"Thinking is {word}.")
            case ["/result", text]:
                self._result(text, interrupts)
            case _:
                raise InvalidRequest(f"unknown command {line!r}; there are:\n{HELP}")
        return True

    def _reset(self) -> None:
        system = self._options.system
        self.messages = () if system is None else (SystemMessage(PromptText.of(system)),)
        self._unanswered, self._results = [], []

    def _ask(self, text: str, interrupts: AnswerInterrupts) -> None:
        if self._unanswered:
            names = ", ".join(call.name for call in self._unanswered)
            raise InvalidRequest(f"give the result of {names} first: /result TEXT (or /reset).")
        self._answer((UserMessage(PromptText.of(text)),), interrupts)

    def _result(self, text: str, interrupts: AnswerInterrupts) -> None:
        if not self._unanswered:
            raise InvalidRequest("no tool call waits for a result.")
        call = self._unanswered[0]
        results = [*self._results, ToolMessage(PromptText.of(text), call.id)]
        if len(self._unanswered) > 1:
            self._unanswered, self._results = self._unanswered[1:], results
            self._screen.note(f"The next result is that of {self._unanswered[0].name}.")
            return
        # On failure the result may be given once more.
        self._answer(tuple(results), interrupts)

    def _answer(self, new: tuple[Message, ...], interrupts: AnswerInterrupts) -> None:
        """Ask with `new` behind the history, show the answer, and keep both."""
        conversation = Conversation((*self.messages, *new), self.thinking, self._tools)
        stage = ThinkingStage.REASONING_START if self.thinking else None
        parsing = ParsingOptions(parse_tool_calls=bool(self._tools), thinking_stage=stage)
        prompt = self._encoder.conversation(conversation, parsing, self._options.sampling)
        reasoning, content = [], []
        finish = FinishReason.ABORT
        chunks = self._model.stream(prompt.token_ids, prompt.sampling)
        interrupts.begin()
        try:
            for chunk in chunks:
                delta = prompt.parser.push(_text_tokens(chunk))
                reasoning.append(delta.reasoning)
                content.append(delta.content)
                self._show(delta.reasoning, delta.content)
                if chunk.finish is FinishReason.ERROR:
                    raise HeadraceError(chunk.error or "The request failed.")
                finish = chunk.finish or finish
                if interrupts.requested:
                    break
            last = prompt.parser.finish(stopped=finish is FinishReason.STOP)
            self._show(last.reasoning, last.content)
        finally:
            interrupts.end()
            close = getattr(chunks, "close", None)
            if close is not None:
                close()
            self._screen.answer_ended()
        self._keep(
            new,
            "".join((*reasoning, last.reasoning)),
            "".join((*content, last.content)),
            # What a stopped answer was about to call is not known.
            prompt.parser.calls if finish is FinishReason.STOP else [],
        )
        if finish is FinishReason.LENGTH:
            self._screen.note("(the answer was cut at its token limit)")
        elif finish is FinishReason.ABORT:
            self._screen.note("(stopped)")

    def _show(self, reasoning: str, content: str) -> None:
        self._screen.thought(reasoning)
        self._screen.content(content)

    def _keep(
        self,
        new: tuple[Message, ...],
        reasoning: str,
        content: str,
        named: list[tuple[str, str]],
    ) -> None:
        if not content and not named:
            return
        first = sum(isinstance(message, AssistantMessage) for message in self.messages)
        calls = tuple(
            ToolCall(f"call_{first}_{number}", name, arguments)
            for number, (name, arguments) in enumerate(named)
        )
        thought = reasoning if self.thinking else None
        self.messages = (
            *self.messages,
            *new,
            AssistantMessage(content, thought, calls or None),
        )
        self._unanswered, self._results = list(calls), []
        for call in calls:
            self._screen.call(call.name, call.arguments)
        if calls:
            self._screen.note("(/result TEXT gives what the call returned)")


def _text_tokens(chunk: TextChunk) -> tuple[int, ...]:
    """The ids that are text: all but the EOS that ended the answer."""
    ended = chunk.finish is FinishReason.STOP and not isinstance(chunk.stop, str)
    return chunk.token_ids[:-1] if ended else chunk.token_ids
