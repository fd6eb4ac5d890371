"""Which field of a request makes its prompt long, for errors about its length.

Contract: `largest_field` names the messages, unless the schemas of tools or of the answer are more
than half of the prompt: then the place in a schema that is. Called by the codec, after the fact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.core.schema.tables import step
from headrace.recipe.conversation import FormatKind
from headrace.recipe.converted import ConvertedRequest
from headrace.recipe.json_text import compact_json

_AROUND = 40  # characters of JSON around a name and a description


def largest_field(request: ConvertedRequest, messages: str, characters: int) -> str:
    """messages: the name of that field. characters: of the whole prompt."""
    sizes = [(len(compact_json(value)), path, value) for path, value in _schemas(request)]
    around = sum(
        len(tool.name) + len(tool.description or "") + _AROUND
        for tool in request.conversation.tools
    )
    if 2 * (around + sum(size for size, _, _ in sizes)) <= characters:
        return messages
    size, path, value = max(sizes, key=lambda entry: entry[0])
    return _largest_place(value, path) if 2 * size > characters else "tools"


def _schemas(request: ConvertedRequest) -> Iterator[tuple[str, Any]]:
    conversation, rules = request.conversation, request.rules
    for tool in conversation.tools:
        yield tool.path or "tools", tool.parameters
    form = conversation.response_format
    if form.kind is FormatKind.JSON_SCHEMA and rules is not None and rules.format is not None:
        yield rules.format.path, form.value


def _largest_place(value: Any, path: str) -> str:
    """As deep as one part is more than half of what holds it."""
    while True:
        half = len(compact_json(value)) // 2
        if isinstance(value, dict):
            entries = [(step(name), entry) for name, entry in value.items()]
        elif isinstance(value, list):
            entries = [(f"[{number}]", entry) for number, entry in enumerate(value)]
        else:
            return path
        large = next((e for e in entries if len(compact_json(e[1])) > half), None)
        if large is None:
            return path
        path, value = path + large[0], large[1]
