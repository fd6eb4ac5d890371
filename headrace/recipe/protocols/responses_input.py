"""Input items of a Responses request -> messages (spec recipe 8, grouping rules).

Contract: `read_input` walks the items once. Calls and their outputs are collected until every call
has its output, then they become one assistant message with calls, sorted by id, and the outputs in
the same order. Errors name the item, with the text of the official codec. Called by `responses.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from json.encoder import encode_basestring

from msgspec import UNSET

from headrace.errors import InvalidRequest
from headrace.recipe.conversation import (
    AssistantMessage,
    ImageSource,
    Message,
    PromptText,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from headrace.recipe.json_text import compact_json
from headrace.recipe.options import ConvertOptions, MissingReasoning, ModelVersion
from headrace.recipe.prompt_texts import literals
from headrace.recipe.protocols.attribution import strip_attribution
from headrace.recipe.protocols.images import MAX_URL_BYTES, image_from_url, is_http, join_parts
from headrace.recipe.protocols.json_body import read_json
from headrace.recipe.protocols.responses_tools import TOOL_SEARCH, ToolTable, found_tools
from headrace.recipe.protocols.responses_wire import WireItem, WirePart

_NOTICE_START, _NOTICE_END = "<image_resize_notice>", "</image_resize_notice>"


def read_input(
    items: Sequence[WireItem],
    first_index: int,
    table: ToolTable,
    version: ModelVersion,
    options: ConvertOptions,
    *,
    thinking: bool,
    messages: list[Message],
) -> None:
    """Append the messages of all items to `messages`.

    first_index: number of the first item in error texts (below 0 for items from a store).
    """
    reader = _InputReader(table, version, options, thinking=thinking, messages=messages)
    reader.read(items, first_index)


class _InputReader:
    """What is known between two items.

    The last message is kept open while it is an assistant message, for later items add to it:
    `_open` says that there is one. A group is the calls that came together, the messages
    that answer each of them, and the tools found meanwhile; `_waiting` counts its open calls.
    """

    def __init__(
        self,
        table: ToolTable,
        version: ModelVersion,
        options: ConvertOptions,
        *,
        thinking: bool,
        messages: list[Message],
    ) -> None:
        self._table = table
        self._version = version
        self._options = options
        self._sees = version is ModelVersion.V41
        self._thinking = thinking
        self._fills = options.missing_reasoning is MissingReasoning.FILL_EMPTY
        self._messages = messages
        self._open = False
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        # Messages that answer a call, in the order of the request; None: not answered yet.
        self._answers: dict[str, list[Message] | None] = {}
        self._waiting = 0
        self._found: list[Message] = []
        self._seen: set[str] = set()
        self._after_output: list[Message] | None = None

    def read(self, items: Sequence[WireItem], first_index: int) -> None:
        """All items; raises InvalidRequest when a call has no output at the end."""
        readers = self._readers()
        message = self._read_message
        for index, item in enumerate(items, first_index):
            kind = item.type
            if kind == "message" or kind is UNSET:
                message(item, index)
                continue
            reader = readers.get(kind)
            if reader is not None:
                reader(item, index)
            else:
                self._after_output = None
        self._settle()
        self._close()

    def _readers(self) -> dict[str, Callable[[WireItem, int], None]]:
        readers: dict[str, Callable[[WireItem, int], None]] = {
            "function_call": self._read_call,
            "custom_tool_call": self._read_custom_call,
            "function_call_output": self._read_output,
            "custom_tool_call_output": self._read_output,
            "reasoning": self._read_reasoning,
            "web_search_call": self._read_web_search,
        }
        if self._version is ModelVersion.V41:
            readers["tool_search_call"] = self._read_search
            readers["tool_search_output"] = self._read_search_output
        if not self._options.official:
            readers["item_reference"] = _refuse_reference
        return readers

    # --- messages and reasoning

    def _read_message(self, item: WireItem, index: int) -> None:
        role, content = item.role, item.content or ""
        if self._after_output is not None:
            answer, self._after_output = self._after_output, None
            if role == "developer" and _is_resize_notice(content) and self._sees:
                answer.append(SystemMessage(self._system_text(content, index)))
                return
        self._settle()
        if role == "user":
            self._append(UserMessage(self._text(content, index)))
        elif role == "assistant":
            self._read_assistant(content, index)
        elif role == "system" or self._version is ModelVersion.V41:
            self._append(SystemMessage(self._system_text(content, index)))
        else:
            self._append(UserMessage(self._text(content, index)))

    def _read_assistant(self, content: str | list[WirePart], index: int) -> None:
        text = self._text(content, index, images_allowed=False).parts[0]
        self._open = True
        if text:
            self._texts.append(text)

    def _read_reasoning(self, item: WireItem, index: int) -> None:
        self._settle()
        text = "\n".join(
            [part.text or "" for part in item.content or () if not isinstance(part, str)]
        )
        if not text:
            return
        if self._texts:
            self._close()
        self._open = True
        self._reasoning.append(text)

    def _read_web_search(self, item: WireItem, index: int) -> None:
        self._settle()

    # --- calls and outputs

    def _read_call(self, item: WireItem, index: int) -> None:
        name = item.name or ""
        if item.namespace is not None:
            name = self._table.names.of_call(item.namespace, name)
        self._add_call(item, index, name, item.arguments if isinstance(item.arguments, str) else "")

    def _read_custom_call(self, item: WireItem, index: int) -> None:
        name = item.name or ""
        if item.namespace is not None:
            # clients: custom-tools. Of a namespace, which the official codec has none of.
            full = self._table.names.known(item.namespace, name)
            if full in self._table.custom:
                name = full
        self._add_call(item, index, name, f'{{"input":{encode_basestring(item.input or "")}}}')

    def _read_search(self, item: WireItem, index: int) -> None:
        arguments = item.arguments if isinstance(item.arguments, dict) else {}
        values = {key: read_json(value) for key, value in arguments.items()}
        self._add_call(item, index, TOOL_SEARCH, compact_json(values))

    def _add_call(self, item: WireItem, index: int, name: str, arguments: str) -> None:
        call_id = item.call_id or ""
        if not call_id:
            raise _empty_id(index)
        if call_id in self._seen:
            raise InvalidRequest(
                f"Duplicate 'call_id': {call_id}.", param=f"input[{index}].call_id"
            )
        self._seen.add(call_id)
        self._after_output = None
        if self._calls and not self._waiting:
            self._flush()
        self._calls.append(ToolCall(call_id, name, arguments))
        self._answers[call_id] = None
        self._waiting += 1

    def _read_output(self, item: WireItem, index: int) -> None:
        content = self._text(item.output or "", index, "output")
        if item.call_id is None:
            self._settle()
            self._append(ToolMessage(content))
        else:
            self._after_output = self._answer(item.call_id, index, content)

    def _read_search_output(self, item: WireItem, index: int) -> None:
        call_id = item.call_id or ""
        self._check_answer(call_id, index)
        found = found_tools(item.tools or (), index, self._options)
        self._answer(call_id, index, PromptText.of(compact_json(found)))
        self._after_output = None
        tools = self._table.found.get(index)
        if tools:
            self._found.append(SystemMessage(PromptText(), tools))

    def _check_answer(self, call_id: str, index: int) -> None:
        if not call_id:
            raise _empty_id(index)
        if call_id not in self._seen:
            raise InvalidRequest(
                f"No tool call found for tool output with call_id {call_id}.",
                param=f"input[{index}].call_id",
            )
        # Calls of earlier groups were all answered.
        if self._answers.get(call_id, ()) is not None:
            raise InvalidRequest(
                f"Duplicate tool output for call_id: {call_id}.", param=f"input[{index}].call_id"
            )

    def _answer(self, call_id: str, index: int, content: PromptText) -> list[Message]:
        self._check_answer(call_id, index)
        answer: list[Message] = [ToolMessage(content, call_id)]
        self._answers[call_id] = answer
        self._waiting -= 1
        return answer

    # --- groups and messages under construction

    def _settle(self) -> None:
        """End the group; InvalidRequest when one of its calls has no output."""
        self._after_output = None
        if not self._calls:
            return
        if self._waiting:
            missing = next(key for key, answer in self._answers.items() if answer is None)
            raise InvalidRequest(f"No tool output found for tool call {missing}.", param="input")
        self._flush()

    def _flush(self) -> None:
        calls = sorted(self._calls, key=_call_id) if len(self._calls) > 1 else self._calls
        self._close(tuple(calls))
        for call in calls:
            self._messages += self._answers[call.id] or ()
        self._messages += self._found
        self._calls, self._answers, self._found = [], {}, []

    def _append(self, message: Message) -> None:
        if self._open:
            self._close()
        self._messages.append(message)

    def _close(self, calls: tuple[ToolCall, ...] | None = None) -> None:
        """Finish the open assistant message, or one that has calls only."""
        if not self._open and calls is None:
            return
        reasoning: str | None = None
        if self._thinking and (self._reasoning or self._fills):
            reasoning = "\n".join(self._reasoning)
        self._messages.append(AssistantMessage("\n\n".join(self._texts), reasoning, calls))
        self._open = False
        self._texts, self._reasoning = [], []

    # --- content

    def _text(
        self,
        content: str | list[WirePart],
        index: int,
        field: str = "content",
        *,
        images_allowed: bool = True,
    ) -> PromptText:
        if isinstance(content, str):
            return PromptText((content,))
        if len(content) == 1 and content[0].type in ("input_text", "output_text"):
            return PromptText((content[0].text or "",))
        path = f"input[{index}]"
        shown = 0
        if self._sees:
            for number, part in enumerate(content):
                if part.type == "input_image":
                    _check_image(part, f"{path}.{field}[{number}]")
                    shown += 1
        if shown and not images_allowed:
            raise InvalidRequest(
                f"{path}: Image in assistant message is unsupported", param=f"{path}.{field}"
            )
        return join_parts([self._part(part, path) for part in content])

    def _part(self, part: WirePart, path: str) -> str | ImageSource:
        if part.type == "input_image":
            if not self._sees:
                return literals().unsupported_image
            return image_from_url(part.image_url or "", part.detail, path=path)
        if part.type == "input_file":
            return literals().unsupported_document
        return part.text or ""

    def _system_text(self, content: str | list[WirePart], index: int) -> PromptText:
        text = self._text(content, index)
        if self._options.strip_attribution:
            return PromptText(tuple(map(strip_attribution, text.parts)), text.images)
        return text


def _call_id(call: ToolCall) -> str:
    return call.id


def _check_image(part: WirePart, where: str) -> None:
    url = part.image_url
    if not url:
        if part.file_id is None:
            problem = "input_image must have image_url or file_id"
        else:
            problem = "file_id is not supported. Pass the image as a base64 data url instead."
    elif part.file_id is not None:
        problem = "input_image cannot have both image_url and file_id"
    elif is_http(url) and len(url) * 4 > MAX_URL_BYTES and len(url.encode()) > MAX_URL_BYTES:
        problem = (
            f"image_url external link length {len(url.encode())} too long, max link length "
            f"{MAX_URL_BYTES}. Consider passing file data directly with base64 data url instead."
        )
    else:
        return
    raise InvalidRequest(f"{where}: {problem}", param=where)


def _is_resize_notice(content: str | list[WirePart]) -> bool:
    """Whether a message is exactly the note that Codex puts behind an image it made smaller."""
    if isinstance(content, str) or len(content) != 1 or content[0].type != "input_text":
        return False
    text = content[0].text or ""
    return (
        text.startswith(_NOTICE_START)
        and text.endswith(_NOTICE_END)
        and len(text) >= len(_NOTICE_START) + len(_NOTICE_END)
    )


def _empty_id(index: int) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid 'input[{index}].call_id': empty string. Expected a string with minimum length "
        "1, but got an empty string instead.",
        param=f"input[{index}].call_id",
    )


def _refuse_reference(item: WireItem, index: int) -> None:
    # clients: kept-history. The official codec drops the item and a part of the conversation.
    raise InvalidRequest(
        f"input[{index}]: item_reference is not supported. Pass the item itself instead.",
        param=f"input[{index}]",
    )
