"""Tools of Messages requests: client tools, Anthropic's own kinds, and hosted ones.

Contract: `declared_tools` checks the form, `offer_tools` says what the model may be offered and
what was dropped, `settle_offer` applies the choice. An agent sends the same tools with every
request, so all three remember by the bytes; what they return is never changed. Level `clients` also
offers the tools that Anthropic defines but clients run (shell, editor, computer, memory), and drops
hosted ones. Called by `messages.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from msgspec import UNSET, Raw

from headrace.errors import InvalidBody, InvalidRequest
from headrace.recipe.conversation import ResponseFormat, ToolChoice, ToolDefinition
from headrace.recipe.options import ConvertOptions, Level, ModelVersion, WebSearch
from headrace.recipe.protocols.json_body import decode_body, read_json
from headrace.recipe.protocols.messages_wire import WireTool
from headrace.recipe.protocols.tools import (
    Choice,
    SettledTools,
    check_tool_name,
    output_constraint,
    settle_tools,
    tool_rules,
    unknown_tool,
)

_REMEMBERED_BYTES = 262_144  # longer lists are read every time
_REMEMBERED_LISTS = 64
_WEB_SEARCH = "web_search"
_NULL = b"null"


@dataclass(frozen=True, slots=True)
class Offer:
    """Tools that the model may be offered, in order, and the names of dropped ones."""

    tools: tuple[ToolDefinition, ...] = ()
    by_name: Mapping[str, ToolDefinition] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()


_NO_OFFER = Offer()
_NO_TOOLS = {kind: SettledTools(choice=kind) for kind in ToolChoice}


def declared_tools(raw: Raw) -> bytes:
    """The bytes of `tools`, b"" when there are none; InvalidBody when they are malformed."""
    source = bytes(raw)
    if source in (_NULL, b"[]"):
        return b""
    return source if _wire_tools(source) else b""


def offer_tools(source: bytes, version: ModelVersion, options: ConvertOptions) -> Offer:
    """What may be offered of the declared tools; InvalidRequest for kinds that are refused."""
    if not source:
        return _NO_OFFER
    read = _offer if len(source) > _REMEMBERED_BYTES else _remembered_offer
    return read(source, version, options.level, options.messages_web_search)


def settle_offer(
    source: bytes, choice: Choice, version: ModelVersion, *, thinking: bool, options: ConvertOptions
) -> SettledTools:
    """Check schemas and apply the choice; InvalidRequest as the official codec has it."""
    if not source:
        return _NO_TOOLS[settle_tools((), choice, thinking=thinking, options=options)[1]]
    settle = _settle if len(source) > _REMEMBERED_BYTES else _remembered_settle
    return settle(source, choice, version, thinking, options.level, options.messages_web_search)


def _wire_tools(source: bytes) -> tuple[WireTool, ...]:
    read = _decode if len(source) > _REMEMBERED_BYTES else _remembered_decode
    return read(source)


def _decode(source: bytes) -> tuple[WireTool, ...]:
    tools = decode_body(source, list[WireTool], path="tools")
    for number, tool in enumerate(tools):
        # Kinds of Anthropic's own need no name.
        if tool.name is None and (tool.type is UNSET or tool.type == "custom"):
            raise InvalidBody(
                "invalid request body: missing field `name`", param=f"tools[{number}].name"
            )
    return tuple(tools)


def _offer(source: bytes, version: ModelVersion, level: Level, web_search: WebSearch) -> Offer:
    official = level is Level.OFFICIAL
    tools: list[ToolDefinition] = []
    dropped: set[str] = set()
    for number, tool in enumerate(_wire_tools(source)):
        path, type_ = f"tools[{number}]", tool.type
        if type_ is UNSET or (type_ == "custom" and not official):
            # clients: custom-type. Anthropic's own word for client tools.
            tools.append(_client_tool(tool, path, version, official))
            continue
        kind = None if official else _kind_of(str(type_))
        if kind is not None:
            # clients: anthropic-tools
            name = tool.name or kind.name
            check_tool_name(name, path, official=official)
            tools.append(ToolDefinition(name, kind.description, kind.parameters))
            continue
        searches = str(type_).startswith(_WEB_SEARCH)
        if web_search is WebSearch.REJECT if searches else official:
            raise InvalidRequest(f"{path}: server tools are not supported", param=path)
        # clients: unknown-tools
        if tool.name is not None:
            dropped.add(tool.name)
        elif searches:
            dropped.add(_WEB_SEARCH)
    if version is ModelVersion.V41 and tools and all(tool.defer_loading for tool in tools):
        raise InvalidRequest(
            "tools: at least one tool must have defer_loading=false. All tools cannot be deferred.",
            param="tools",
        )
    return Offer(tuple(tools), {tool.name: tool for tool in tools}, frozenset(dropped))


def _client_tool(
    tool: WireTool, path: str, version: ModelVersion, official: bool
) -> ToolDefinition:
    name = tool.name or ""
    check_tool_name(name, path, official=official)
    schema = bytes(tool.input_schema)
    # A missing schema is refused later, in its turn: a raw null is no schema, None would be {}.
    parameters = read_json(schema) if schema != _NULL else Raw(_NULL)
    deferred = version is ModelVersion.V41 and tool.defer_loading is True
    return ToolDefinition(
        name,
        tool.description,
        parameters,
        None if official else tool.strict,  # clients: strict-tools
        defer_loading=deferred,
        path=f"{path}.input_schema",
    )


def _settle(
    source: bytes,
    choice: Choice,
    version: ModelVersion,
    thinking: bool,
    level: Level,
    web_search: WebSearch,
) -> SettledTools:
    options = ConvertOptions(level=level, messages_web_search=web_search)
    tools = offer_tools(source, version, options).tools
    if choice.name is not None and not tools:
        # Only dropped tools were declared, and the named one is not among them.
        raise unknown_tool(choice.name, options)
    kept, kind = settle_tools(tools, choice, thinking=thinking, options=options)
    constraint = output_constraint(kept, kind, ResponseFormat())
    return SettledTools(kept, kind, constraint, tool_rules(tools, kept, options))


_remembered_decode = lru_cache(maxsize=_REMEMBERED_LISTS)(_decode)
_remembered_offer = lru_cache(maxsize=_REMEMBERED_LISTS)(_offer)
_remembered_settle = lru_cache(maxsize=_REMEMBERED_LISTS)(_settle)


# --- tools that Anthropic defines and clients run -------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    """Name when the request gives none, description and parameters."""

    name: str
    description: str
    parameters: dict[str, Any]


def _kind_of(type_: str) -> _Kind | None:
    for start, kind in _KINDS.items():
        if type_.startswith(start):
            return kind
    return None


def _object(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _string(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _integers(description: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "integer"}, "description": description}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


_FILE_FIELDS: dict[str, Any] = {
    "path": _string("Absolute path of the file or directory."),
    "view_range": _integers("For view: first and last line, counted from 1; -1 is the end."),
    "file_text": _string("For create: content of the new file."),
    "old_str": _string("For str_replace: text that occurs exactly once."),
    "new_str": _string("For str_replace: text that takes its place."),
    "insert_line": {
        "type": "integer",
        "description": "For insert: the line after which to insert; 0 is the beginning.",
    },
    "insert_text": _string("For insert: the text."),
}
_POINT = "Coordinates [x, y] in pixels from the top left corner."

# Types carry a date (`bash_20250124`); the parameters of one kind are the same for our purposes.
_KINDS: dict[str, _Kind] = {
    "bash_": _Kind(
        "bash",
        "Run a command in a persistent bash session.",
        _object(
            [],
            command=_string("The command to run; needed unless restart is true."),
            restart={"type": "boolean", "description": "Whether to restart the session."},
        ),
    ),
    "text_editor_": _Kind(
        "str_replace_based_edit_tool",
        "View, create and edit text files.",
        _object(
            ["command", "path"],
            command=_one_of("view", "create", "str_replace", "insert", "undo_edit"),
            **_FILE_FIELDS,
        ),
    ),
    "computer_": _Kind(
        "computer",
        "Use the mouse and keyboard of a computer and take screenshots.",
        _object(
            ["action"],
            action=_one_of(
                "key",
                "type",
                "mouse_move",
                "left_click",
                "left_click_drag",
                "right_click",
                "middle_click",
                "double_click",
                "triple_click",
                "left_mouse_down",
                "left_mouse_up",
                "screenshot",
                "cursor_position",
                "hold_key",
                "scroll",
                "wait",
                "zoom",
            ),
            coordinate=_integers(_POINT),
            start_coordinate=_integers(f"For left_click_drag: where it begins. {_POINT}"),
            text=_string("Text to type, or the key or keys to press."),
            scroll_direction=_one_of("up", "down", "left", "right"),
            scroll_amount={"type": "integer", "description": "Number of scroll clicks."},
            duration={"type": "number", "description": "Seconds to hold a key or to wait."},
            region=_integers("For zoom: [x0, y0, x1, y1] in pixels."),
        ),
    ),
    "memory_": _Kind(
        "memory",
        "Read and write files of the memory directory, which outlives the conversation.",
        _object(
            ["command"],
            command=_one_of("view", "create", "str_replace", "insert", "delete", "rename"),
            **_FILE_FIELDS,
            old_path=_string("For rename: the path until now."),
            new_path=_string("For rename: the path from then on."),
        ),
    ),
}
