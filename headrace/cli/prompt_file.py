"""Input of `headrace generate`: JSONL lines -> requests.

Contract: one line is one JSON object with exactly one of `prompt`, `messages` and `token_ids`, an
optional `id` (default: `line-N`) and optional sampling fields that override the flags. `scan` reads
the whole file once and refuses what makes the file as a whole unusable (duplicate ids); every other
fault belongs to its line and is raised as InvalidRequest by `PromptEncoder.encode`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from headrace.core.grammar import GrammarSpec
from headrace.core.protocols import Detokenizer
from headrace.core.request import Request
from headrace.core.rng import choice_seed
from headrace.core.sampling import SamplingParams
from headrace.errors import ContextTooLong, InvalidRequest
from headrace.recipe import (
    AnswerText,
    Codec,
    Conversation,
    PromptText,
    SystemMessage,
    TextDelta,
    UserMessage,
    convert_chat,
)
from headrace.recipe.codec import check_length
from headrace.recipe.constants import DEFAULT_MAX_TOKENS
from headrace.recipe.converted import ParsingOptions, ThinkingStage
from headrace.recipe.grammar.rules import AnswerRules, FormatRule, answer_rules
from headrace.recipe.protocols.json_body import decode_body
from headrace.recipe.protocols.sampling import draft_fields
from headrace.serve.supported import check_supported

# A prompt of a million tokens has about 4 MB; a longer line is not a prompt.
MAX_LINE_BYTES = 64 * 2**20
MAX_NAMED_DUPLICATES = 5
_MODEL = "generate"  # the model's name in a chat request that nobody sends


class PromptLine(msgspec.Struct, forbid_unknown_fields=True):
    """One input line as it is written."""

    id: str | None = None
    prompt: str | None = None
    messages: list[object] | None = None
    tools: list[object] | None = None
    tool_choice: object | None = None
    token_ids: list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    coupling: object | None = None
    speculation: object | None = None
    thinking: bool | None = None


@dataclass(frozen=True, slots=True)
class RawLine:
    """One non-blank line. number: counted from 1. id: as given, or `line-N`."""

    number: int
    id: str
    data: bytes


class TextParser(Protocol):
    """Output ids -> reasoning and content, incrementally."""

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Name and arguments of each tool call, once the answer is complete."""
        ...

    def push(self, token_ids: tuple[int, ...]) -> TextDelta:
        """Text that became certain with these ids."""
        ...

    def finish(self, *, stopped: bool) -> TextDelta:
        """What is left at the end. stopped: the model ended the answer, not its length."""
        ...


class PlainParser:
    """Parser of raw completions: all text is content."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self.calls: list[tuple[str, str]] = []

    def push(self, token_ids: tuple[int, ...]) -> TextDelta:
        """Text that became complete with these ids."""
        return TextDelta(content=self._detokenizer.push(token_ids))

    def finish(self, *, stopped: bool) -> TextDelta:
        """What is left at the end."""
        return TextDelta(content=self._detokenizer.flush())


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What the flags say. raw: text is continued as it is, else it is a user's chat message.

    form: of every answer.
    """

    sampling: SamplingParams
    raw: bool = False
    thinking: bool = False
    system: str | None = None
    form: FormatRule | None = None


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """Token ids and sampling of a prompt, and what turns the answer into text."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    parser: TextParser

    def request(self, request_id: str) -> Request:
        """The request for the engine."""
        return Request(request_id, self.token_ids, self.sampling)


class PromptEncoder:
    """Texts, chats and token ids -> requests for one checkpoint."""

    def __init__(self, codec: Codec, bos_id: int, max_model_len: int) -> None:
        self._codec = codec
        self._bos_id = bos_id
        self._max_model_len = max_model_len

    def encode(self, line: RawLine, options: PromptOptions) -> PreparedPrompt:
        """The prompt of an input line. Raises InvalidRequest naming the field."""
        wire = decode_body(line.data, PromptLine)
        given = [name for name in ("prompt", "messages", "token_ids") if getattr(wire, name)]
        if len(given) != 1:
            raise InvalidRequest(
                "exactly one of prompt, messages and token_ids must be given and not be empty, got "
                f"{' and '.join(given) or 'none'}."
            )
        if not wire.messages and (wire.tools or wire.tool_choice is not None):
            raise InvalidRequest("tools and tool_choice need messages.", param="tools")
        sampling = _line_sampling(wire, line.number, options.sampling)
        thinking = options.thinking if wire.thinking is None else wire.thinking
        if wire.token_ids:
            sampling = replace(sampling, grammar=_plain_grammar(options.form))
            return self._plain(tuple(wire.token_ids), sampling)
        if wire.messages:
            return self._messages(wire, thinking, sampling, options.form)
        return self.encode_text(wire.prompt or "", options, sampling, thinking)

    def encode_text(
        self,
        text: str,
        options: PromptOptions,
        sampling: SamplingParams | None = None,
        thinking: bool | None = None,
    ) -> PreparedPrompt:
        """The prompt of a text; None takes what `options` says."""
        if not text:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        sampling = options.sampling if sampling is None else sampling
        if options.raw:
            tokenizer = self._codec.tokenizer
            check_length(tokenizer.least_text_tokens(text), self._max_model_len, "prompt")
            ids = (self._bos_id, *tokenizer.encode(text))
            return self._plain(ids, replace(sampling, grammar=_plain_grammar(options.form)))
        thinking = options.thinking if thinking is None else thinking
        user = UserMessage(PromptText.of(text))
        if options.system is None:
            conversation = Conversation((user,), thinking)
        else:
            conversation = Conversation(
                (SystemMessage(PromptText.of(options.system)), user), thinking
            )
        stage = ThinkingStage.REASONING_START if thinking else None
        parsing = ParsingOptions(thinking_stage=stage)
        if options.form is not None:
            grammar = self._codec.answer_grammar(AnswerRules(options.form), parsing)
            sampling = replace(sampling, grammar=grammar)
        return self.conversation(conversation, parsing, sampling)

    def _messages(
        self,
        wire: PromptLine,
        thinking: bool,
        sampling: SamplingParams,
        form: FormatRule | None,
    ) -> PreparedPrompt:
        """Messages as the server takes them, by the server's own rules."""
        body = {
            "model": _MODEL,
            "messages": wire.messages,
            "thinking": {"type": "enabled" if thinking else "disabled"},
            "tools": wire.tools,
            "tool_choice": wire.tool_choice,
        }
        request = convert_chat(
            msgspec.json.encode(body),
            self._codec.options(_MODEL, context_limit=self._max_model_len),
        )
        check_supported(request)
        if form is not None:
            rules = request.rules or AnswerRules()
            combined = answer_rules(
                form, rules.tools, required=rules.required, parallel=rules.parallel
            )
            request = replace(request, rules=combined)
        sampling = replace(sampling, grammar=self._codec.grammar(request))
        return self.conversation(request.conversation, request.parsing, sampling)

    def _plain(self, ids: tuple[int, ...], sampling: SamplingParams) -> PreparedPrompt:
        parser = PlainParser(self._codec.tokenizer.detokenizer())
        return PreparedPrompt(ids, self._limited(ids, sampling, DEFAULT_MAX_TOKENS), parser)

    def conversation(
        self, conversation: Conversation, parsing: ParsingOptions, sampling: SamplingParams
    ) -> PreparedPrompt:
        """The prompt of a whole conversation. Raises InvalidRequest, ContextTooLong."""
        ids = tuple(self._codec.encode(conversation, context_limit=self._max_model_len))
        limited = self._limited(ids, sampling, conversation.default_max_tokens)
        return PreparedPrompt(ids, limited, AnswerText(self._codec, parsing))

    def _limited(
        self, ids: tuple[int, ...], sampling: SamplingParams, default: int
    ) -> SamplingParams:
        """`sampling` with a length: the default is lowered to the room that is left."""
        room = self._max_model_len - len(ids)
        if room < 1:
            raise ContextTooLong(
                f"The prompt has {len(ids)} tokens, the limit is {self._max_model_len} tokens for "
                "prompt and answer together.",
                param="prompt",
            )
        if sampling.max_tokens is not None:
            return sampling
        return dataclasses.replace(sampling, max_tokens=min(default, room))


