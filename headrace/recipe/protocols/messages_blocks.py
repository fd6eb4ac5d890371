"""Messages of an Anthropic request -> messages of the conversation (spec recipe 9).

Contract: `HistoryReader.read` checks roles of blocks and the pairing of calls and results in the
order of the official codec, with its texts; nothing is merged or reordered (renderers do that).
Level `clients` additionally takes blocks and orders that Anthropic's own server takes. Called by
`messages.py`, one reader per request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from headrace.errors import InvalidRequest
from headrace.recipe.conversation import (
    AssistantMessage,
    ImageSource,
    Message,
    PromptText,
    SystemMessage,
    ToolCall,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)
from headrace.recipe.json_text import spaced_json
from headrace.recipe.options import ConvertOptions, ModelVersion, WebSearch
from headrace.recipe.protocols.attribution import strip_attribution
from headrace.recipe.protocols.images import IMAGE_PLACEHOLDER, join_parts
from headrace.recipe.protocols.json_body import read_json
from headrace.recipe.protocols.messages_images import image_source
from headrace.recipe.protocols.messages_wire import (
    DocumentBlock,
    HostedBlock,
    ImageBlock,
    RedactedThinkingBlock,
    SearchResultBlock,
    ServerToolUseBlock,
    TextBlock,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    WebSearchResultBlock,
    WireMessage,
    tag_of,
)

_NOTHING = PromptText()
_NO_INPUT = b"{}"


@dataclass(slots=True)
class _Turn:
    """An assistant message in the making; ids: of its calls."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)


