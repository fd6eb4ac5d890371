"""Responses request bodies -> wire structs.

Contract: `read_request` gives a request whose items and tools have all that their types need, or
raises InvalidBody. A field of the wrong type may belong to a type that has no such field, so a body
that does not fit is tried again without such fields. Called by `responses.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.errors import InvalidBody
from headrace.recipe.protocols.json_body import decode_body, read_json
from headrace.recipe.protocols.responses_checks import check_request
from headrace.recipe.protocols.responses_wire import WireItem, WireResponses


def read_request(body: bytes | str | dict[str, Any], *, official: bool) -> WireResponses:
    """The typed request. Raises InvalidBody."""
    try:
        wire = decode_body(body, WireResponses)
    except InvalidBody as error:
        wire = _read_pruned(body, error)
    check_request(wire, official=official)
    return wire


def read_items(items: Iterable[bytes]) -> list[WireItem]:
    """Items from a store, typed. Raises InvalidBody."""
    body = b'{"model":"","input":[%b]}' % b",".join(items)
    wire = read_request(body, official=False)
    return wire.input if isinstance(wire.input, list) else []


# --- fields that mean nothing --------------------------------------------------------------------

_PART_FIELDS: dict[str, tuple[str, ...]] = {
    "input_text": ("text",),
    "output_text": ("text",),
    "text": ("text",),
    "input_image": ("image_url", "detail", "file_id"),
    "input_file": (),
    "refusal": ("refusal",),
}
_ITEM_FIELDS: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "namespace", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "tool_search_call": ("call_id", "arguments", "execution"),
    "tool_search_output": ("call_id", "tools", "execution"),
    "reasoning": ("content", "encrypted_content"),
}
_TOOL_FIELDS: dict[str, tuple[str, ...]] = {
    "function": ("name", "description", "parameters", "strict"),
    "custom": ("name", "format"),
    "namespace": ("name", "description", "tools"),
    "tool_search": ("execution", "description", "parameters"),
    "web_search": ("search_context_size", "user_location"),
    "web_search_2025_08_26": ("search_context_size", "user_location"),
}
# Of level `clients`; the official codec ignores them, whatever they are.
_FIELDS_IF_TEXT = {"custom": "description", "custom_tool_call": "namespace"}
_FORMAT_FIELDS: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": (),
    "json_schema": ("name", "schema", "description", "strict"),
}
_TOOL_TYPES = (
    "function",
    "web_search",
    "web_search_2025_08_26",
    "namespace",
    "custom",
    "tool_search",
)
_CHOICE_FIELDS: dict[str, tuple[str, ...]] = {
    "function": ("name", "namespace"),
    "custom": ("name", "namespace"),
    "allowed_tools": ("mode", "tools"),
}


def _read_pruned(body: bytes | str | dict[str, Any], error: InvalidBody) -> WireResponses:
    """The request without fields that mean nothing; `error` if that changes nothing."""
    if error.message.startswith("invalid JSON"):
        raise error
    if isinstance(body, dict):
        value: Any = body
    else:
        value = read_json(body if isinstance(body, bytes) else body.encode())
    if not isinstance(value, dict):
        raise error
    pruned = dict(value)
    if isinstance(value.get("input"), list):
        pruned["input"] = [_pruned_item(item) for item in value["input"]]
    if isinstance(value.get("tools"), list):
        pruned["tools"] = [_pruned_tool(tool) for tool in value["tools"]]
    if isinstance(value.get("tool_choice"), dict):
        pruned["tool_choice"] = _only(value["tool_choice"], _CHOICE_FIELDS)
    text = value.get("text")
    if isinstance(text, dict) and isinstance(text.get("format"), dict):
        pruned["text"] = {**text, "format": _only(text["format"], _FORMAT_FIELDS)}
    if pruned == value:
        raise error
    return decode_body(pruned, WireResponses)


def _only(value: Any, fields: dict[str, tuple[str, ...]]) -> Any:
    """An object without fields that its type does not have; other values as they are."""
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        return value
    names = ("type", *fields.get(value["type"], ()))
    only = {name: entry for name, entry in value.items() if name in names}
    extra = _FIELDS_IF_TEXT.get(value["type"])
    if extra is not None and isinstance(value.get(extra), str):
        only[extra] = value[extra]
    return only


def _pruned_item(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    if "type" not in item:
        # A role of a wrong type stays, for it makes the item a message.
        item = {key: item[key] for key in ("role", "content") if key in item}
    else:
        item = _only(item, _ITEM_FIELDS)
    for name in ("content", "output"):
        if isinstance(item.get(name), list):
            parts = item[name]
            if item.get("type") == "reasoning":
                parts = [
                    {key: part[key] for key in ("text",) if key in part}
                    if isinstance(part, dict)
                    else part
                    for part in parts
                ]
            else:
                parts = [_only(part, _PART_FIELDS) for part in parts]
            item = {**item, name: parts}
    if isinstance(item.get("tools"), list):
        item = {**item, "tools": [_pruned_tool(_named(tool)) for tool in item["tools"]]}
    return item


def _named(tool: Any) -> Any:
    """A found tool by the name of its type; the official codec takes the number of one as well."""
    number = tool.get("type") if isinstance(tool, dict) else None
    if type(number) is not int or number < 0:
        return tool
    known = _TOOL_TYPES[number] if number < len(_TOOL_TYPES) else "unsupported"
    return {**tool, "type": known}


def _pruned_tool(tool: Any, depth: int = 0) -> Any:
    tool = _only(tool, _TOOL_FIELDS)
    if isinstance(tool, dict) and isinstance(tool.get("tools"), list) and not depth:
        tool = {**tool, "tools": [_pruned_tool(inner, 1) for inner in tool["tools"]]}
    return tool
