"""References inside of a JSON schema: what `$ref` names, numbered in the order of first use.

Contract: only references to places of the same document are known; every place that is referenced
becomes one definition. Used by `schema.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import unquote

from headrace.core.schema.tables import DRAFTS, LEGACY_DRAFTS, LIMITS, step
from headrace.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Target:
    """A place that is referenced."""

    schema: Any
    path: str


class Document:
    """One schema as written. legacy: of a draft in which `$ref` stands alone.

    merges: whether schemas are combined with others, so that closing one would close the others.
    """

    def __init__(self, root: Any, path: str) -> None:
        self.root = root
        self.path = path
        self.targets: list[Target] = []
        self._numbers: dict[str, int] = {}
        self.legacy = self._dialect() in LEGACY_DRAFTS
        self.has_refs = self.merges = False
        self._anchors: dict[str, tuple[Any, str]] = {}
        for node, place in subschemas(root, path):
            self.has_refs |= "$ref" in node
            self.merges |= "allOf" in node
            if isinstance(node.get("$anchor"), str):
                self._anchors[node["$anchor"]] = node, place

    def _dialect(self) -> str | None:
        dialect = self.root.get("$schema") if isinstance(self.root, dict) else None
        if not isinstance(dialect, str):
            return None
        name = dialect.rstrip("#").split("://", 1)[-1]
        if name not in DRAFTS:
            self._fail(f"{self.path}.$schema", f"unknown dialect {dialect!r}")
        return name

    def _fail(self, path: str, problem: str) -> NoReturn:
        raise InvalidRequest(f"{path}: {problem}.", param=path)

    def number(self, reference: str, path: str) -> int:
        """The number of the place that a reference names. Raises InvalidRequest."""
        base = self.root.get("$id") if isinstance(self.root, dict) else None
        place, mark, fragment = reference.partition("#")
        if place and place != base:
            self._fail(
                path, f"the reference {reference!r} leads outside of the schema, which is refused"
            )
        fragment = unquote(fragment) if mark else ""
        known = self._numbers.get(fragment)
        if known is not None:
            return known
        if len(self.targets) >= LIMITS.definitions:
            self._fail(path, f"the schema references more than {LIMITS.definitions} places")
        if fragment and not fragment.startswith("/"):
            target = self._anchors.get(fragment)
        else:
            target = self._pointed(fragment)
        if target is None:
            self._fail(path, f"the reference {reference!r} leads nowhere")
        self._numbers[fragment] = len(self.targets)
        self.targets.append(Target(*target))
        return len(self.targets) - 1

    def _pointed(self, pointer: str) -> tuple[Any, str] | None:
        """RFC 6901."""
        node, path = self.root, self.path
        for token in pointer.split("/")[1:]:
            key = token.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node, path = node[key], f"{path}{step(key)}"
            elif isinstance(node, list) and key.isascii() and key.isdigit():
                if len(key) > 9 or int(key) >= len(node):
                    return None
                node, path = node[int(key)], f"{path}[{key}]"
            else:
                return None
        return node, path


def check_references(root: Any, path: str) -> None:
    """Raise InvalidRequest at the first reference that cannot be followed."""
    document = Document(root, path)
    for node, place in subschemas(root, path):
        if isinstance(node.get("$ref"), str):
            document.number(node["$ref"], f"{place}.$ref")


_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_ONES = (
    "additionalProperties",
    "items",
    "additionalItems",
    "not",
    "if",
    "then",
    "else",
    "contains",
)


def subschemas(root: Any, path: str = "") -> Iterator[tuple[dict[str, Any], str]]:
    """All schemas that are objects, in a schema as written or in normal form; no plain values."""
    waiting: list[tuple[Any, str]] = [(root, path)]
    while waiting:
        node, place = waiting.pop()
        if not isinstance(node, dict):
            continue
        yield node, place
        for keyword in _MAPS:
            if isinstance(entries := node.get(keyword), dict):
                waiting += ((e, f"{place}.{keyword}{step(name)}") for name, e in entries.items())
        for keyword in _LISTS:
            if isinstance(entries := node.get(keyword), list):
                waiting += ((e, f"{place}.{keyword}[{i}]") for i, e in enumerate(entries))
        waiting += ((node[name], f"{place}.{name}") for name in _ONES if name in node)


def recursive(definitions: Mapping[str, Any]) -> frozenset[str]:
    """Definitions that lead back to themselves, and those between two of them."""
    edges = {
        name: {e["$ref"].rpartition("/")[2] for e, _ in subschemas(node) if "$ref" in e}
        for name, node in definitions.items()
    }
    for _ in ("ends", "starts"):
        # Drop what leads nowhere, again and again; then the same against the direction.
        sources: dict[str, set[str]] = {name: set() for name in edges}
        for name, targets in edges.items():
            for target in targets & edges.keys():
                sources[target].add(name)
        left = {name: len(targets & edges.keys()) for name, targets in edges.items()}
        waiting = [name for name, count in left.items() if not count]
        while waiting:
            name = waiting.pop()
            del left[name]
            for source in sources[name]:
                left[source] -= 1
                if not left[source]:
                    waiting.append(source)
        edges = {name: sources[name] & left.keys() for name in left}
    return frozenset(edges)


def reachable(node: Any, definitions: Mapping[str, Any]) -> list[str]:
    """Numbers of the definitions that a node needs, directly or not, in order of discovery."""
    found: dict[str, None] = {}
    waiting = [node]
    while waiting:
        for entry, _ in subschemas(waiting.pop()):
            name = entry["$ref"].rpartition("/")[2] if "$ref" in entry else None
            if name is not None and name not in found:
                found[name] = None
                waiting.append(definitions[name])
    return list(found)