class HistoryReader:
    """Reads the messages of one request; `tools` are the declared client tools by name."""

    def __init__(
        self, version: ModelVersion, tools: Mapping[str, ToolDefinition], options: ConvertOptions
    ) -> None:
        self._v41 = version is ModelVersion.V41
        self._tools = tools
        self._official = options.official
        # clients: hosted-blocks
        self._reject_hosted = self._official and options.messages_web_search is WebSearch.REJECT
        self._strip = options.strip_attribution
        self._messages: list[Message] = []
        self._turn: _Turn | None = None
        self._called: set[str] = set()  # calls of the latest turn that results may answer
        self._open: set[str] = set()  # those without a result so far
        self._found: list[ToolDefinition] = []  # tools that results refer to

    def read(self, wire: Sequence[WireMessage[Any]]) -> list[Message]:
        """All messages in order; InvalidRequest when blocks or results are out of place."""
        for index, message in enumerate(wire):
            content, role = message.content, message.role
            if role == "assistant":
                self._assistant(index, content)
                continue
            if self._turn is not None:
                self._close_turn(self._turn)
            if role == "system":
                self._system(index, content)
            elif isinstance(content, str):
                if self._open:
                    raise _unanswered(f"messages.{index}: ", self._open)
                self._messages.append(UserMessage(PromptText((content,))))
            else:
                following = wire[index + 1 : index + 2]
                self._user(index, content, bool(following) and following[0].role == "user")
        if self._turn is not None:
            self._close_turn(self._turn)
        if self._open:
            raise _unanswered(f"messages.{len(wire) - 1}:", self._open)
        return self._messages

    # --- user --------------------------------------------------------------------------------

    def _user(self, index: int, blocks: Sequence[Struct], more: bool) -> None:
        if not blocks:
            raise _empty(index)
        for number, block in enumerate(blocks):
            kind = type(block)
            if kind is ToolResultBlock:
                self._result(index, number, block)  # type: ignore[arg-type]
                continue
            if kind not in _USER_PARTS:
                raise _misplaced(index, block)
            if self._open:
                raise _unanswered(f"messages.{index}: ", self._open)
            part = self._part(block, f"messages.{index}.content[{number}]", None)
            text = PromptText((part,)) if isinstance(part, str) else PromptText(("", ""), (part,))
            self._messages.append(UserMessage(text))
        if self._open:
            if more and not self._official:
                # clients: spread-results
                return
            raise _unanswered(f"messages.{index - 1}:", self._open)
        self._called = set()
        if self._found:
            if self._v41:
                self._messages.append(SystemMessage(_NOTHING, tuple(self._found)))
            self._found = []

    def _result(self, index: int, number: int, block: ToolResultBlock[Any]) -> None:
        call_id, content = block.tool_use_id, block.content
        if call_id not in self._open:
            path = f"messages.{index}.content.{number}"
            if call_id in self._called:
                raise InvalidRequest(
                    f"{path}: each tool_use must have a single result. Found multiple "
                    f"`tool_result` blocks with id: {call_id}",
                    param=path,
                )
            raise InvalidRequest(
                f"unexpected `{path}: tool_use_id` found in `tool_result` blocks: {call_id}. Each "
                "`tool_result` block must have a corresponding `tool_use` block in the previous "
                "message.",
                param=path,
            )
        self._open.remove(call_id)
        if isinstance(content, str):
            text = PromptText((content,))
        elif content:
            text = self._result_text(index, number, content)
        else:
            text = _NOTHING
        self._messages.append(ToolMessage(text, call_id))

    def _result_text(self, index: int, number: int, blocks: Sequence[Struct]) -> PromptText:
        texts = [block.text for block in blocks if type(block) is TextBlock]
        if len(texts) == len(blocks):
            return PromptText(("\n\n".join(texts),))
        self._refer(index, number, blocks)
        path = f"messages.{index}.content.{number}.tool_result"
        return join_parts(
            [
                self._part(block, path, f"{path}.content[{place}]")
                for place, block in enumerate(blocks)
            ]
        )

    def _refer(self, index: int, number: int, blocks: Sequence[Struct]) -> None:
        for block in blocks:
            if type(block) is ToolReferenceBlock:
                name = block.tool_name
                tool = self._tools.get(name)
                if tool is None:
                    path = f"messages.{index}.content.{number}"
                    raise InvalidRequest(
                        f"{path}: tool reference '{name}' not found in available tools", param=path
                    )
                self._found.append(tool)

    # --- assistant ---------------------------------------------------------------------------

    def _assistant(self, index: int, content: str | Sequence[Struct]) -> None:
        turn = self._turn
        if turn is None or not turn.ids:
            if turn is not None:
                self._close_turn(turn)
            turn = self._turn = _Turn()
        elif self._official:
            raise _unanswered(f"messages.{index}: ", turn.ids)
        # clients: joined-turns. Its calls may be answered later, since Anthropic's server joins
        # assistant messages in a row to one turn.
        if not isinstance(content, str):
            if not content:
                raise _empty(index)
            self._answer(index, content, turn)
        elif content or not turn.ids:
            turn.texts.append(content)

    def _close_turn(self, turn: _Turn) -> None:
        texts, thoughts, calls = turn.texts, turn.thoughts, turn.calls
        self._messages.append(
            AssistantMessage(
                "\n\n".join(texts) if texts else "",
                "\n\n".join(thoughts) if thoughts else None,
                tuple(calls) if calls else None,
            )
        )
        self._turn = None
        self._called = turn.ids
        self._open = turn.ids.copy()

    def _answer(self, index: int, blocks: Sequence[Struct], turn: _Turn) -> None:
        for number, block in enumerate(blocks):
            kind = type(block)
            if kind is ToolUseBlock:
                call = self._call(block)  # type: ignore[arg-type]
                if call.id in turn.ids:
                    path = f"messages.{index}.content.{number}"
                    raise InvalidRequest(f"{path}: `tool_use` ids must be unique", param=path)
                turn.ids.add(call.id)
                turn.calls.append(call)
            elif kind is ThinkingBlock:
                turn.thoughts.append(block.thinking)  # type: ignore[attr-defined]
            elif kind in _USER_PARTS:
                if turn.ids and self._official:
                    raise _unanswered(f"messages.{index}.{number}: ", turn.ids)
                # clients: text-after-tool-use. Kept in front of the calls, as prompts have it.
                text = self._assistant_text(block, f"messages.{index}.content[{number}]")
                if text or (turn.texts and not turn.ids):
                    turn.texts.append(text)
            elif kind in _HOSTED or isinstance(block, HostedBlock):
                if self._reject_hosted:
                    raise InvalidRequest(
                        "Unsupported content block: server tools are not supported",
                        param=f"messages.{index}.content.{number}",
                    )
            elif kind is not RedactedThinkingBlock:  # clients: redacted-thinking
                raise _misplaced(index, block)

    def _call(self, block: ToolUseBlock) -> ToolCall:
        data = bytes(block.input)
        arguments = "{}" if data == _NO_INPUT else spaced_json(read_json(data))
        return ToolCall(block.id, block.name, arguments)

    def _assistant_text(self, block: Struct, path: str) -> str:
        part = self._part(block, path, None)
        if isinstance(part, str):
            return part
        raise InvalidRequest("Image in assistant message is unsupported", param=path)

    # --- system ------------------------------------------------------------------------------

    def _system(self, index: int, content: str | Sequence[Struct]) -> None:
        if self._open:
            raise _unanswered(f"messages.{index}: ", self._open)
        tools: tuple[ToolDefinition, ...] | None = None
        if isinstance(content, str):
            text = PromptText((strip_attribution(content) if self._strip else content,))
        else:
            text, tools = self._system_blocks(index, content)
        if self._v41:
            self._messages.append(SystemMessage(text, tools))
        elif text.parts[0]:
            # V4 prompts have system messages at their start only.
            reminder = f"<system-reminder>\n{text.parts[0]}\n</system-reminder>"
            self._messages.append(UserMessage(PromptText((reminder,))))

    def _system_blocks(
        self, index: int, blocks: Sequence[Struct]
    ) -> tuple[PromptText, tuple[ToolDefinition, ...] | None]:
        parts: list[str | ImageSource] = []
        tools: list[ToolDefinition] = []
        path = f"messages.{index}"
        for number, block in enumerate(blocks):
            if type(block) is ToolAdditionBlock:
                name = block.tool.name
                tool = self._tools.get(name)
                if tool is None:
                    where = f"{path}.content.{number}"
                    raise InvalidRequest(
                        f"{where}: `tool_addition` references unknown tool '{name}'", param=where
                    )
                tools.append(tool)
            elif type(block) in _USER_PARTS:
                part = self._part(block, path, f"{path}.content[{number}]")
                if self._strip and isinstance(part, str):
                    part = strip_attribution(part)
                parts.append(part)
            else:
                raise _misplaced(index, block)
        return join_parts(parts), tuple(tools) if tools else None

    # --- parts -------------------------------------------------------------------------------

    def _part(self, block: Struct, path: str, where: str | None) -> str | ImageSource:
        """Text or image of a block. path: of the image; where: named by errors if not `path`."""
        if isinstance(block, TextBlock):
            return block.text
        if isinstance(block, ImageBlock):
            if not self._v41:
                return IMAGE_PLACEHOLDER
            return image_source(
                block.source, path=path, where=where or path, official=self._official
            )
        if isinstance(block, DocumentBlock):
            media_type = block.source.media_type
            kind = "unknown" if media_type is None else media_type
            return f"[Unsupported document type: {kind}]"
        if isinstance(block, ToolReferenceBlock):
            return block.tool_name
        if isinstance(block, SearchResultBlock):
            # clients: search-results. A passage is text under its title and source.
            heads = (block.title, block.source)
            return "\n".join([head for head in heads if head] + [b.text for b in block.content])
        raise TypeError(f"no part of a prompt: {block!r}")


