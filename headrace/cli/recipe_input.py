"""Input of `headrace recipe`: a request or an answer from a file or standard input.

Contract: reading, guessing the protocol and building options; every fault is an InvalidRequest or
ConfigError that says what to do. Imports no torch. Used by `cli/recipe.py`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.errors import ConfigError, InvalidRequest
from headrace.recipe.chunks import Chunk, Text, Tokens
from headrace.recipe.constants import CHECKPOINT_IMAGE_SPELLING, SpecialTokens
from headrace.recipe.conversation import Conversation
from headrace.recipe.options import MODEL_VERSIONS, ConvertOptions, Level, ModelVersion
from headrace.recipe.tokenizer import Tokenizer

ProtocolName = Literal["chat", "responses", "messages", "conversation"]
MAX_INPUT_BYTES = 256 * 2**20
_MESSAGES_KEYS = frozenset(
    {"system", "stop_sequences", "output_config", "anthropic_version", "top_k"}
)
_MESSAGES_BLOCKS = frozenset(
    {"tool_use", "tool_result", "thinking", "redacted_thinking", "image", "document"}
)
_CHUNK_KEYS = ("ready", "text", "tokens", "finish")


def read_input(path: Path | None) -> bytes:
    """All of a file, or of standard input for None."""
    if path is not None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be read: {error.strerror}.") from error
    elif sys.stdin.isatty():
        raise InvalidRequest("Nothing to read: name a FILE, or pipe the input into this command.")
    else:
        data = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    if len(data) > MAX_INPUT_BYTES:
        raise InvalidRequest(f"The input is longer than {MAX_INPUT_BYTES} bytes.")
    return data


@dataclass(frozen=True, slots=True)
class Given:
    """A request body and how it is read."""

    body: bytes
    protocol: ProtocolName
    guessed: bool


def given_request(body: bytes, protocol: ProtocolName | None) -> Given:
    """The request with its protocol, guessed when it is not said."""
    if protocol is not None:
        return Given(body, protocol, False)
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise InvalidRequest("The input is no request: it must be one JSON object.")
    return Given(body, guess_protocol(content), True)


def guess_protocol(content: Mapping[str, Any]) -> ProtocolName:
    """The protocol that a JSON object most likely belongs to."""
    messages = content.get("messages")
    if not isinstance(messages, list):
        return "responses" if "input" in content or "instructions" in content else "chat"
    if "thinking_mode" in content or "model" not in content:
        return "conversation"
    tools = content.get("tools")
    declared = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    if _MESSAGES_KEYS & content.keys() or any("input_schema" in tool for tool in declared):
        return "messages"
    for message in messages:
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and part.get("type") in _MESSAGES_BLOCKS:
                return "messages"
    return "chat"


def read_conversation(body: bytes) -> Conversation:
    """The neutral form of a conversation, as `headrace recipe render --json` shows it."""
    from headrace.recipe.conversation_input import conversation_from_json

    try:
        content = msgspec.json.decode(body)
        # What --json prints can be read again.
        if isinstance(content, dict) and "messages" not in content:
            content = content.get("conversation", content)
        return conversation_from_json(content)
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"The input is no conversation: {error}.") from error


def read_tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer of a checkpoint folder or a tokenizer.json."""
    if path is None:
        raise ConfigError("Ids need a tokenizer: --tokenizer DIR (a checkpoint) or FILE.")
    if path.is_dir():
        return Tokenizer.from_directory(path)
    try:
        return Tokenizer(path.read_bytes(), source=str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def special_tokens(tokenizer: Tokenizer | None) -> SpecialTokens:
    """The spellings that the tokenizer has: checkpoints write the image token in another way."""
    special = SpecialTokens()
    if tokenizer is None or special.image in tokenizer.added:
        return special
    if CHECKPOINT_IMAGE_SPELLING not in tokenizer.added:
        return special
    return dataclasses.replace(special, image=CHECKPOINT_IMAGE_SPELLING)


def convert_options(
    body: bytes, level: str, version: str | None, tokenizer: Tokenizer | None
) -> ConvertOptions:
    """Options of a conversion; a given version is that of whatever model the request names."""
    versions = dict(MODEL_VERSIONS)
    if version is not None:
        try:
            name = msgspec.json.decode(body).get("model")
        except (msgspec.DecodeError, UnicodeError, RecursionError, AttributeError):
            name = None  # the conversion says what is wrong with it
        if isinstance(name, str):
            versions[name] = ModelVersion(version)
    return ConvertOptions(
        level=Level(level), model_versions=versions, special=special_tokens(tokenizer)
    )


def read_answer(data: bytes, kind: str | None) -> Iterator[Chunk]:
    """The chunks of an answer. kind: `chunks`, `ids`, `text`; None: seen from the first line.

    Raises InvalidRequest with the number of the line that is none.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest("The answer is not UTF-8.") from error
    kind = _kind_of(text) if kind is None else kind
    if kind == "text":
        yield Text(text.removesuffix("\n"))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _chunk(line, number) if kind == "chunks" else Tokens(_ids(line, number))


def _kind_of(text: str) -> str:
    first = next((line for line in text.splitlines() if line.strip()), "")
    try:
        value = msgspec.json.decode(first)
    except (msgspec.DecodeError, RecursionError):
        words = first.replace(",", " ").split()
        return "ids" if words and all(word.isdecimal() for word in words) else "text"
    if isinstance(value, dict) and any(key in value for key in _CHUNK_KEYS):
        return "chunks"
    return "ids" if type(value) is int or isinstance(value, list) else "text"


def _ids(line: str, number: int) -> list[int]:
    words = line.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise InvalidRequest(f"Line {number} is no list of ids: write `[72, 105]` or `72 105`.")
    return [int(word) for word in words]


def _chunk(line: str, number: int) -> Chunk:
    from headrace.check.recipe_decode import chunk_from_json

    try:
        return chunk_from_json(msgspec.json.decode(line))
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f'Line {number} is no chunk: write {{"text": "Hi", "token_count": 1}}, '
            '{"tokens": [72, 105]}, {"ready": {"prompt_usage": {"prompt_tokens": 9}}} or '
            '{"finish": "stop"} (length, content_filter).'
        ) from error
