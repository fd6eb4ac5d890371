"""Speed of the token codec beside deepseek-recipe 0.2.0, in one run.

    python bench/codec.py encode [--peer-dir DIR] [--pairs 7] [--tokenizer FILE]
    python bench/codec.py stream [--level clients] [--only NAME]

`encode` is JSON bytes -> ids: texts of 100 KB and 4 MB that nobody has seen before (4 MB in a fresh
process, both as one message and as 64), a 60-turn agent conversation of which every turn is sent
whole, and a request of 39 tokens. `stream` is ids -> JSON events: 64 interleaved streams, 1 and 5
ids a chunk, through `StreamBatch` on our side and one `StreamProcessor` a stream on the peer's.

Each side runs in a process of its own with its default threads and caches; they take turns on the
same input, so that a slow moment of the machine hits both. `ours` and `peer` are medians, `ratio`
is the median of peer / ours over the pairs, `spread` its smallest and largest value, `cpu_ratio`
the same from CPU time of all threads, `equal` whether both made the same ids (for streams: the same
events, compared in an untimed run at level `official`). One JSON line per measurement; exit code 1
if a line is not equal. The peer is fetched by codec_peer.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import codec_texts
from codec_peer import DEFAULT_DIR, ROOT, Side

from headrace.check.recipe_cases import find_tokenizer_json
from headrace.recipe.tokenizer import Tokenizer

STREAMS = 64
Line = dict[str, Any]
Bodies = Callable[[random.Random], list[bytes]]


class Bench:
    """Files of one run, and the lines that come of it."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self.options = options
        self.tokenizer = folder / "tokenizer.json"
        self.tokenizer.write_bytes(
            find_tokenizer_json(ROOT / "tests/golden/recipe", options.tokenizer)
        )
        self.env = {
            "device": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
        }

    def side(self, name: str, level: str | None = None) -> Side:
        """A fresh process of one side."""
        return Side(name, self.tokenizer, level or self.options.level, self.options.peer_dir)

    def write(self, name: str, content: str) -> str:
        """A file that the workers read."""
        path = self.folder / name
        path.write_text(content)
        return str(path)

    def line(self, name: str, pairs: Sequence[tuple[Line, Line]], per: int, **fields: Any) -> Line:
        """One measurement. per: what the seconds of a turn are divided by."""
        ratios = [theirs["wall"] / ours["wall"] for ours, theirs in pairs]
        cpu = [theirs["cpu"] / ours["cpu"] for ours, theirs in pairs]
        scale = 1e6 / per
        return {
            "name": name,
            "ours": round(scale * median(ours["wall"] for ours, _ in pairs), 2),
            "peer": round(scale * median(theirs["wall"] for _, theirs in pairs), 2),
            "ratio": round(median(ratios), 2),
            "spread": [round(min(ratios), 2), round(max(ratios), 2)],
            "cpu_ratio": round(median(cpu), 2),
            "n": len(pairs),
            **fields,
            "env": self.env,
        }


def _cpu() -> str:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in info.splitlines() if line[:10] == "model name"]
    return names[0] if names else platform.processor()


def in_turn(ours: Side, peer: Side, turn: int, call: str, **arguments: Any) -> tuple[Line, Line]:
    """Both sides do the same; who begins changes from turn to turn."""
    first, second = (ours, peer) if turn % 2 else (peer, ours)
    one, other = first.call(call, **arguments), second.call(call, **arguments)
    return (one, other) if turn % 2 else (other, one)


# --- encode --------------------------------------------------------------------------------------


def encode_line(bench: Bench, name: str, bodies: Bodies, pairs: int, fresh: bool, per: int) -> Line:
    """One measurement of JSON bytes -> ids; `fresh`: new processes for every pair."""
    results = []
    sides: tuple[Side, Side] | None = None
    for turn in range(pairs):
        rng = random.Random(f"{name}-{turn}")
        path = bench.write("bodies", "\n".join(body.hex() for body in bodies(rng)))
        if sides is None:
            sides = bench.side("ours"), bench.side("peer")
            warm = bench.write("warm", codec_texts.small(random.Random(name)).hex())
            for side in sides:
                side.call("encode", protocol="chat", bodies=warm)
                bench.env |= side.versions
        results.append(in_turn(*sides, turn, "encode", protocol="chat", bodies=path))
        if fresh:
            _close(sides)
            sides = None
    if sides is not None:
        _close(sides)
    return bench.line(
        name,
        results,
        per,
        unit="us a request" if per > 1 else "us",
        tokens=results[-1][0]["tokens"],
        equal=all(a["digest"] == b["digest"] for a, b in results),
    )


def _close(sides: tuple[Side, Side]) -> None:
    for side in sides:
        side.__exit__()


