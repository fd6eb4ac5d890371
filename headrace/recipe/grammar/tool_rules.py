"""Parameters of tools as the markup of calls carries them: names, and texts or JSON as values.

Contract: `tool_rule` takes a declared tool and says what a call of it may look like. A string is
raw text in the markup, every other value JSON, so that a schema is split into both. A strict tool
whose schema cannot be kept to the letter is refused with the path of what is in the way; of others
what cannot be enforced is left out. Read by `calls.py`, which writes the grammar.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NoReturn

from headrace.core.schema.refs import subschemas
from headrace.core.schema.regex import literal_regex
from headrace.core.schema.regex_classes import ANY
from headrace.core.schema.schema import Schema, SchemaForm, check_schema_form
from headrace.core.schema.sizes import ALL_TYPES, types_of
from headrace.core.schema.tables import Mode, step
from headrace.errors import InvalidGrammar
from headrace.recipe.conversation import ToolDefinition

# What would end the attribute that holds a name, or be read as something else.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\"\\<>｜]")
_TEXT_KEYWORDS = frozenset(("minLength", "maxLength", "pattern"))
_TOP_KEYWORDS = frozenset(
    ("type", "properties", "required", "additionalProperties", "patternProperties")
)


@dataclass(frozen=True, slots=True)
class Values:
    """What a parameter may be.

    texts: expressions for raw text, each a conjunction, () when it is no string. json: a schema for
    the rest, or None.
    """

    texts: tuple[tuple[str, ...], ...] = ()
    json: str | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One named parameter."""

    name: str
    required: bool
    values: Values


@dataclass(frozen=True, slots=True)
class ToolRule:
    """Calls of one tool. extra: values of parameters without a name of their own, or None.

    extra_name: expression that their names match besides being no other parameter's.
    """

    name: str
    parameters: tuple[Parameter, ...] = ()
    extra: Values | None = None
    extra_name: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ToolRules:
    """The rules of all tools of a request; compared by identity, for they may be many.

    Requests with the same tools share one object (`protocols/`), by which grammars are remembered.
    """

    tools: tuple[ToolRule, ...]


def tool_rule(tool: ToolDefinition, schema: Any, *, close: bool = False) -> ToolRule:
    """The rule of a tool. schema: as the client wrote it. close: see `check_schema_form`.

    Raises InvalidGrammar only for strict tools, and for what is too large or no schema.
    """
    strict = bool(tool.strict)
    path = tool.path or f"tools.{tool.name}"
    mode = Mode.STRICT if strict else Mode.LOOSE
    form = check_schema_form({} if schema is None else schema, path, mode, close=close)
    top = form.resolve(form.root)
    if not isinstance(top, dict):
        top = {}
    if strict:
        _check_top(top, path)
    required = frozenset(top.get("required", ()))
    parameters = tuple(
        Parameter(name, name in required, values_of(form, node))
        for name, node in _named(top, path, strict).items()
    )
    return ToolRule(tool.name, parameters, *_extra(form, top, strict))


def _check_top(top: dict[str, Any], path: str) -> None:
    for keyword in top:
        if keyword not in _TOP_KEYWORDS:
            _fail(
                f"{path}{step(keyword)}",
                "parameters are written one by one, so at their top a strict tool needs an object "
                "with properties",
            )
    for name in (*top.get("properties", ()), *top.get("required", ())):
        if _UNSAFE.search(name) or re.search(r"\s", name) or not name:
            _fail(
                f"{path}.properties{step(name)}",
                "the markup of calls cannot carry this name: quotes, backslashes, angle brackets "
                "and white space are not possible",
            )
    if "required" in top and not set(top["required"]) <= set(top.get("properties", ())):
        _fail(f"{path}.required", "a strict tool needs all required parameters in `properties`")


def _fail(path: str, problem: str) -> NoReturn:
    raise InvalidGrammar(f"{path}: {problem}.", param=path)


