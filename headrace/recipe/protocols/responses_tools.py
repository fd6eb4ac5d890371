"""Tools of a Responses request: functions, custom tools, namespaces, tool search, the choice.

Contract: `read_tools` turns declared tools and those that earlier tool searches found into function
definitions with unique names and notes how calls of them are shown; `read_choice` says which of
them may be called. Names of namespaced functions are given here only,
also to calls in the history. Called by `responses.py` and `responses_input.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from msgspec import Raw

from headrace.errors import InvalidRequest
from headrace.recipe.conversation import ToolChoice, ToolDefinition
from headrace.recipe.options import ConvertOptions, ModelVersion, WebSearch
from headrace.recipe.prompt_texts import prompt_texts
from headrace.recipe.protocols.json_body import read_json
from headrace.recipe.protocols.responses_wire import (
    NULL,
    WEB_SEARCH_TYPES,
    WireChoice,
    WireItem,
    WireTool,
)
from headrace.recipe.protocols.tools import Choice, check_tool_name, custom_function

TOOL_SEARCH = "tool_search"
APPLY_PATCH = "apply_patch"
_SERVER_TOOLS = "Server tools are not supported"
_REMEMBERED_BYTES = 16_384


class Names:
    """Gives every (namespace, local name) a function name that no other function has."""

    def __init__(self, version: ModelVersion, taken: Iterable[str]) -> None:
        self._joins_with_colons = version is ModelVersion.V41
        self._taken = set(taken)
        self._suffixes: dict[str, int] = {}
        self._first: dict[tuple[str, str], str] = {}

    def new(self, namespace: str, local: str) -> str:
        """A name for one more function; a later one of the same pair gets another name."""
        name = base = self._joined(namespace, local)
        number = self._suffixes.get(base, 0)
        while name in self._taken:
            number += 1
            name = f"{base}_{number}"
        self._suffixes[base] = number
        self._taken.add(name)
        self._first.setdefault((namespace, local), name)
        return name

    def known(self, namespace: str, local: str) -> str | None:
        """The name of the first function of a pair."""
        return self._first.get((namespace, local))

    def of_call(self, namespace: str | None, local: str) -> str:
        """The function name of a call in the history."""
        if namespace is None:
            return local
        return self._first.get((namespace, local)) or self.new(namespace, local)

    def _joined(self, namespace: str, local: str) -> str:
        if self._joins_with_colons:
            return f"{namespace}::{local}"
        if namespace.endswith("_") or local.startswith("_"):
            return namespace + local
        return f"{namespace}__{local}"


@dataclass(slots=True)
class ToolTable:
    """All functions of a request, and what is known about them.

    found: by index of the input item. pairs: namespaced functions; declared_pairs: the names of
    those that `tools` declares. echo: the declared tools as the response object shows them.
    """

    names: Names
    tools: list[ToolDefinition] = field(default_factory=list)
    found: dict[int, tuple[ToolDefinition, ...]] = field(default_factory=dict)
    pairs: dict[str, tuple[str, str]] = field(default_factory=dict)
    declared_pairs: frozenset[str] = frozenset()
    custom: set[str] = field(default_factory=set)
    echo: list[dict[str, Any]] = field(default_factory=list)
    tool_search: bool = False


def read_tools(
    declared: Sequence[WireTool],
    items: Sequence[WireItem],
    first_index: int,
    version: ModelVersion,
    options: ConvertOptions,
) -> ToolTable:
    """Declared tools, then those in outputs of tool searches, which only V4.1 knows.

    first_index: number of the first item in error texts (below 0 for items from a store).
    """
    searches: list[tuple[int, list[WireTool]]] = []
    if version is ModelVersion.V41:
        searches = [
            (index, item.tools)
            for index, item in enumerate(items, first_index)
            if item.type == "tool_search_output" and item.tools
        ]
    every = [*declared, *(tool for _, tools in searches for tool in tools)]
    # clients: custom-tools. They reserve their names too.
    reserving = ("function",) if options.official else ("function", "custom")
    taken = [tool.name for tool in every if tool.type in reserving and tool.name is not None]
    table = ToolTable(Names(version, taken))
    reader = _Reader(table, version, options)
    for number, tool in enumerate(declared):
        reader.read(tool, f"tools[{number}]", deferred=False)
        table.tool_search |= tool.type == TOOL_SEARCH and tool.execution == "client"
        entry = describe(tool)
        if entry is not None:
            table.echo.append(entry)
    table.declared_pairs = frozenset(table.pairs)
    for index, tools in searches:
        start = len(table.tools)
        for number, tool in enumerate(tools):
            reader.read(tool, f"input[{index}].tools[{number}]", deferred=True)
        table.found[index] = tuple(table.tools[start:])
    return table


class _Reader:
    """Adds the functions of one wire tool after the other to a table."""

    def __init__(self, table: ToolTable, version: ModelVersion, options: ConvertOptions) -> None:
        self._table = table
        self._version = version
        self._options = options

    def read(self, tool: WireTool, path: str, *, deferred: bool) -> None:
        """Check one tool and add its functions."""
        kind = tool.type
        if kind == "function":
            name = self._checked_name(tool, path)
            parameters = _value(tool.parameters)
            self._add(
                ToolDefinition(
                    name,
                    tool.description,
                    parameters,
                    tool.strict,
                    deferred,
                    path=f"{path}.parameters",
                )
            )
        elif kind == "namespace":
            self._read_namespace(tool, path, deferred)
        elif kind == "custom":
            self._read_custom(tool, path, deferred)
        elif kind == TOOL_SEARCH:
            if self._version is ModelVersion.V41 and tool.execution == "client":
                parameters = _value(tool.parameters)
                self._add(ToolDefinition(TOOL_SEARCH, tool.description, parameters, None, deferred))
        elif kind in WEB_SEARCH_TYPES and self._options.responses_web_search is WebSearch.REJECT:
            raise InvalidRequest(_SERVER_TOOLS, param=path)

    def _add(self, tool: ToolDefinition) -> None:
        self._table.tools.append(tool)

    def _checked_name(self, tool: WireTool, path: str) -> str:
        name = tool.name or ""
        check_tool_name(name, path, official=self._options.official)
        return name

    def _read_custom(self, tool: WireTool, path: str, deferred: bool) -> None:
        name = tool.name or ""
        if name == APPLY_PATCH:
            patch = prompt_texts(self._version).apply_patch
            self._add(ToolDefinition(name, patch.description, patch.parameters, None, deferred))
        elif self._options.official:
            raise InvalidRequest(
                f"Unsupported custom tool: '{name}'. Only 'apply_patch' is supported.",
                param=f"{path}.name",
            )
        else:
            # clients: custom-tools
            self._checked_name(tool, path)
            self._add(_custom_function(tool, name, tool.description, deferred))
        self._table.custom.add(name)

    def _read_namespace(self, tool: WireTool, path: str, deferred: bool) -> None:
        namespace = self._checked_name(tool, path)
        locals_: set[str] = set()
        for number, inner in enumerate(tool.tools or ()):
            where = f"{path}.tools[{number}]"
            local = inner.name or ""
            if inner.type == "custom" and self._options.official:
                raise InvalidRequest(
                    "Currently custom tools are not allowed inside a namespace. Found custom tool "
                    f"'{local}' in {where}.",
                    param=where,
                )
            self._checked_name(inner, where)
            if local in locals_:
                raise InvalidRequest("Tool names within a namespace must be unique.", param=where)
            locals_.add(local)
            name = self._table.names.new(namespace, local)
            self._table.pairs[name] = (namespace, local)
            description = inner.description
            if tool.description and self._version is ModelVersion.V41:
                description = f"{tool.description}\n{description or ''}"
            if inner.type == "custom":
                # clients: custom-tools
                self._add(_custom_function(inner, name, description, deferred))
                self._table.custom.add(name)
            else:
                parameters = _value(inner.parameters)
                self._add(
                    ToolDefinition(
                        name,
                        description,
                        parameters,
                        inner.strict,
                        deferred,
                        path=f"{where}.parameters",
                    )
                )


def _custom_function(
    tool: WireTool, name: str, description: str | None, deferred: bool
) -> ToolDefinition:
    form = _value(tool.format)
    form = form if isinstance(form, dict) else {}
    function = custom_function(name, description, form.get("syntax"), form.get("definition"))
    return replace(function, defer_loading=deferred)


def _value(raw: Raw) -> Any:
    if raw is NULL:
        return None
    data = bytes(raw)
    return _remembered(data) if len(data) <= _REMEMBERED_BYTES else read_json(data)


@lru_cache(maxsize=512)
def _remembered(data: bytes) -> Any:
    # Read twice in a request, and agents send the same tools with every turn. Never changed.
    return read_json(data)


# --- tools as JSON -------------------------------------------------------------------------------


def describe(tool: WireTool) -> dict[str, Any] | None:
    """A tool as the response object shows it; None for types that the codec does not know."""
    match tool.type:
        case "function":
            return {
                "type": tool.type,
                "name": tool.name,
                "description": tool.description,
                "parameters": _value(tool.parameters),
                "strict": tool.strict,
            }
        case "custom":
            return {"type": tool.type, "name": tool.name}
        case "namespace":
            return {
                "type": tool.type,
                "name": tool.name,
                "description": tool.description,
                "tools": [describe(inner) for inner in tool.tools or ()],
            }
        case "tool_search":
            return {
                "type": tool.type,
                "execution": tool.execution,
                "description": tool.description,
                "parameters": _value(tool.parameters),
            }
        case "web_search" | "web_search_2025_08_26":
            place = tool.user_location
            return {
                "type": tool.type,
                "search_context_size": tool.search_context_size,
                "user_location": None
                if place is None
                else {
                    "city": place.city,
                    "country": place.country,
                    "region": place.region,
                    "timezone": place.timezone,
                },
            }
    return None


def found_tools(tools: Sequence[WireTool], index: int, options: ConvertOptions) -> list[Any]:
    """The tools of a tool search as the model reads them: functions of namespaces one by one."""
    found: list[Any] = []
    for tool in tools:
        entry = describe(tool)
        if entry is None:
            if options.official:
                raise InvalidRequest(
                    f"input[{index}]: the enum variant ResponsesTool::Unsupported cannot be "
                    "serialized",
                    param=f"input[{index}].tools",
                )
            continue  # clients: unknown-tools
        if tool.type != "namespace":
            found.append(entry)
            continue
        namespace = {"name": tool.name, "description": tool.description or ""}
        found += [{**inner, "namespace": namespace} for inner in entry["tools"]]
    return found


# --- choice --------------------------------------------------------------------------------------


def read_choice(
    wire: str | WireChoice | None, table: ToolTable, options: ConvertOptions
) -> tuple[Choice, list[ToolDefinition]]:
    """What may be called: the choice, and the tools among which it chooses."""
    if wire is None:
        return Choice(), table.tools
    if isinstance(wire, str):
        return Choice(ToolChoice(wire)), table.tools
    if wire.type in ("function", "custom"):
        name = wire.name or ""
        if not options.official:
            name = _Chooser(table).name_of(wire)
        return Choice(ToolChoice.REQUIRED, name), table.tools
    if wire.type in WEB_SEARCH_TYPES and options.responses_web_search is WebSearch.REJECT:
        raise InvalidRequest(_SERVER_TOOLS, param="tool_choice")
    if wire.type == TOOL_SEARCH and table.tool_search:
        # clients: choice-forms
        return Choice(ToolChoice.REQUIRED, TOOL_SEARCH), table.tools
    if wire.type == "allowed_tools":
        return _allowed(wire, table)
    # clients: unknown-tools. Choices of tools that the server would run vanish like the tools.
    return Choice(), table.tools


class _Chooser:
    """clients: choice-forms. Finds the function that an entry of a choice means."""

    def __init__(self, table: ToolTable) -> None:
        self.known = {tool.name for tool in table.tools}
        self._names = table.names
        self._by_local: dict[str, list[str]] = {}
        for full, (_, local) in table.pairs.items():
            self._by_local.setdefault(local, []).append(full)

    def name_of(self, wire: WireChoice) -> str:
        """A function by its name, by namespace and name, or by a local name if that is clear."""
        name = TOOL_SEARCH if wire.type == TOOL_SEARCH else wire.name or ""
        if name in self.known:
            return name
        if wire.namespace is not None:
            return self._names.known(wire.namespace, name) or name
        matches = self._by_local.get(name, ())
        return matches[0] if len(matches) == 1 else name


def _allowed(wire: WireChoice, table: ToolTable) -> tuple[Choice, list[ToolDefinition]]:
    """clients: allowed-tools. Keeps the named tools, as a named choice keeps one."""
    chooser = _Chooser(table)
    allowed: set[str] = set()
    for entry in wire.tools or ():
        if entry.type not in ("function", "custom", TOOL_SEARCH):
            continue
        name = chooser.name_of(entry)
        if name not in chooser.known:
            raise InvalidRequest(
                f"Invalid value for 'tool_choice': no function named '{name}' was specified in the "
                "'tools' parameter.",
                param="tool_choice",
            )
        allowed.add(name)
    if not allowed:
        return Choice(ToolChoice.NONE), table.tools
    return Choice(ToolChoice(wire.mode or "auto")), [t for t in table.tools if t.name in allowed]


def choice_echo(wire: str | WireChoice | None) -> Any:
    """The choice as the response object shows it."""
    if wire is None:
        return "auto"
    if isinstance(wire, str):
        return wire
    echo: dict[str, Any] = {"type": wire.type}
    if wire.name is not None and wire.type in ("function", "custom"):
        echo["name"] = wire.name
    if wire.type == "allowed_tools":
        echo["mode"] = wire.mode or "auto"
        echo["tools"] = [
            {"type": entry.type} | ({} if entry.name is None else {"name": entry.name})
            for entry in wire.tools or ()
        ]
    return echo