def encode(bench: Bench) -> Iterator[Line]:
    """All measurements of `encode`."""
    n = bench.options.pairs
    texts = codec_texts
    kinds: list[tuple[str, Bodies, int, bool, int]] = [
        ("encode-39-tokens", lambda rng: [texts.small(rng) for _ in range(500)], n, False, 500),
        (
            "encode-1kb",
            lambda rng: [texts.one_message(rng, 1000) for _ in range(200)],
            n,
            False,
            200,
        ),
        (
            "encode-100kb",
            lambda rng: [texts.one_message(rng, 100_000) for _ in range(4)],
            n,
            False,
            4,
        ),
        (
            "encode-100kb-64-messages",
            lambda rng: [texts.many_messages(rng, 100_000) for _ in range(4)],
            n,
            False,
            4,
        ),
        (
            "encode-4mb-fresh",
            lambda rng: [texts.one_message(rng, 4_000_000)],
            max(3, n // 2),
            True,
            1,
        ),
        (
            "encode-4mb-64-messages-fresh",
            lambda rng: [texts.many_messages(rng, 4_000_000)],
            max(3, n // 2),
            True,
            1,
        ),
        ("encode-agent-60-turns", texts.agent, max(3, n // 2), False, 60),
    ]
    for name, bodies, pairs, fresh, per in kinds:
        if bench.options.only in name:
            yield encode_line(bench, name, bodies, pairs, fresh, per)


# --- stream --------------------------------------------------------------------------------------


def request_of(protocol: str) -> str:
    """A request whose answer may reason and call a tool."""
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    common = {"model": codec_texts.MODEL, "stream": True}
    if protocol == "chat":
        tool: Any = {"type": "function", "function": {"name": "tool_0", "parameters": schema}}
        messages = [{"role": "user", "content": "hi"}]
        return json.dumps({**common, "messages": messages, "tools": [tool]})
    if protocol == "responses":
        tool = {"type": "function", "name": "tool_0", "parameters": schema}
        return json.dumps({**common, "input": "hi", "tools": [tool]})
    tool = {"name": "tool_0", "input_schema": schema}
    messages = [{"role": "user", "content": "hi"}]
    return json.dumps({**common, "max_tokens": 9999, "messages": messages, "tools": [tool]})


def answer_ids(tokenizer: Tokenizer, rng: random.Random, calls: bool) -> list[int]:
    """Ids of one answer."""
    ids: list[int] = []
    for part in codec_texts.answer(rng, calls=calls):
        ids += [tokenizer.added[part[0]]] if isinstance(part, tuple) else tokenizer.encode(part)
    return ids


def stream_line(bench: Bench, name: str, protocol: str, size: int, calls: bool) -> Line:
    """One measurement of ids -> JSON events."""
    tokenizer = Tokenizer(bench.tokenizer.read_bytes())
    results = []
    with bench.side("ours") as ours, bench.side("peer") as peer:
        bench.env |= {**ours.versions, **peer.versions}
        for turn in range(-1, bench.options.pairs):
            rng = random.Random(f"{name}-{turn}")
            job = _job(tokenizer, protocol, rng, STREAMS if turn >= 0 else 4, calls)
            path = bench.write("job", json.dumps(job))
            pair = in_turn(ours, peer, turn, "stream", job=path, ids_per_chunk=size)
            if turn >= 0:
                results.append(pair)
    tokens = results[-1][0]["tokens"]
    equal = same_events(bench, tokenizer, protocol, size, calls)
    fields = {"level": bench.options.level, "tokens": tokens, "unit": "us a token", "equal": equal}
    return bench.line(name, results, tokens, **fields)


def _job(tokenizer: Tokenizer, protocol: str, rng: random.Random, count: int, calls: bool) -> Line:
    ids = [answer_ids(tokenizer, rng, calls) for _ in range(count)]
    return {"protocol": protocol, "bodies": [request_of(protocol)] * count, "ids": ids}


def same_events(bench: Bench, tokenizer: Tokenizer, protocol: str, size: int, calls: bool) -> bool:
    """Whether both sides make the same events at level `official`."""
    job = _job(tokenizer, protocol, random.Random(f"{protocol}-{size}"), 8, calls)
    path = bench.write("job", json.dumps(job))
    with bench.side("ours", "official") as ours, bench.side("peer") as peer:
        one, other = in_turn(ours, peer, 0, "stream", job=path, ids_per_chunk=size)
    same: bool = one["digest"] == other["digest"]
    return same


def stream(bench: Bench) -> Iterator[Line]:
    """All measurements of `stream`: reasoning and content, then with a tool call at the end."""
    for calls in (False, True):
        for protocol in ("chat", "responses", "messages"):
            for size in (1, 5):
                name = f"stream-{protocol}{'-calls' if calls else ''}-{STREAMS}x{size}"
                if bench.options.only in name:
                    yield stream_line(bench, name, protocol, size, calls)


def main() -> int:
    """Print one JSON line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("encode", "stream"))
    parser.add_argument("--peer-dir", type=Path, default=DEFAULT_DIR)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json (default: the golden one)")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--level", choices=("official", "clients"), default="clients")
    parser.add_argument("--only", default="", help="only measurements whose name contains this")
    options = parser.parse_args()
    equal = True
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options)
        for line in {"encode": encode, "stream": stream}[options.what](bench):
            equal &= line["equal"]
            print(json.dumps(line, ensure_ascii=False), flush=True)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
