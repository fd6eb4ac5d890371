"""Checks of the deserialize stage: what the types of items, tools and choices need.

Contract: `check_request` raises InvalidBody unless every known field that counts has the values
that the protocol allows; texts resemble the official ones. Level `clients` lets more pass, and
rewrites it to what the rest of the conversion knows. Called by `responses_read.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec import UNSET, Struct, UnsetType

from headrace.errors import InvalidBody
from headrace.recipe.conversation import ImageDetail
from headrace.recipe.protocols.json_body import U8, U32, check_unsigned
from headrace.recipe.protocols.responses_wire import (
    WEB_SEARCH_TYPES,
    WireChoice,
    WireItem,
    WirePart,
    WireResponses,
    WireText,
    WireTool,
)

_ROLES = ("user", "assistant", "system", "developer")
_MESSAGE_PARTS = ("input_text", "output_text", "input_image", "input_file")
_OUTPUT_PARTS = ("input_text", "input_image", "input_file")
_SUMMARIES = ("auto", "concise", "detailed")
_LEVELS = ("low", "medium", "high")
_EXECUTIONS = ("client", "server")
_DETAILS = tuple(str(detail) for detail in ImageDetail)
_FORMATS = ("text", "json_schema", "json_object")
_PLAIN_CHOICES = ("none", "auto", "required")
_CHOICE_TYPES = ("function", "web_search", "web_search_2025_08_26", "custom")


def check_request(wire: WireResponses, *, official: bool) -> None:
    """InvalidBody unless the whole request is well-formed."""
    check_unsigned(wire.max_output_tokens, U32, "max_output_tokens")
    check_unsigned(wire.top_logprobs, U8, "top_logprobs")
    if wire.reasoning is not None:
        _one_of(wire.reasoning.summary, _SUMMARIES, "reasoning.summary")
        _one_of(wire.reasoning.generate_summary, _SUMMARIES, "reasoning.generate_summary")
    if wire.text is not None:
        _check_text(wire.text)
    if wire.tool_choice is not None:
        _check_choice(wire.tool_choice, official)
    if wire.tools:
        _check_tools(wire.tools, "tools", official)
    if isinstance(wire.input, list):
        check_items(wire.input, official=official)


def check_items(items: list[WireItem], *, official: bool) -> None:
    """InvalidBody unless every item has what its type needs."""
    for number, item in enumerate(items):
        kind = item.type
        if kind is UNSET:
            if item.role is UNSET:
                raise _invalid("invalid input item", f"input[{number}]")
            kind = "message"
        check = _ITEM_CHECKS.get(kind)
        if check is not None:
            check(item, f"input[{number}]", official)


def _check_message(item: WireItem, path: str, official: bool) -> None:
    role = item.role
    if role not in _ROLES:
        if role is UNSET:
            raise _missing("role", path)
        _one_of(role, _ROLES, f"{path}.role")
    content = item.content
    if isinstance(content, str):
        return
    if content is None:
        if role == "assistant" and not official:
            item.content = ""  # clients: null-content
            return
        raise _invalid("content should be a string or a list of content blocks", f"{path}.content")
    _check_parts(content, _MESSAGE_PARTS, f"{path}.content", official)


def _check_function_call(item: WireItem, path: str, official: bool) -> None:
    if item.call_id is None or item.name is None or not isinstance(item.arguments, str):
        _required(item, ("call_id", "name"), path)
        if item.arguments is None:
            raise _missing("arguments", path)
        raise _invalid("invalid type: map, expected a string", f"{path}.arguments")


def _check_function_output(item: WireItem, path: str, official: bool) -> None:
    if item.output is None:
        raise _missing("output", path)
    if not isinstance(item.output, str):
        _check_parts(item.output, _OUTPUT_PARTS, f"{path}.output", official)


def _check_custom_call(item: WireItem, path: str, official: bool) -> None:
    _required(item, ("call_id", "name", "input"), path)


def _check_custom_output(item: WireItem, path: str, official: bool) -> None:
    _required(item, ("call_id",), path)
    if isinstance(item.output, list):
        _check_parts(item.output, _OUTPUT_PARTS, f"{path}.output", official)


def _check_search_call(item: WireItem, path: str, official: bool) -> None:
    _required(item, ("call_id", "arguments"), path)
    if isinstance(item.arguments, str):
        raise _invalid("invalid type: string, expected a map", f"{path}.arguments")
    _one_of(item.execution, _EXECUTIONS, f"{path}.execution")


def _check_search_output(item: WireItem, path: str, official: bool) -> None:
    _required(item, ("call_id", "tools"), path)
    _one_of(item.execution, _EXECUTIONS, f"{path}.execution")
    _check_tools(item.tools or (), f"{path}.tools", official)


def _check_reasoning(item: WireItem, path: str, official: bool) -> None:
    if isinstance(item.content, str):
        raise _invalid("invalid type: string, expected a sequence", f"{path}.content")
    for number, part in enumerate(item.content or ()):
        if part.text is None:
            raise _missing("text", f"{path}.content[{number}]")


_ITEM_CHECKS = {
    "message": _check_message,
    "function_call": _check_function_call,
    "function_call_output": _check_function_output,
    "custom_tool_call": _check_custom_call,
    "custom_tool_call_output": _check_custom_output,
    "tool_search_call": _check_search_call,
    "tool_search_output": _check_search_output,
    "reasoning": _check_reasoning,
}


def _check_parts(parts: list[WirePart], known: Collection[str], path: str, official: bool) -> None:
    for number, part in enumerate(parts):
        kind = part.type
        if kind not in known and not official:
            kind = _translate_part(part)
        if kind not in known:
            if kind is None:
                raise _missing("type", f"{path}[{number}]")
            _one_of(kind, known, f"{path}[{number}].type")
        if kind == "input_image":
            _one_of(part.detail, _DETAILS, f"{path}[{number}].detail")
        elif part.text is None and kind != "input_file":
            raise _missing("text", f"{path}[{number}]")


def _translate_part(part: WirePart) -> str | None:
    """clients: part-forms. Text parts under other names."""
    if part.type == "refusal" and part.refusal is not None:
        part.text = part.refusal
    elif part.type not in ("text", "output_text"):
        return part.type
    part.type = "input_text"
    return part.type


def _check_tools(tools: Iterable[WireTool], path: str, official: bool) -> None:
    for number, tool in enumerate(tools):
        where = f"{path}[{number}]"
        kind = tool.type
        if kind in ("function", "custom"):
            _required(tool, ("name",), where)
        elif kind == "namespace":
            _required(tool, ("name", "tools"), where)
            inner = tool.tools or []
            if official:
                for index, entry in enumerate(inner):
                    _one_of(entry.type, ("function", "custom"), f"{where}.tools[{index}].type")
            # clients: unknown-tools. Also inside of a namespace.
            inner = [entry for entry in inner if entry.type in ("function", "custom")]
            tool.tools = inner
            _check_tools(inner, f"{where}.tools", official)
        elif kind == "tool_search":
            _one_of(tool.execution, _EXECUTIONS, f"{where}.execution")
        elif kind in WEB_SEARCH_TYPES:
            _one_of(tool.search_context_size, _LEVELS, f"{where}.search_context_size")


def _check_choice(choice: str | WireChoice, official: bool) -> None:
    known = choice in _PLAIN_CHOICES if isinstance(choice, str) else choice.type is not None
    if not known:
        raise _invalid(
            "expected one of `none`, `auto`, `required` or a tool choice object", "tool_choice"
        )
    if isinstance(choice, str):
        return
    if official:
        _one_of(choice.type, _CHOICE_TYPES, "tool_choice.type")
    if choice.type in ("function", "custom"):
        _required(choice, ("name",), "tool_choice")
    elif choice.type == "allowed_tools":
        _required(choice, ("tools",), "tool_choice")
        _one_of(choice.mode, ("auto", "required"), "tool_choice.mode")


def _check_text(text: WireText) -> None:
    _one_of(text.verbosity, _LEVELS, "text.verbosity")
    format_ = text.format
    if format_ is UNSET:
        return
    if format_.type is None:
        raise _missing("type", "text.format")
    _one_of(format_.type, _FORMATS, "text.format.type")
    if format_.type == "json_schema":
        _required(format_, ("name",), "text.format")
        if not bytes(format_.schema):
            raise _missing("schema", "text.format")


def _required(value: Struct, names: Iterable[str], path: str) -> None:
    for name in names:
        if getattr(value, name) is None:
            raise _missing(name, path)


def _one_of(value: str | UnsetType | None, known: Collection[str], path: str) -> None:
    if value is None or value in known:
        return
    names = [f"`{name}`" for name in known]
    expected = " or ".join(names) if len(names) == 2 else "one of " + ", ".join(names)
    raise _invalid(f"unknown variant `{value}`, expected {expected}", path)


def _missing(name: str, path: str) -> InvalidBody:
    return _invalid(f"missing field `{name}`", f"{path}.{name}")


def _invalid(problem: str, param: str) -> InvalidBody:
    return InvalidBody(f"invalid request body: {problem}", param=param)