def _plain_grammar(form: FormatRule | None) -> GrammarSpec | None:
    """Of an answer without reasoning."""
    return None if form is None else GrammarSpec(form.kind, form.text)


def scan(path: Path) -> dict[str, int]:
    """Ids of all lines -> line number. Raises InvalidRequest: unreadable, empty, duplicate ids."""
    numbers: dict[str, int] = {}
    duplicates: list[str] = []
    for line in read_lines(path):
        first = numbers.setdefault(line.id, line.number)
        if first != line.number:
            duplicates.append(f'"{line.id}" in lines {first} and {line.number}')
    if duplicates:
        more = len(duplicates) - MAX_NAMED_DUPLICATES
        raise InvalidRequest(
            f"{path}: ids must be unique: {'; '.join(duplicates[:MAX_NAMED_DUPLICATES])}"
            f"{f' and {more} more' if more > 0 else ''}.",
            param="id",
        )
    if not numbers:
        raise InvalidRequest(f"{path} has no lines.", param="input")
    return numbers


def read_lines(path: Path) -> Iterator[RawLine]:
    """Non-blank lines of a file. Raises InvalidRequest when it cannot be read."""
    if path.exists() and not path.is_file():
        raise InvalidRequest(
            f"{path} is not a regular file; it is read twice, so write a pipe's data to a file.",
            param="input",
        )
    try:
        with path.open("rb") as file:
            number = 0
            while data := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(data) > MAX_LINE_BYTES:
                    raise InvalidRequest(
                        f"{path}: line {number} is longer than {MAX_LINE_BYTES} bytes.",
                        param="input",
                    )
                if data.strip():
                    yield RawLine(number, _line_id(data, number), data)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}.", param="input") from error


def _line_id(data: bytes, number: int) -> str:
    """The id of a line, also of one that is refused later for something else."""
    try:
        content = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        content = None
    given = content.get("id") if isinstance(content, dict) else None
    return given if isinstance(given, str) else f"line-{number}"


def _line_sampling(wire: PromptLine, number: int, flags: SamplingParams) -> SamplingParams:
    """The flags, overridden by the fields of the line."""
    seed = wire.seed
    if seed is None and flags.seed is not None:
        # By line, not by order of execution: equal prompts get different answers, and a resumed
        # run gives the same ones.
        seed = choice_seed(flags.seed, number)
    params = SamplingParams(
        temperature=flags.temperature if wire.temperature is None else wire.temperature,
        top_p=flags.top_p if wire.top_p is None else wire.top_p,
        top_k=flags.top_k if wire.top_k is None else wire.top_k,
        seed=seed,
        max_tokens=flags.max_tokens if wire.max_tokens is None else wire.max_tokens,
        stop_token_ids=tuple(wire.stop_token_ids or flags.stop_token_ids),
        ignore_eos=flags.ignore_eos if wire.ignore_eos is None else wire.ignore_eos,
        coupling=flags.coupling,
    )
    return replace(params, **draft_fields(wire.coupling, wire.speculation))
