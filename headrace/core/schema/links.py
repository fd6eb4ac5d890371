"""What the nodes of a whole schema mean together: recursion, alternatives, multiples.

Contract: `check_links` takes a complete normal form. Recursion that never ends is refused, `oneOf`
becomes `anyOf` where no value fits two of its branches, and is refused elsewhere. Called by
`schema.py` when all definitions are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any, NoReturn

from headrace.core.schema.refs import recursive
from headrace.core.schema.sizes import (
    ALL_TYPES,
    MAX_REMAINDERS,
    common_multiple,
    same,
    type_of,
    types_of,
)
from headrace.core.schema.tables import IN_PLACE, LIMITS, Mode, step
from headrace.errors import InvalidRequest

Schema = bool | dict[str, Any]
_MAX_ROUNDS = 50
_LOOK_AHEAD = 8  # levels of references and alternatives that are compared
_MAX_COMPARISONS = 50_000


def _fail(path: str, problem: str) -> NoReturn:
    raise InvalidRequest(f"{path}: {problem}.", param=path)


def check_links(
    root: Schema,
    definitions: Mapping[str, Schema],
    later: list[tuple[dict[str, Any], str]],
    places: list[str],
    mode: Mode,
) -> bool:
    """Check the nodes together, changing them in place; False: in mode LOOSE nothing is left.

    later: nodes to be checked, all with references among them, and where they are. places: of the
    root, then of the definitions.
    """
    links = _Links(definitions, {id(node): place for node, place in later})
    try:
        links.check_chains(root, places[0])
        links.check_ends(root, places)
        for node, place in later:
            if mode is not Mode.LOOSE:
                links.check_possible(node, place)
            links.check_node(node, place, mode)
    except InvalidRequest:
        if mode is not Mode.LOOSE:
            raise
        return False
    return True


class _Links:
    """The definitions of one schema."""

    def __init__(self, definitions: Mapping[str, Schema], places: Mapping[int, str]) -> None:
        """places: of nodes, by id()."""
        self._definitions = definitions
        self._places = places
        # By id() of nodes, which all live as long as this object does.
        self._types: dict[int, frozenset[str]] = {}
        self._multiples: dict[int, frozenset[int | float]] = {}
        self._variants: dict[int, int] = {}
        self._patterns: dict[int, frozenset[str]] = {}
        self._comparisons = 0
        self._recursive = recursive(definitions)

    def _target(self, node: dict[str, Any]) -> Schema:
        return self._definitions[node["$ref"].rpartition("/")[2]]

    def _beside(self, node: Schema) -> Iterator[Schema]:
        """Schemas that hold for the same value as this one."""
        if isinstance(node, dict):
            if "$ref" in node:
                yield self._target(node)
            for keyword in IN_PLACE:
                yield from node.get(keyword, ())

    # --- recursion ---------------------------------------------------------------------------

    def check_chains(self, root: Schema, path: str) -> None:
        """References that lead to each other without a value in between end, and soon."""
        lengths: dict[int, int] = {}
        for start in (root, *self._definitions.values()):
            self._chain(start, path, lengths, set(), 0)

    def _chain(
        self, node: Schema, path: str, lengths: dict[int, int], active: set[int], depth: int
    ) -> int:
        """How many levels of schemas apply to one value."""
        if not isinstance(node, dict):
            return 0
        known = lengths.get(id(node))
        if known is not None:
            return known
        if id(node) in active:
            place = self._places.get(id(node), path)
            place += ".$ref" if "$ref" in node else ""
            _fail(place, "a reference leads back to itself with nothing in between")
        if depth > LIMITS.depth:
            _fail(path, f"more than {LIMITS.depth} references follow one another")
        active.add(id(node))
        inner = (self._chain(e, path, lengths, active, depth + 1) for e in self._beside(node))
        lengths[id(node)] = 1 + max(inner, default=0)
        active.discard(id(node))
        return lengths[id(node)]

    def check_ends(self, root: Schema, places: list[str]) -> None:
        """Some finite value fits (least fixed point over the definitions)."""
        finite: set[str] = set()
        names = list(reversed(list(self._definitions)))  # what is found late is needed early
        for _ in range(_MAX_ROUNDS):
            new = {n for n in names if n not in finite and self._add(n, finite)}
            if not new:
                break
        if not self._ends(root, finite):
            place = self._endless_place(root, places, finite)
            _fail(place, "every value that fits is endless: a required part contains itself")

    def _endless_place(self, root: Schema, places: list[str], finite: set[str]) -> str:
        """The reference that closes the circle."""
        node, place, seen = root, places[0], set[str]()
        while isinstance(node, dict):
            if "$ref" in node and (name := node["$ref"].rpartition("/")[2]) not in finite:
                if name in seen or self._definitions[name] is root:
                    return f"{place}.$ref"
                seen.add(name)
                node, place = self._definitions[name], places[int(name) + 1]
                continue
            inner = next((e for e in _needed(node) if not self._ends(e[0], finite)), None)
            if inner is None:
                break
            node, place = inner[0], place + inner[1]
        return place

    def _add(self, name: str, finite: set[str]) -> bool:
        if self._ends(self._definitions[name], finite):
            finite.add(name)
            return True
        return False

    def _ends(self, node: Schema, finite: set[str]) -> bool:
        if isinstance(node, bool):
            return node
        if "$ref" in node and node["$ref"].rpartition("/")[2] not in finite:
            return False
        if not all(self._ends(entry, finite) for entry in node.get("allOf", ())):
            return False
        for keyword in ("anyOf", "oneOf"):
            if keyword in node and not any(self._ends(e, finite) for e in node[keyword]):
                return False
        if "enum" in node or "const" in node:
            return True
        types = types_of(node)
        return (
            bool(types - {"object", "array"})
            or ("object" in types and self._object_ends(node, finite))
            or ("array" in types and self._array_ends(node, finite))
        )

    def _object_ends(self, node: dict[str, Any], finite: set[str]) -> bool:
        properties = node.get("properties", {})
        other = node.get("additionalProperties", True)
        if node.get("patternProperties"):
            other = True
        return all(
            self._ends(properties.get(name, other), finite) for name in node.get("required", ())
        )

    def _array_ends(self, node: dict[str, Any], finite: set[str]) -> bool:
        least, prefix = node.get("minItems", 0), node.get("prefixItems", [])
        if not all(self._ends(entry, finite) for entry in prefix[:least]):
            return False
        return least <= len(prefix) or self._ends(node.get("items", True), finite)

    # --- conditions for one value ----------------------------------------------------------------

    def check_possible(self, node: dict[str, Any], path: str) -> None:
        """Some value can meet all conditions of a node, and they can be combined."""
        if not self.types(node):
            _fail(path, "the conditions that are combined here have no type in common")
        if self.variants(node) > LIMITS.alternatives:
            _fail(path, f"the alternatives here have more than {LIMITS.alternatives} combinations")
        sources = _sources(node)
        if len(sources) > 1:
            for entry in sources:
                if _reference(entry) in self._recursive:
                    _fail(path, "a part that contains itself cannot be combined with more keywords")
        self.name_patterns(node, path)
        values = _values(node)
        if values is not None and set(node) - {"type", "enum", "const"}:
            import jsonschema_rs  # heavy, and hardly any schema needs it

            valid = jsonschema_rs.validator_for({**node, "$defs": dict(self._definitions)}).is_valid
            if not any(map(valid, values)):
                _fail(path, "none of the listed values meets the other conditions")

    def name_patterns(self, node: Schema, path: str) -> frozenset[str]:
        """Patterns of `patternProperties` that may hold together; refuse several."""
        if not isinstance(node, dict):
            return frozenset()
        known = self._patterns.get(id(node))
        if known is None:
            own = set(node.get("patternProperties", ()))
            if "$ref" in node:
                own |= self.name_patterns(self._target(node), path)
            for entry in node.get("allOf", ()):
                own |= self.name_patterns(entry, path)
            branches = [
                self.name_patterns(entry, path)
                for keyword in ("anyOf", "oneOf")
                for entry in node.get(keyword, ())
            ]
            if any(len(own | branch) > 1 for branch in (own, *(b for b in branches if own))):
                _fail(path, "several `patternProperties` are combined: a name may match several")
            known = self._patterns[id(node)] = frozenset(own).union(*branches)
        return known

    def types(self, node: Schema) -> frozenset[str]:
        """The types of values that may fit."""
        if not isinstance(node, dict):
            return ALL_TYPES if node else frozenset()
        known = self._types.get(id(node))
        if known is None:
            known = types_of(node)
            if "$ref" in node:
                known &= self.types(self._target(node))
            for entry in node.get("allOf", ()):
                known &= self.types(entry)
            for keyword in ("anyOf", "oneOf"):
                if keyword in node:
                    known &= frozenset().union(*map(self.types, node[keyword]))
            self._types[id(node)] = known
        return known

    def variants(self, node: Schema) -> int:
        """How many combinations of alternatives a value may take, at most about the limit."""
        if not isinstance(node, dict):
            return 1
        known = self._variants.get(id(node))
        if known is None:
            known = self.variants(self._target(node)) if "$ref" in node else 1
            for entry in node.get("allOf", ()):
                known *= self.variants(entry)
            for keyword in ("anyOf", "oneOf"):
                if keyword in node:
                    known *= sum(map(self.variants, node[keyword]))
            known = self._variants[id(node)] = min(known, LIMITS.alternatives + 1)
        return known

    def multiples(self, node: Schema) -> frozenset[int | float]:
        """Values of `multipleOf` that may hold together."""
        if not isinstance(node, dict):
            return frozenset()
        known = self._multiples.get(id(node))
        if known is None:
            own = frozenset([node["multipleOf"]]) if "multipleOf" in node else frozenset()
            known = own.union(*map(self.multiples, self._beside(node)))
            self._multiples[id(node)] = known
        return known

    # --- alternatives and multiples --------------------------------------------------------------

    def check_node(self, node: dict[str, Any], path: str, mode: Mode) -> None:
        """`oneOf` and `multipleOf` of one node."""
        multiples = self.multiples(node)
        if len(multiples) > 1:
            unit = common_multiple(multiples)
            if unit.numerator > MAX_REMAINDERS or unit.denominator > MAX_REMAINDERS:
                _fail(f"{path}.multipleOf", "is not supported together with the other multiples")
        if "oneOf" not in node:
            return
        branches = node["oneOf"]
        if mode is not Mode.LOOSE and sum(entry is not False for entry in branches) > 1:
            if len(branches) > LIMITS.depth:
                _fail(f"{path}.oneOf", f"has more than {LIMITS.depth} branches; use anyOf")
            for (i, a), (k, b) in combinations(enumerate(branches), 2):
                if not self._disjoint(a, b, 0):
                    _fail(
                        f"{path}.oneOf",
                        f"a value may fit the branches {i} and {k}; use anyOf, or give them "
                        "different types or a required property with different constants",
                    )
        rest = {key: value for key, value in node.items() if key != "oneOf"}
        if "anyOf" in rest:
            rest["allOf"] = [*rest.get("allOf", ()), {"anyOf": branches}]
        else:
            # In the place of the other, which decides about the order of properties.
            rest = {("anyOf" if key == "oneOf" else key): value for key, value in node.items()}
        node.clear()
        node.update(rest)

    def _disjoint(self, a: Schema, b: Schema, depth: int) -> bool:
        """Whether it is certain that no value fits both."""
        self._comparisons += 1
        if a is False or b is False:
            return True
        if isinstance(a, bool) or isinstance(b, bool) or depth > _LOOK_AHEAD:
            return False
        if self._comparisons > _MAX_COMPARISONS:
            return False
        types = types_of(a) & types_of(b)
        if not types:
            return True
        values_a, values_b = _values(a), _values(b)
        if values_a is not None and values_b is not None:
            return not any(same(x, y) for x in values_a for y in values_b)
        for values, other in ((values_a, b), (values_b, a)):
            if values is not None and not any(type_of(v) in types_of(other) for v in values):
                return True
        return (
            self._parts_disjoint(a, b, depth)
            or self._parts_disjoint(b, a, depth)
            or (types == {"object"} and self._objects_disjoint(a, b, depth))
            or (types <= {"number", "integer"} and _ranges_disjoint(a, b))
        )

    def _parts_disjoint(self, a: dict[str, Any], b: Schema, depth: int) -> bool:
        """A condition of `a`, or all its alternatives, exclude `b`."""
        conditions = list(a.get("allOf", ()))
        if "$ref" in a:
            conditions.append(self._target(a))
        if any(self._disjoint(entry, b, depth + 1) for entry in conditions):
            return True
        return any(
            keyword in a and all(self._disjoint(e, b, depth + 1) for e in a[keyword])
            for keyword in ("anyOf", "oneOf")
        )

    def _objects_disjoint(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        names = dict.fromkeys([*a.get("required", ()), *b.get("required", ())])
        return any(
            self._disjoint(_property(a, name), _property(b, name), depth + 1) for name in names
        )


def _needed(node: dict[str, Any]) -> Iterator[tuple[Schema, str]]:
    """Parts of which a value needs some, or all, and the steps to them."""
    for keyword in IN_PLACE:
        yield from ((e, f".{keyword}[{i}]") for i, e in enumerate(node.get(keyword, ())))
    properties = node.get("properties", {})
    for name in node.get("required", ()):
        if name in properties:
            yield properties[name], f".properties{step(name)}"
        else:
            yield node.get("additionalProperties", True), ".additionalProperties"
    yield from ((e, f".prefixItems[{i}]") for i, e in enumerate(node.get("prefixItems", ())))
    if node.get("minItems", 0) > len(node.get("prefixItems", ())):
        yield node.get("items", True), ".items"


def _sources(node: dict[str, Any]) -> list[Schema]:
    """The schemas that a node combines; its plain keywords count as one."""
    conditions = list(node.get("allOf", ()))
    branches = [entry for keyword in ("anyOf", "oneOf") for entry in node.get(keyword, ())]
    single = [{"$ref": node["$ref"]}] if "$ref" in node else []
    plain = [True] if set(node) - {"$ref", *IN_PLACE} else []
    if not (conditions or single or plain):
        return []  # nothing but alternatives, each by itself
    return [*conditions, *branches, *single, *plain]


def _reference(node: Schema) -> str | None:
    return node["$ref"].rpartition("/")[2] if isinstance(node, dict) and "$ref" in node else None


def _property(node: dict[str, Any], name: str) -> Schema:
    properties: dict[str, Schema] = node.get("properties", {})
    if name in properties:
        return properties[name]
    if node.get("patternProperties"):
        return True
    other: Schema = node.get("additionalProperties", True)
    return other


def _values(node: dict[str, Any]) -> list[Any] | None:
    """The values of a node that lists them."""
    if "const" in node:
        return [node["const"]]
    found: list[Any] | None = node.get("enum")
    if found is None and types_of(node) == {"null"}:
        return [None]
    return found


def _ranges_disjoint(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return any(
        "minimum" in low and "maximum" in high and low["minimum"] > high["maximum"]
        for low, high in ((a, b), (b, a))
    )
