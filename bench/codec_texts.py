"""What bench/codec.py encodes: texts nobody has seen before, requests and conversations.

A text is 50% Python code and 30% English (both from the standard library of the Python that runs
this), 10% Chinese and 10% JSON, in blocks of some hundred characters drawn by `random`, so that two
texts share words but hardly a line. Everything follows from the generator that is passed in.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import random
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

MODEL = "DeepSeek-V4.1-Flash"
_CHINESE = """
数据 服务 请求 模型 推理 缓存 前缀 令牌 我们 可以 如果 需要 因为 所以 但是 已经
没有 问题 时间 系统 用户 文件 代码 测试 结果 方法 工作 开始 完成 发现 修改 错误 配置 网络
内存 性能 的 了 是 在 有
和 不 这 那 他 她 它 说 看 想 做 到 从 对 把 被 让 给 很 都 也 就 还 再
"""
_KEYS = ["id", "name", "path", "status", "created_at", "count", "items", "message", "value", "ok"]


@cache
def _code() -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = [*folder.glob("*.py"), *folder.glob("[a-z]*/*.py")]
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings"}
    texts = (
        path.read_text("utf-8", "replace")
        for path in sorted(files)
        if path.parent.name not in skipped
    )
    return [text for text in texts if len(text) > 4000]


@cache
def _english() -> str:
    return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def _slice(rng: random.Random, text: str, size: int) -> str:
    start = rng.randrange(max(1, len(text) - size))
    return text[start : start + size]


def _chinese(rng: random.Random, size: int) -> str:
    known = _CHINESE.split()
    words: list[str] = []
    length = 0
    while length < size:
        words.append(rng.choice(known) + rng.choice(("", "", "", "，", "。", "")))
        length += len(words[-1])
    return "".join(words)


def _json(rng: random.Random, size: int) -> str:
    rows = []
    length = 0
    while length < size:
        row = {
            key: rng.choice([rng.randrange(10**6), rng.random(), True, None, key * 2])
            for key in _KEYS
        }
        rows.append(json.dumps(row))
        length += len(rows[-1])
    return "\n".join(rows)


def text(rng: random.Random, size: int) -> str:
    """A text of about `size` bytes."""
    parts: list[str] = []
    length = 0
    while length < size:
        kind = rng.random()
        block = min(rng.randrange(300, 1500), size - length)
        if kind < 0.5:
            part = _slice(rng, rng.choice(_code()), block)
        elif kind < 0.8:
            part = _slice(rng, _english(), block)
        elif kind < 0.9:
            part = _chinese(rng, max(1, block // 3))
        else:
            part = _json(rng, block)
        parts.append(part)
        length += len(part.encode("utf-8", "replace"))
    return "\n".join(parts)


def body(messages: list[dict[str, Any]], **fields: Any) -> bytes:
    """A chat request."""
    request = {"model": MODEL, "messages": messages, **fields}
    return json.dumps(request, ensure_ascii=False).encode()


def one_message(rng: random.Random, size: int) -> bytes:
    """One user message of `size` bytes."""
    return body([{"role": "user", "content": text(rng, size)}])


def many_messages(rng: random.Random, size: int, count: int = 64) -> bytes:
    """The same size as a chat of `count` messages."""
    roles = ("user", "assistant")
    parts = [{"role": roles[i % 2], "content": text(rng, size // count)} for i in range(count - 1)]
    return body([*parts, {"role": "user", "content": text(rng, size // count)}])


def small(rng: random.Random) -> bytes:
    """A request of about 39 tokens in all."""
    words = rng.choices(["winter", "ticket", "stone", "mapping", "bridge", "harbor", "signal"], k=7)
    return body([{"role": "user", "content": " ".join(words) + "?"}])


def tools(rng: random.Random, count: int = 20) -> list[dict[str, Any]]:
    """Definitions of tools as agents send them: about 1 KB each."""
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": _slice(rng, _english(), 400),
                "parameters": {
                    "type": "object",
                    "properties": {
                        f"{key}_{number}": {
                            "type": rng.choice(["string", "integer", "boolean"]),
                            "description": _slice(rng, _english(), 60),
                        }
                        for key in rng.sample(_KEYS, 5)
                    },
                    "required": [],
                },
            },
        }
        for number in range(count)
    ]


def agent(rng: random.Random, turns: int = 60) -> list[bytes]:
    """The requests of an agent: every turn re-sends all, with a call and its result more."""
    declared = tools(rng)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text(rng, 8000)},
        {"role": "user", "content": text(rng, 1000)},
    ]
    bodies = []
    for turn in range(turns):
        bodies.append(body(messages, tools=declared))
        arguments = {"path": _slice(rng, _english(), 40), "count": turn, "text": text(rng, 300)}
        name = f"tool_{rng.randrange(len(declared))}"
        call = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        messages += [
            {
                "role": "assistant",
                "content": text(rng, 100),
                "reasoning_content": text(rng, 400),
                "tool_calls": [{"id": f"call_{turn}", "type": "function", "function": call}],
            },
            {
                "role": "tool",
                "tool_call_id": f"call_{turn}",
                "content": text(rng, rng.randrange(500, 6000)),
            },
        ]
        if turn % 8 == 7:
            messages.append({"role": "user", "content": text(rng, 200)})
    return bodies


def answer(rng: random.Random, *, calls: bool, dsml: str = "｜DSML｜") -> list[str | tuple[str]]:
    """An answer of about 1,000 tokens: text, and control tokens as one-element tuples.

    Half reasoning, half content; with `calls` the last third is the argument of a tool call.
    """
    parts: list[str | tuple[str]] = [text(rng, 1900), ("</think>",), text(rng, 1900)]
    if not calls:
        return parts
    tags = [
        ("\n\n<", " calls>\n"),
        ("<", ' invoke name="tool_0">\n'),
        ("<", ' parameter name="text" string="true">' + text(rng, 1900)),
        ("</", " parameter>\n"),
        ("</", " invoke>\n"),
        ("</", " calls>"),
    ]
    for before, after in tags:
        parts += [before, (dsml,), after]
    return parts
