"""Tools and tool choice of Chat Completions -> definitions, the settled choice, the constraint.

Contract: an agent sends the same tools with every request, so what became of them is remembered by
their bytes; the same bytes give the same (never changed) objects. Level `clients` drops tools of
unknown types, takes custom tools, the older `functions`, and more forms of the choice. Called by
`chat.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from headrace.errors import InvalidBody, InvalidRequest
from headrace.recipe.conversation import ResponseFormat, ToolChoice, ToolDefinition
from headrace.recipe.options import ConvertOptions, Level, ModelVersion
from headrace.recipe.prompt_texts import prompt_texts
from headrace.recipe.protocols.chat_wire import (
    ClientRequest,
    FunctionFields,
    NamedChoice,
    NamedFunction,
    OfficialRequest,
    Tool,
)
from headrace.recipe.protocols.json_body import convert_value, decode_body, read_json
from headrace.recipe.protocols.schema import has_definitions
from headrace.recipe.protocols.tools import (
    Choice,
    SettledTools,
    check_tool_name,
    custom_function,
    output_constraint,
    settle_tools,
    tool_rules,
    unknown_tool,
)

# Bytes, whether they are `functions`, prompt format, level.
_Key = tuple[bytes, bool, ModelVersion | None, Level]
_REMEMBERED_BYTES = 131_072  # longer lists are read every time
_AUTO, _NONE = Choice(), Choice(ToolChoice.NONE)
_REQUIRED = Choice(ToolChoice.REQUIRED)
_BY_NAME = {"auto": _AUTO, "none": _NONE, "required": _REQUIRED}


class CustomFields(msgspec.Struct):
    """clients: custom-tools. One as it is declared."""

    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class ClientTool(msgspec.Struct):
    """clients: flat-tools. Of any type; the fields of a function may stand beside `type`.

    Those are of free type: the official codec ignores them beside `function`.
    """

    type: str | None = None
    function: FunctionFields | None = None
    custom: Any = None
    name: Any = None
    description: Any = None
    parameters: msgspec.Raw = msgspec.Raw()
    strict: Any = None


@dataclass(frozen=True, slots=True)
class DeclaredTools:
    """Tools as a request declares them.

    bad_name: name and path of the first one whose name cannot be used. key: what they were read
    from.
    """

    tools: tuple[ToolDefinition, ...] = ()
    custom: frozenset[str] = frozenset()
    bad_name: tuple[str, str] | None = None
    key: _Key = (b"", False, None, Level.CLIENTS)

    @property
    def legacy(self) -> bool:
        """Whether they came by the older `functions`."""
        return self.key[1]


_NO_TOOLS = DeclaredTools()
_EMPTY = (b"", b"[]", b"null")
_SETTLED_AUTO = SettledTools()
_SETTLED_NONE = {kind: SettledTools(choice=kind) for kind in ToolChoice}


def read_tools(
    wire: OfficialRequest | ClientRequest, version: ModelVersion | None, level: Level
) -> DeclaredTools:
    """The declared tools; InvalidBody when they are malformed."""
    source, legacy = bytes(wire.tools), False
    if source in _EMPTY and isinstance(wire, ClientRequest) and len(wire.functions):
        source, legacy = bytes(wire.functions), True  # clients: functions
    if source in _EMPTY:
        return _NO_TOOLS
    read = _read if len(source) > _REMEMBERED_BYTES else _remembered_read
    return read(source, legacy, version, level)


def settle(
    declared: DeclaredTools,
    choice: Choice,
    allowed: frozenset[str] | None,
    *,
    thinking: bool,
    options: ConvertOptions,
) -> SettledTools:
    """Check schemas and apply the choice; InvalidRequest as the official codec has it."""
    if declared is _NO_TOOLS and choice is _AUTO:
        return _SETTLED_AUTO
    if not declared.tools:
        return _SETTLED_NONE[settle_tools((), choice, thinking=thinking, options=options)[1]]
    if len(declared.key[0]) > _REMEMBERED_BYTES:
        return _settle(declared, choice, allowed, thinking, options)
    return _remembered_settle(declared.key, choice, allowed, thinking)


def read_choice(wire: OfficialRequest | ClientRequest) -> tuple[Choice, frozenset[str] | None]:
    """The choice, and the only names that it allows; InvalidBody when it is malformed."""
    choice = wire.tool_choice
    if choice is None:
        if not isinstance(wire, ClientRequest) or wire.function_call is None:
            return _AUTO, None
        # Beside `tools` it means nothing, and the official codec ignores it.
        modern = bytes(wire.tools) not in _EMPTY
        return _AUTO if modern else _legacy_choice(wire.function_call), None
    if isinstance(choice, NamedChoice):
        return Choice(ToolChoice.REQUIRED, choice.function.name), None
    if isinstance(choice, dict):
        return _object_choice(choice)
    known = _BY_NAME.get(choice) or (_REQUIRED if choice == "any" else None)
    if known is None:
        raise _bad_choice()
    return known, None


# --- reading ---------------------------------------------------------------------------------


def _read(source: bytes, legacy: bool, version: ModelVersion | None, level: Level) -> DeclaredTools:
    official = level is Level.OFFICIAL
    tools: list[ToolDefinition] = []
    custom: set[str] = set()
    bad_name: tuple[str, str] | None = None
    place = "functions" if legacy else "tools"
    for number, tool in _decode(source, legacy, official):
        path = f"{place}[{number}]"
        if isinstance(tool, ClientTool):
            if tool.type == "custom":
                definition = _custom(tool, version, path)
                custom.add(definition.name)
                path += ".custom"
            else:
                fields = _client_function(tool, path)
                path += ".function"
                definition = _function(fields, path)
        else:
            path += "" if legacy else ".function"
            definition = _function(tool.function if isinstance(tool, Tool) else tool, path)
        if bad_name is None:
            try:
                check_tool_name(definition.name, path, official=official)
            except InvalidRequest:
                bad_name = definition.name, path
        tools.append(definition)
    key = source, legacy, version, level
    return DeclaredTools(tuple(tools), frozenset(custom), bad_name, key)


_remembered_read = lru_cache(maxsize=64)(_read)


def _decode(
    source: bytes, legacy: bool, official: bool
) -> Iterable[tuple[int, Tool | FunctionFields | ClientTool]]:
    if legacy:
        return enumerate(decode_body(source, list[FunctionFields], exact=False, path="functions"))
    if official:
        return enumerate(decode_body(source, list[Tool], exact=False, path="tools"))
    # clients: unknown-tools
    return [
        (number, tool)
        for number, tool in enumerate(
            decode_body(source, list[ClientTool], exact=False, path="tools")
        )
        if tool.type in ("function", "custom") or (tool.type is None and tool.function is not None)
    ]


def _client_function(tool: ClientTool, path: str) -> FunctionFields:
    if tool.function is not None:
        return tool.function
    if tool.name is None:
        raise InvalidBody(
            "invalid request body: missing field `function`", param=f"{path}.function"
        )
    # clients: flat-tools. The form that Responses has.
    fields = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    function = convert_value(fields, FunctionFields, path)
    function.parameters = tool.parameters
    return function


def _function(fields: FunctionFields, path: str) -> ToolDefinition:
    # The reader has null for "no schema", also where the client wrote it.
    parameters = read_json(fields.parameters) if len(fields.parameters) else None
    return ToolDefinition(
        fields.name, fields.description, parameters, fields.strict, path=f"{path}.parameters"
    )


def _custom(tool: ClientTool, version: ModelVersion | None, path: str) -> ToolDefinition:
    given = {"name": tool.name} if tool.custom is None else tool.custom
    fields = convert_value(given, CustomFields, f"{path}.custom")
    if fields.name == "apply_patch" and version is not None:
        return prompt_texts(version).apply_patch
    form = fields.format or {}
    nested = form.get("grammar")
    form = nested if isinstance(nested, dict) else form
    return custom_function(
        fields.name, fields.description, form.get("syntax"), form.get("definition")
    )


# --- choice ----------------------------------------------------------------------------------


def _bad_choice() -> InvalidBody:
    return InvalidBody(
        "invalid request body: expected one of `none`, `auto`, `required` or a tool",
        param="tool_choice",
    )


def _legacy_choice(call: str | NamedFunction) -> Choice:
    if isinstance(call, NamedFunction):
        return Choice(ToolChoice.REQUIRED, call.name)
    if call not in ("none", "auto"):
        raise InvalidBody(
            "invalid request body: expected one of `none`, `auto` or a function",
            param="function_call",
        )
    return _BY_NAME[call]


def _object_choice(choice: dict[str, Any]) -> tuple[Choice, frozenset[str] | None]:
    """clients: choice-forms. {type: auto | none | required | any | function | custom ...}."""
    kind = choice.get("type", "function")
    if kind in ("function", "custom"):
        return Choice(ToolChoice.REQUIRED, _name_of(choice, kind)), None
    if kind == "any":
        return _REQUIRED, None
    if kind == "allowed_tools":
        fields = choice.get("allowed_tools", choice)
        mode = fields.get("mode", "auto") if isinstance(fields, dict) else None
        tools = fields.get("tools") if isinstance(fields, dict) else None
        if mode not in ("auto", "required") or not isinstance(tools, list):
            raise _bad_choice()
        return _BY_NAME[mode], frozenset(
            _name_of(tool, tool.get("type", "function"))
            for tool in tools
            if isinstance(tool, dict) and tool.get("type", "function") in ("function", "custom")
        )
    known = _BY_NAME.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise _bad_choice()
    return known, None


def _name_of(choice: dict[str, Any], kind: str) -> str:
    fields = choice.get(kind, choice)
    name = fields.get("name") if isinstance(fields, dict) else None
    if not isinstance(name, str):
        raise _bad_choice()
    return name


# --- settling --------------------------------------------------------------------------------


def _settle(
    declared: DeclaredTools,
    choice: Choice,
    allowed: frozenset[str] | None,
    thinking: bool,
    options: ConvertOptions,
) -> SettledTools:
    tools = declared.tools
    if allowed is not None:
        # clients: allowed-tools. Like a named choice it leaves only those in the prompt.
        unknown = allowed - {tool.name for tool in tools}
        if unknown:
            raise unknown_tool(min(unknown), options)
        tools = tuple(tool for tool in tools if tool.name in allowed)
    kept, kind = settle_tools(tools, choice, thinking=thinking, options=options)
    written = kept
    if not options.official:
        # clients: strict-schemas. Definitions were lost: the engine gets the original.
        by_name = {tool.name: tool for tool in tools if has_definitions(tool.parameters)}
        written = tuple(by_name.get(tool.name, tool) for tool in kept)
    constraint = output_constraint(written, kind, ResponseFormat())
    return SettledTools(kept, kind, constraint, tool_rules(tools, kept, options))


@lru_cache(maxsize=64)
def _remembered_settle(
    key: _Key,
    choice: Choice,
    allowed: frozenset[str] | None,
    thinking: bool,
) -> SettledTools:
    options = ConvertOptions(level=key[3])
    return _settle(_remembered_read(*key), choice, allowed, thinking, options)
