"""JSON schemas of requests -> a normal form that the grammar engine enforces to the letter.

Contract: `check_schema_form` reads a schema keyword by keyword. What it returns allows exactly the
texts that the schema allows, up to order of properties (docs/structured-output.md); what cannot be
enforced exactly, contradicts itself, never ends or is too large raises InvalidRequest with the path
of the keyword. In mode LOOSE it is left out instead. Annotations are dropped, patterns and formats
are in plain form, references are `#/$defs/N`. Called by `normal.py` and
`recipe/grammar`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from headrace.core.schema.formats import KNOWN, MAX_LENGTHS, UNCHECKED, format_pattern
from headrace.core.schema.links import check_links
from headrace.core.schema.refs import Document, reachable
from headrace.core.schema.regex import RegexError, normal_regex
from headrace.core.schema.sizes import (
    FORMAT_LENGTH,
    FORMAT_PATTERN,
    check_arrays,
    check_enum,
    check_numbers,
    check_objects,
    check_strings,
    check_value,
    count_of,
    number_of,
)
from headrace.core.schema.tables import (
    ANNOTATIONS,
    IN_PLACE,
    LIMITS,
    REFUSED,
    TYPES,
    Mode,
    says_nothing,
    step,
)
from headrace.errors import InvalidGrammar, InvalidRequest

Schema = bool | dict[str, Any]
_COMPACT = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class SchemaForm:
    """A schema in normal form. definitions: what `$ref` names, by their numbers."""

    root: Schema
    definitions: Mapping[str, Schema] = field(default_factory=dict)

    def text(self, node: Schema | None = None) -> str:
        """Compact JSON of the schema, or of one of its nodes, with the definitions it needs."""
        node = self.root if node is None else node
        if node is True:
            return "{}"
        names = reachable(node, self.definitions)
        if not names:
            return _COMPACT(node)
        return _COMPACT({**_as_dict(node), "$defs": {n: self.definitions[n] for n in names}})

    def resolve(self, node: Schema) -> Schema:
        """The node, or what it stands for if it is nothing but a reference."""
        for _ in range(LIMITS.depth):
            if not isinstance(node, dict) or set(node) != {"$ref"}:
                break
            node = self.definitions[node["$ref"].rpartition("/")[2]]
        return node


def check_schema_form(
    schema: Any, path: str, mode: Mode = Mode.PLAIN, *, close: bool = False
) -> SchemaForm:
    """The normal form of a schema. Raises InvalidGrammar whose `param` starts with `path`.

    close: every object needs all its properties and has no others, as strict schemas of the
    official codec do.
    """
    try:
        return _read(schema, path, mode, close)
    except InvalidRequest as error:
        raise InvalidGrammar(error.message, param=error.param) from None


def _read(schema: Any, path: str, mode: Mode, close: bool) -> SchemaForm:
    reader = _Reader(Document(schema, path), mode, close)
    root = reader.node(schema, path, 0)
    if root is False:
        raise InvalidRequest(f"{path}: the schema `false` allows no answer.", param=path)
    definitions: dict[str, Schema] = {}
    while len(definitions) < len(reader.document.targets):
        number, target = len(definitions), reader.document.targets[len(definitions)]
        definitions[str(number)] = reader.node(target.schema, target.path, 0)
    form = SchemaForm(root, definitions)
    places = [path, *(target.path for target in reader.document.targets)]
    if not check_links(form.root, definitions, reader.later, places, mode):
        return SchemaForm(True)
    size = len(form.text().encode())
    if size > LIMITS.bytes:
        raise InvalidRequest(
            f"{path}: the schema has {size} bytes, at most {LIMITS.bytes} are allowed.", param=path
        )
    return form


def _as_dict(node: Schema) -> dict[str, Any]:
    return node if isinstance(node, dict) else {"anyOf": []}


class _Reader:
    """Reads nodes. later: (node, path) of those whose alternatives are checked at the end."""

    def __init__(self, document: Document, mode: Mode, close: bool) -> None:
        self.document = document
        self.later: list[tuple[dict[str, Any], str]] = []
        self._mode = mode
        self._close = close
        self._nodes = 0
        self._enum_values = 0

    def fail(self, path: str, problem: str) -> NoReturn:
        raise InvalidRequest(f"{path}: {problem}.", param=path)

    def node(self, schema: Any, path: str, depth: int) -> Schema:
        """The normal form of one schema."""
        self._nodes += 1
        if self._nodes > LIMITS.nodes:
            self.fail(self.document.path, f"the schema has more than {LIMITS.nodes} nodes")
        if depth > LIMITS.depth:
            # The path of the place itself would be as deep.
            self.fail(self.document.path, f"the schema is nested deeper than {LIMITS.depth} levels")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self.fail(path, "a schema must be an object or a boolean")
        if "$ref" in schema and self.document.legacy:
            schema = {"$ref": schema["$ref"]}
        if self._close or self._mode is Mode.STRICT:
            schema = self._closed(schema)
        out: dict[str, Any] = {}
        for keyword, value in schema.items():
            try:
                out |= self._keyword(keyword, value, schema, f"{path}{step(keyword)}", depth)
            except InvalidRequest:
                if self._mode is not Mode.LOOSE or self._nodes > LIMITS.nodes:
                    raise
        return self._settled(out, path)

    def _keyword(
        self, keyword: str, value: Any, schema: dict[str, Any], path: str, depth: int
    ) -> dict[str, Any]:
        if keyword in ANNOTATIONS:
            self._check_identity(keyword, value, schema, path)
            return {}
        read = _KEYWORDS.get(keyword)
        if read is not None:
            found: dict[str, Any] = read(self, value, schema, path, depth)
            return found
        if keyword in REFUSED:
            if says_nothing(keyword, value, schema):
                return {}
            self.fail(path, f"`{keyword}` is not supported: {REFUSED[keyword]}")
        if self._mode is Mode.STRICT:
            self.fail(path, f"unknown keyword `{keyword}` in a strict schema")
        return {}

    def _check_identity(self, keyword: str, value: Any, schema: dict[str, Any], path: str) -> None:
        nested = schema is not self.document.root
        if keyword == "$id" and nested and isinstance(value, str) and self.document.has_refs:
            self.fail(path, "`$id` is supported at the top only, when there are references")

    def _closed(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Strict: an object has the properties that are named, and no others."""
        properties = schema.get("properties")
        if not isinstance(properties, dict) and schema.get("type") != "object":
            return schema
        changed = dict(schema)
        if self._close:
            changed.setdefault("properties", {})
            changed["required"] = list(changed["properties"])
            changed["additionalProperties"] = False
        elif not self.document.merges and not _OPENS.intersection(schema):
            changed["additionalProperties"] = False
        return changed

    def _settled(self, out: dict[str, Any], path: str) -> Schema:
        """What the keywords of one node mean together."""
        for check in (check_enum, check_numbers, check_strings, check_arrays, check_objects):
            try:
                check(out, path)
            except InvalidRequest:
                if self._mode is not Mode.LOOSE:
                    raise
                return True
        if self._mode is Mode.LOOSE:
            out = uncombined(out)
        if not _LATER.isdisjoint(out):
            self.later.append((out, path))
        return out if out else True

    # --- values of keywords ------------------------------------------------------------------

    def list_of_nodes(self, value: Any, path: str, depth: int) -> list[Schema]:
        """A list of schemas, not empty."""
        if not isinstance(value, list) or not value:
            self.fail(path, "must be a list of at least one schema")
        if len(value) > LIMITS.alternatives:
            self.fail(path, f"has more than {LIMITS.alternatives} entries")
        return [self.node(entry, f"{path}[{i}]", depth + 1) for i, entry in enumerate(value)]

    def _type(self, value: Any, schema: Any, path: str, depth: int) -> dict[str, Any]:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names:
            self.fail(path, "must be the name of a type, or a list of at least one")
        for name in names:
            if name not in TYPES:
                self.fail(path, f"unknown type {name!r}; known: {', '.join(TYPES)}")
        return {"type": value}

    def _enum(self, value: Any, schema: Any, path: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, list) or not value:
            self.fail(path, "must be a list of at least one value, or nothing is allowed")
        self._enum_values += len(value)
        if self._enum_values > LIMITS.enum_values:
            self.fail(path, f"the schema lists more than {LIMITS.enum_values} values")
        for i, entry in enumerate(value):
            check_value(entry, f"{path}[{i}]")
        return {"enum": value}

    def _const(self, value: Any, schema: Any, path: str, depth: int) -> dict[str, Any]:
        check_value(value, path)
        return {"const": value}

    def _alternatives(self, value: Any, schema: Any, path: str, depth: int) -> dict[str, Any]:
        nodes = self.list_of_nodes(value, path, depth)
        if all(entry is False for entry in nodes):
            self.fail(path, "none of the alternatives allows anything")
        return {path.rpartition(".")[2]: nodes}

    def _all_of(self, value: Any, schema: Any, path: str, depth: int) -> dict[str, Any]:
        nodes = self.list_of_nodes(value, path, depth)
        if any(entry is False for entry in nodes):
            self.fail(path, "one of the conditions allows nothing")
        return {"allOf": nodes}

    def _ref(self, value: Any, schema: Any, path: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, str):
            self.fail(path, "must be a string")
        number = self.document.number(value, path)
        return {"$ref": f"#/$defs/{number}"}

    def _node(self, value: Any, schema: Any, path: str, depth: int) -> dict[str, Any]:
        return {path.rpartition(".")[2]: self.node(value, path, depth + 1)}

    def _properties(self, value: Any, schema: Any, path: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(path, "must be an object")
        if len(value) > LIMITS.properties:
            self.fail(path, f"has more than {LIMITS.properties} properties")
        nodes = {n: self.node(v, f"{path}{step(n)}", depth + 1) for n, v in value.items()}
        return {"properties": nodes}

    def _pattern_properties(self, value: Any, schema: Any, path: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(path, "must be an object")
        if len(value) > 1:
            self.fail(path, "more than one pattern is not supported: a name may match several")
        return {
            "patternProperties": {
                f"^(?:{self.regex(name, f'{path}{step(name)}')})$": self.node(
                    entry, f"{path}{step(name)}", depth + 1
                )
                for name, entry in value.items()
            }
        }

    def _required(self, value: Any, schema: Any, path: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self.fail(path, "must be a list of names")
        if len(value) > LIMITS.properties:
            self.fail(path, f"has more than {LIMITS.properties} names")
        return {"required": list(dict.fromkeys(value))}

    def _items(self, value: Any, schema: Any, path: str, depth: int) -> dict[str, Any]:
        if isinstance(value, list):  # before draft 2020-12
            nodes = [self.node(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
            return {"prefixItems": nodes} if nodes else {}
        return {"items": self.node(value, path, depth + 1)}

    def _additional_items(self, value: Any, schema: Any, path: str, depth: int) -> dict[str, Any]:
        # It counts beside a list of items only, and says what `items` says since draft 2020-12.
        if not isinstance(schema.get("items"), list):
            return {}
        return {"items": self.node(value, path, depth + 1)}

    def _prefix_items(self, value: Any, schema: Any, path: str, depth: int) -> dict[str, Any]:
        return {"prefixItems": self.list_of_nodes(value, path, depth)}

    def _unique(self, value: Any, schema: Any, path: str, depth: int) -> dict[str, Any]:
        most = schema.get("maxItems")
        if value is True and not (isinstance(most, (int, float)) and most <= 1):
            self.fail(path, "`uniqueItems` is not supported: no grammar expresses it")
        return {}

    def regex(self, value: Any, path: str) -> str:
        """The plain form of a pattern."""
        if not isinstance(value, str):
            self.fail(path, "must be a string")
        try:
            return normal_regex(value)
        except RegexError as error:
            self.fail(path, f"the pattern {error}")

    def _pattern(self, value: Any, schema: Any, path: str, depth: int) -> dict[str, Any]:
        return self._with_pattern(schema, self.regex(value, path), "pattern")

    def _format(self, value: Any, schema: Any, path: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, str):
            self.fail(path, "must be a string")
        types = schema.get("type", "string")
        if isinstance(types, (str, list)) and types != "string" and "string" not in types:
            return {}  # of other types formats say nothing
        if value in UNCHECKED or (value not in KNOWN and self._mode is Mode.STRICT):
            self.fail(path, f"the format {value!r} is not supported; known: {_known_formats()}")
        if value not in KNOWN:
            return {}
        found = self._with_pattern(schema, format_pattern(value), "format")
        return found | {FORMAT_LENGTH: MAX_LENGTHS[value]} if value in MAX_LENGTHS else found

    def _with_pattern(self, schema: dict[str, Any], pattern: str, keyword: str) -> dict[str, Any]:
        """`pattern` holds one expression; a second one becomes a condition of its own."""
        first = keyword == "pattern" or not isinstance(schema.get("pattern"), str)
        return {"pattern" if first else FORMAT_PATTERN: f"^(?:{pattern})$"}

    def _number(self, value: Any, schema: Any, path: str, depth: int) -> dict[str, Any]:
        return {path.rpartition(".")[2]: number_of(value, path)}

    def _count(self, value: Any, schema: Any, path: str, depth: int) -> dict[str, Any]:
        return {path.rpartition(".")[2]: count_of(value, path)}


_OPENS = frozenset(("$ref", "anyOf", "oneOf", "allOf", "patternProperties", "additionalProperties"))
# What is looked at once all definitions are known.
_LATER = frozenset((*IN_PLACE, "$ref", "multipleOf", "enum", "const"))
_Read = Callable[[_Reader, Any, dict[str, Any], str, int], dict[str, Any]]
_KEYWORDS: dict[str, _Read] = {
    "type": _Reader._type,
    "enum": _Reader._enum,
    "const": _Reader._const,
    "anyOf": _Reader._alternatives,
    "oneOf": _Reader._alternatives,
    "allOf": _Reader._all_of,
    "$ref": _Reader._ref,
    "properties": _Reader._properties,
    "required": _Reader._required,
    "additionalProperties": _Reader._node,
    "patternProperties": _Reader._pattern_properties,
    "items": _Reader._items,
    "prefixItems": _Reader._prefix_items,
    "additionalItems": _Reader._additional_items,
    "uniqueItems": _Reader._unique,
    "pattern": _Reader._pattern,
    "format": _Reader._format,
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        _Reader._number,
    ),
    **dict.fromkeys(
        (
            "minLength",
            "maxLength",
            "minItems",
            "maxItems",
            "minProperties",
            "maxProperties",
        ),
        _Reader._count,
    ),
}


def uncombined(node: dict[str, Any]) -> dict[str, Any]:
    """Loose: the most telling of conditions that might exclude each other."""
    for keyword in ("const", "enum", "$ref", "anyOf", "oneOf", "allOf"):
        if keyword in node and (keyword != "allOf" or len(node) == len(node["allOf"]) == 1):
            return {keyword: node[keyword]}
    kept = dict(node)
    kept.pop("allOf", None)
    if "pattern" in kept:
        kept.pop("minLength", None)
        kept.pop("maxLength", None)
    return kept


def _known_formats() -> str:
    return ", ".join(sorted(KNOWN))
