"""Random damage for bench/fuzz_codec.py: request bodies and model outputs.

Everything is drawn from the generator that is passed in, so a case is its seed and its number. What
is put in is what breaks codecs: control spellings, markup, huge and odd numbers, deep nesting, lone
surrogates, wrong types, half a document.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

SPELLINGS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<think>",
    "</think>",
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
    "｜DSML｜",
    "<｜image｜>",
    "<｜ref｜>",
    "<｜/ref｜>",
    "<｜box｜>",
    "<｜/point｜>",
    "<｜title｜>",
)
MARKUP = (
    "\n\n<｜DSML｜ calls>\n",
    "</｜DSML｜ calls>",
    "<｜DSML｜tool_calls>",
    "</｜DSML｜tool_calls>",
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    '<｜DSML｜ invoke name="f">\n',
    '<｜DSML｜invoke name="get weather"/>',
    "</｜DSML｜ invoke>\n",
    '<｜DSML｜ parameter name="a" string="true">',
    '<｜DSML｜parameter name="b c" string="false">',
    '<｜DSML｜parameter name="q">',
    "<parameter name=",
    "</｜DSML｜ parameter>",
    "</｜DSML｜",
    "<｜DSML",
    'invoke name="',
    'true">',
    "```json\n",
    "\n```",
    "{",
    "[1, 2",
    '"',
    "\\",
    "\n",
    "\n\n\n",
    "STOP",
)
_KEYS = (
    "content", "type", "name", "tool_calls", "role", "text", "id", "arguments", "input", "source",
    "thinking", "reasoning_content", "reasoning", "tools", "tool_choice", "n", "stop", "model",
    "parameters", "strict", "cache_control", "tool_call_id", "chat_template_kwargs", "$ref",
    "anyOf",
)  # fmt: skip
_ROLES = ("system", "user", "assistant", "tool", "developer", "latest_reminder", "function", "")
_TYPES = (
    "text", "image_url", "function", "custom", "namespace", "tool_use", "tool_result", "thinking",
    "redacted_thinking", "input_text", "output_text", "function_call", "function_call_output",
    "custom_tool_call", "tool_search_call", "tool_search_output", "web_search", "reasoning",
    "message", "json_object", "json_schema", "regex", "object", "string", "enabled", "disabled",
    "adaptive", "any", "auto", "none", "required", "tool", "file", "document", "item_reference",
)  # fmt: skip
_NUMBERS = (
    0, -1, 1, 2, 17, 255, 256, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 0.0, -0.0,
    1.5, 1e-5, 1e-7, 1e16, 1e308, 5e-324, 0.1,
)  # fmt: skip


def odd_text(rng: random.Random) -> str:
    """A text of a kind that breaks things."""
    kind = rng.randrange(9)
    if kind == 0:
        return rng.choice(SPELLINGS)
    if kind == 1:
        return "".join(rng.choices(MARKUP, k=rng.randrange(1, 6)))
    if kind == 2:
        return rng.choice(
            ("<", "｜", "\n", " ", "{", "é", "👩‍🚀", "\u0000", "\u2028", "中")
        ) * rng.randrange(1, 400)
    if kind == 3:
        return "".join(
            chr(rng.choice((rng.randrange(32), rng.randrange(0x3000), 0x1F600))) for _ in range(20)
        )
    if kind == 4:
        return rng.choice(_ROLES + _TYPES)
    if kind == 5:
        return "https://e/" + "x" * rng.choice((1, 8183, 9000))
    if kind == 6:
        return "data:image/png;base64," + rng.choice(("", "AAAA", "A", "!!!", "iVBORw0KGgo="))
    if kind == 7:
        return "x-anthropic-billing-header: cc_version=1; You are Claude\nrest"
    return rng.choice(("", "a", "json", "call_00_ET_abcdefghij", "{}", '{"a": 1, "a": 2}', "null"))


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind == 0:
        return None
    if kind == 1:
        return rng.choice((True, False))
    if kind == 2:
        return rng.choice(_NUMBERS)
    if kind < 5:
        return odd_text(rng)
    if kind == 5:
        return [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {rng.choice(_KEYS): odd_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    value: Any = odd_text(rng)
    for _ in range(rng.choice((3, 60, 126, 127, 128, 200))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def _nodes(value: Any, found: list[tuple[Any, Any]]) -> None:
    """(container, key) of everything in a JSON value."""
    items: Any = ()
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, item in items:
        found.append((value, key))
        _nodes(item, found)


def mutated_request(rng: random.Random, requests: Sequence[Any]) -> bytes:
    """A request with some damage, as JSON text (which may be damaged too)."""
    request = copy.deepcopy(rng.choice(requests))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 4))):
        nodes: list[tuple[Any, Any]] = []
        _nodes(request, nodes)
        if not nodes:
            break
        container, key = rng.choice(nodes)
        _damage(rng, container, key, nodes, requests)
    text = json.dumps(request, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.08:
        text = _damaged_text(rng, text)
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.02:
        cut = rng.randrange(len(data) + 1)
        data = data[:cut] + bytes(rng.randrange(256) for _ in range(rng.randrange(4))) + data[cut:]
    return data


def _damage(
    rng: random.Random,
    container: Any,
    key: Any,
    nodes: list[tuple[Any, Any]],
    requests: Sequence[Any],
) -> None:
    kind = rng.choice((0, 1, 2, 3, 3, 3, 3, 3, 4, 5, 5, 6, 7))
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, list):
        container.insert(rng.randrange(len(container) + 1), copy.deepcopy(container[key]))
    elif kind == 2 and isinstance(container, dict):
        container[rng.choice(_KEYS)] = odd_value(rng)
    elif kind == 3:
        # Deep in the request, where texts of users stand.
        texts = [(c, k) for c, k in nodes if k in _in(c) and isinstance(c[k], str)]
        if not texts:
            return
        container, key = rng.choice(texts)
        text, cut = container[key], rng.randrange(len(container[key]) + 1)
        container[key] = text[:cut] + odd_text(rng) + text[cut:]
    elif kind == 4:
        other, name = rng.choice(nodes)
        container[key] = copy.deepcopy(other[name]) if name in _in(other) else odd_value(rng)
    elif kind == 5:
        donor: list[tuple[Any, Any]] = []
        _nodes(rng.choice(requests), donor)
        other, name = rng.choice(donor)
        container[key] = copy.deepcopy(other[name])
    elif kind == 6 and isinstance(container, list):
        rng.shuffle(container)
    else:
        container[key] = odd_value(rng)


def _in(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def _damaged_text(rng: random.Random, text: str) -> str:
    cut = rng.randrange(len(text) + 1)
    kind = rng.randrange(5)
    if kind == 0:
        return text[:cut]
    if kind == 1:
        return text[:cut] + rng.choice('{}[]",:0e-\\\x00ｘ') + text[cut:]
    if kind == 2:
        return text[:cut] + "\\ud800" + text[cut:]
    if kind == 3:
        return text[:cut] + rng.choice(("NaN", "1e999", "-", "01", "[" * 300)) + text[cut:]
    return text + text[cut:]


def mutated_output(rng: random.Random, outputs: Sequence[str]) -> str:
    """An answer as a damaged model would write it."""
    text = rng.choice(outputs)
    for _ in range(rng.choice((0, 1, 2, 3, 5))):
        start = rng.randrange(len(text) + 1)
        stop = min(len(text), start + rng.randrange(30))
        kind = rng.randrange(6)
        if kind == 0:
            text = text[:start] + text[stop:]
        elif kind == 1:
            text = text[:stop] + text[start:stop] + text[stop:]
        elif kind == 2:
            text = text[:start] + rng.choice(MARKUP) + text[start:]
        elif kind == 3:
            text = text[:start] + rng.choice(SPELLINGS) + text[start:]
        elif kind == 4:
            text = text[:start] + odd_text(rng) + text[start:]
        else:
            text = text[:start]
    return text


def cut_up(rng: random.Random, items: Sequence[Any]) -> list[Any]:
    """The items in consecutive random groups."""
    longest = rng.choice((1, 2, 5, 13, 10**6))
    groups, start = [], 0
    while start < len(items):
        stop = start + rng.randrange(1, min(longest, len(items) - start) + 1)
        groups.append(items[start:stop])
        start = stop
    return groups