_USER_PARTS = frozenset((TextBlock, ImageBlock, DocumentBlock, SearchResultBlock))
_HOSTED = frozenset((ServerToolUseBlock, WebSearchResultBlock))
_PLACES = {
    ToolUseBlock: ("tool_use", "assistant"),
    ServerToolUseBlock: ("tool_use", "assistant"),
    ToolResultBlock: ("tool_result", "user"),
    ToolAdditionBlock: ("tool_addition", "system"),
}


def _empty(index: int) -> InvalidRequest:
    path = f"messages.{index}"
    return InvalidRequest(f"{path}: all messages must have non-empty content", param=path)


def _unanswered(place: str, ids: Iterable[str]) -> InvalidRequest:
    return InvalidRequest(
        f"{place}`tool_use` ids were found without `tool_result` blocks immediately after: "
        f"{', '.join(sorted(ids))}. Each `tool_use` block must have a corresponding `tool_result` "
        "block in the next message.",
        param=place.rstrip(": "),
    )


def _misplaced(index: int, block: Struct) -> InvalidRequest:
    path = f"messages.{index}"
    if isinstance(block, ThinkingBlock | RedactedThinkingBlock):
        text = f"{path}.content: thinking blocks may only be in `assistant` messages"
    else:
        known = _PLACES.get(type(block))
        tag, role = known if known is not None else (tag_of(block), "assistant")
        text = f"{path}: `{tag}` blocks can only be in `{role}` messages"
    return InvalidRequest(text, param=path)