def _named(top: dict[str, Any], path: str, strict: bool) -> dict[str, Schema]:
    named: dict[str, Schema] = dict(top.get("properties", {}))
    if not strict and named:
        # Required and described nowhere.
        named |= {name: True for name in top.get("required", ()) if name not in named}
    return {
        name: node
        for name, node in named.items()
        if node is not False and name and not _UNSAFE.search(name) and name == name.strip()
    }


def _extra(form: SchemaForm, top: dict[str, Any], strict: bool) -> tuple[Values | None, str | None]:
    """Values of further parameters, and the expression for their names."""
    for pattern, node in top.get("patternProperties", {}).items():
        return values_of(form, node), pattern.removeprefix("^").removesuffix("$")
    other = top.get("additionalProperties")
    if other is None:
        other = not strict and "properties" not in top
    return (None if other is False else values_of(form, other)), None


# --- values --------------------------------------------------------------------------------------


def values_of(form: SchemaForm, node: Schema) -> Values:
    """The schema of a parameter, split into raw texts and JSON."""
    split = _split(form, node, 0)
    if split is None:
        # A string in JSON is unusual for the model, but means the same.
        return Values((), form.text(node))
    texts, rest = split
    return Values(tuple(texts), None if rest is False else form.text(rest))


_Split = tuple[list[tuple[str, ...]], Schema]
_MAX_LEVELS = 16


def _split(form: SchemaForm, node: Schema, level: int) -> _Split | None:
    """Texts and the rest; None when they cannot be told apart."""
    node = form.resolve(node)
    if node is False:
        return [], False
    if node is True:
        node = {}
    if level > _MAX_LEVELS or "$ref" in node or ("allOf" in node and not _only_patterns(node)):
        return None
    if "anyOf" in node:
        return _split_alternatives(form, node, level) if set(node) == {"anyOf"} else None
    if "enum" in node or "const" in node:
        return _split_values(node)
    types = types_of(node)
    others = [name for name in sorted(types) if name != "string"]
    if "number" in types:
        others.remove("integer")
    texts = [_expressions(node)] if "string" in types else []
    if not others:
        return texts, False
    if types == ALL_TYPES or "string" in types:
        node = {key: value for key, value in node.items() if key not in _TEXT_KEYWORDS}
        node.pop("allOf", None)
        node = {**node, "type": others[0] if len(others) == 1 else others}
    return texts, node


def _only_patterns(node: dict[str, Any]) -> bool:
    return all(isinstance(entry, dict) and set(entry) == {"pattern"} for entry in node["allOf"])


def _split_alternatives(form: SchemaForm, node: dict[str, Any], level: int) -> _Split | None:
    texts: list[tuple[str, ...]] = []
    rests: list[Schema] = []
    for entry in node["anyOf"]:
        split = _split(form, entry, level + 1)
        if split is None:
            return None
        texts += split[0]
        if split[1] is not False:
            rests.append(split[1])
    if not rests:
        return texts, False
    return texts, rests[0] if len(rests) == 1 else {"anyOf": rests}


def _split_values(node: dict[str, Any]) -> _Split | None:
    if set(node) - {"type", "enum", "const"} or {"enum", "const"} <= set(node):
        return None
    values = [node["const"]] if "const" in node else node["enum"]
    types = types_of(node)
    strings = [value for value in values if isinstance(value, str) and "string" in types]
    rest = [value for value in values if not isinstance(value, str)]
    texts: list[tuple[str, ...]] = []
    if strings:
        texts.append(("|".join(map(literal_regex, strings)),))
    if not rest:
        return texts, False
    kept = {"type": node["type"]} if "type" in node else {}
    return texts, {**kept, "enum": rest}


def _expressions(node: dict[str, Any]) -> tuple[str, ...]:
    """Expressions that a string has to match, all of them."""
    found = [
        entry["pattern"].removeprefix("^").removesuffix("$")
        for entry, _ in subschemas({**node, "properties": {}})
        if "pattern" in entry
    ]
    least, most = node.get("minLength", 0), node.get("maxLength")
    if least or most is not None:
        found.append(f"{ANY}{{{least},{'' if most is None else most}}}")
    return tuple(found)
