"""Inputs of a megabyte that make naive codecs quadratic, for bench/fuzz_codec.py and the tests.

`extremes(tokenizer)` gives (name, call) pairs; a call runs one input through the codec at one level
and raises only what is documented. How long they may take (two seconds) is the caller's affair.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from headrace.errors import InvalidRequest
from headrace.recipe.chunks import Finish, Text, Tokens
from headrace.recipe.options import ConvertOptions, Level
from headrace.recipe.protocols.convert import convert
from headrace.recipe.render import render
from headrace.recipe.stream import AnswerStream
from headrace.recipe.tokenizer import Tokenizer

MB = 1_000_000
MODEL = "DeepSeek-V4.1-Flash"
UNITS = {
    "less-than": "<",
    "bars": "｜",
    "newlines": "\n",
    "spaces": " ",
    "quotes": '"',
    "backslashes": "\\",
    "backticks": "`",
    "braces": "{",
    "brackets": "[",
    "half-markers": "<｜DSML",
    "half-ends": "</｜DSML",
    "half-think": "\n</think",
    "lines-and-less-than": "\n\n<",
    "digits": "1",
    "letters": "a",
    "chinese": "中",
    "combining": "é",
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}},
}
_CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="{}">'
)
# What comes before the megabyte in an answer.
PLACES = {
    "reasoning": "",
    "content": "r</think>",
    "string": "r</think>" + _CALL.format("true"),
    "raw": "r</think>" + _CALL.format("false"),
    "name": 'r</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="',
    "block": "r</think>\n\n<｜DSML｜ calls>\n",
}


def filled(unit: str) -> str:
    """A megabyte of it."""
    return unit * (MB // len(unit.encode()))


def encode(level: Level, body: bytes, tokenizer: Tokenizer, protocol: str = "chat") -> None:
    """Request to ids."""
    options = ConvertOptions(level=level)
    with contextlib.suppress(InvalidRequest):
        converted = convert(protocol, body, options)
        prompt = render(converted.conversation, converted.version, options.special)
        tokenizer.encode_prompt(prompt)


def decode(
    level: Level, text: str, size: int, tokenizer: Tokenizer, as_ids: bool = False, **fields: Any
) -> None:
    """Answer to response, in chunks of `size` characters or ids."""
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "json"}],
        "tools": [TOOL],
        "stream": True,
        **fields,
    }
    options = ConvertOptions(level=level)
    converted = convert("chat", json.dumps(request).encode(), options)
    stream = AnswerStream(
        converted,
        response_id="r",
        model="m",
        special=options.special,
        tokenizer=tokenizer,
        created=0,
    )
    items: Any = tokenizer.encode_full(text) if as_ids else text
    for start in range(0, len(items), size):
        part = items[start : start + size]
        if stream.finished:
            break
        stream.push(Tokens(part) if as_ids else Text(part, 1))
    if not stream.finished:
        stream.push(Finish())
    stream.finish()
    stream.response()


def extremes(tokenizer: Tokenizer) -> Iterator[tuple[str, Callable[[], None]]]:
    """All inputs at both levels."""
    for level in Level:
        for name, unit in UNITS.items():
            text = filled(unit)
            user = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
            yield f"encode-{level}-{name}", partial(encode, level, _json(user), tokenizer)
            raw = text.encode()
            yield f"encode-{level}-raw-{name}", partial(encode, level, raw, tokenizer)
            for place, before in PLACES.items():
                whole = before + text
                yield (
                    f"decode-{level}-{place}-{name}",
                    partial(decode, level, whole, 4096, tokenizer),
                )
            small = PLACES["content"] + text[: MB // 20]
            yield f"decode-{level}-by-1-{name}", partial(decode, level, small, 1, tokenizer)
            ids = PLACES["content"] + text[: MB // 4]
            yield f"decode-{level}-ids-{name}", partial(decode, level, ids, 5, tokenizer, True)
            json_mode = {"response_format": {"type": "json_object"}, "tools": []}
            yield (
                f"decode-{level}-json-{name}",
                partial(decode, level, PLACES["content"] + text, 4096, tokenizer, **json_mode),
            )
            stops = {"stop": [unit * 3 + "!", unit * 200 + "?", "\n\n\n\n!"]}
            yield (
                f"decode-{level}-stops-{name}",
                partial(decode, level, PLACES["content"] + text, 4096, tokenizer, **stops),
            )
        yield from _shapes(level, tokenizer)


def _shapes(level: Level, tokenizer: Tokenizer) -> Iterator[tuple[str, Callable[[], None]]]:
    """Requests with many parts instead of long ones."""
    nested = (
        b'{"model":"'
        + MODEL.encode()
        + b'","messages":'
        + b"[" * (MB // 2)
        + b"]" * (MB // 2)
        + b"}"
    )
    yield f"encode-{level}-nested-body", partial(encode, level, nested, tokenizer)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * MB}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "y"},
    ]
    body = {"model": MODEL, "messages": messages, "tools": [TOOL]}
    yield f"encode-{level}-nested-arguments", partial(encode, level, _json(body), tokenizer)
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for i in range(5000)
    ]
    results = [
        {"role": "tool", "tool_call_id": f"c{i}", "content": "y"} for i in range(4999, -1, -1)
    ]
    body = {
        "model": MODEL,
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "tool_calls": calls},
            *results,
        ],
    }
    yield f"encode-{level}-5000-calls", partial(encode, level, _json(body), tokenizer)
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(10_000)]
    body = {"model": MODEL, "messages": messages[:1], "tools": tools}
    yield f"encode-{level}-10000-tools", partial(encode, level, _json(body), tokenizer)
    many = [{"role": "user", "content": "x"}] * 20_000
    yield (
        f"encode-{level}-20000-messages",
        partial(encode, level, _json({"model": MODEL, "messages": many}), tokenizer),
    )
    invokes = (
        "r</think>\n\n<｜DSML｜ calls>\n"
        + '<｜DSML｜ invoke name="f">\n</｜DSML｜ invoke>\n' * 20_000
    )
    yield f"decode-{level}-20000-calls", partial(decode, level, invokes, 4096, tokenizer)
    names = PLACES["string"] + (
        'v</｜DSML｜ parameter>\n<｜DSML｜ parameter name="a" string="true">' * 15_000
    )
    yield f"decode-{level}-15000-parameters", partial(decode, level, names, 4096, tokenizer)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
