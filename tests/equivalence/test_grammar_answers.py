"""Answers of real (random) models to random schemas: what is finished is valid, what is cut is not
broken, and caches change no token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from headrace.assets import embedded_model
from headrace.config import EngineConfig
from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.core.output import FinishReason, RequestOutput
from headrace.core.sampling import SamplingParams
from headrace.core.schema.schema import check_schema_form
from headrace.engine.grammar.backend import TokenTable
from headrace.engine.grammar.llguidance_backend import LlguidanceBackend
from headrace.engine.llm import LLM
from headrace.errors import InvalidGrammar, InvalidRequest
from headrace.recipe.tokenizer import Tokenizer
from tests.bench_records import write_record
from tests.json_judge import is_valid
from tests.property.recipe.drawn_schemas import MISSING, drawn
from tests.unit.engine.grammar.grammars import Schemas, schema

# Part of an answer's tokens must be structure: a random model fills strings and white space.
BIAS = {'"': 4.0, "}": 4.0, "]": 4.0, ",": 1.0, " ": -9.0, "\n": -9.0, "\t": -9.0, "\r": -9.0}
CONFIG = EngineConfig(threads=1, max_model_len=512, num_blocks=200, max_num_seqs=32, seed=7)
MODELS = ("tiny-8", "embedded")


@contextmanager
def opened(model: str, tiny_dir: Path, **changes: Any) -> Iterator[tuple[LLM, Tokenizer]]:
    folder = tiny_dir if model == "tiny-8" else embedded_model()
    tokenizer = Tokenizer.from_directory(folder)
    settings = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__} | changes
    with LLM(folder, EngineConfig(**settings), tokenizer=tokenizer) as llm:
        yield llm, tokenizer


def answers(
    model: str, tiny_dir: Path, schemas: list[dict[str, Any]], **changes: Any
) -> list[RequestOutput]:
    """One answer per schema; every fourth is greedy, the others are seeded at temperature 1."""
    max_tokens, temperature = changes.pop("max_tokens", 60), changes.pop("temperature", None)
    with opened(model, tiny_dir, **changes) as (llm, tokenizer):
        bias = {tokenizer.encode(text)[0]: value for text, value in BIAS.items()}
        params = [
            SamplingParams(
                grammar=schema(value),
                max_tokens=max_tokens,
                seed=number,
                temperature=temperature or (0.0 if number % 4 == 3 else 1.0),
                logit_bias=bias,
            )
            for number, value in enumerate(schemas)
        ]
        return llm.generate(["Give an object:"] * len(schemas), params)


def library(model: str, tiny_dir: Path) -> tuple[LlguidanceBackend, Tokenizer]:
    """The grammar library alone, over the vocabulary of a model."""
    with opened(model, tiny_dir) as (llm, tokenizer):
        spec = llm.engine.spec
        return LlguidanceBackend(TokenTable.of(tokenizer, spec.vocab_size, spec.eos_id)), tokenizer


def check_answers(
    model: str, tiny_dir: Path, schemas: list[dict[str, Any]], **changes: Any
) -> dict[str, int]:
    """Check one answer for each schema that the protocols take; how they ended."""
    backend, tokenizer = library(model, tiny_dir)
    ends = {"refused": 0, "contradictory": 0, "finished": 0, "cut": 0}
    kept = []
    for value in schemas:
        form = normal(value)
        if form is None:
            ends["refused"] += 1
        elif not compiles(backend, form):
            ends["contradictory"] += 1
        else:
            kept.append((value, form))
    outputs = answers(model, tiny_dir, [form for _, form in kept], **changes)
    for (value, form), output in zip(kept, outputs, strict=True):
        if output.finish is FinishReason.STOP:
            ends["finished"] += 1
            text = tokenizer.decode(output.token_ids[:-1])
            validator = jsonschema_rs.Draft202012Validator(value, validate_formats=True)
            assert is_valid(validator, text), (value, text)
        else:
            assert output.finish is FinishReason.LENGTH, output.error
            ends["cut"] += 1
            fresh = backend.compile(GrammarKind.JSON_SCHEMA, json.dumps(form)).matcher()
            fresh.accept(output.token_ids)  # a prefix of a valid answer
    return ends


def compiles(backend: LlguidanceBackend, form: Any) -> bool:
    """Whether the library takes a schema; False: no text fits all that it says."""
    try:
        backend.compile(GrammarKind.JSON_SCHEMA, json.dumps(form))
    except InvalidGrammar as error:
        assert "grammar cannot be compiled" in error.message, (form, error.message)
        return False
    return True


def normal(value: dict[str, Any]) -> Any:
    """What the engine gets of a schema, as protocols read it; None: it is refused."""
    try:
        return json.loads(check_schema_form(value, "schema").text())
    except InvalidRequest:
        return None


@pytest.mark.parametrize(("model", "count"), [("tiny-8", 60), ("embedded", 30)])
def test_finished_answers_are_valid_and_cut_ones_are_prefixes(
    tiny_dir: Path, model: str, count: int
) -> None:
    ends = check_answers(model, tiny_dir, list(islice(Schemas(11), count)))
    assert ends["finished"] > count // 3
    assert ends["cut"] > 0


@pytest.mark.sweep
@pytest.mark.parametrize("model", MODELS)
def test_finished_answers_are_valid_and_cut_ones_are_prefixes_sweep(
    tiny_dir: Path, model: str
) -> None:
    schemas = list(islice(Schemas(12), 1000))
    ends = check_answers(model, tiny_dir, schemas)
    write_record("grammar_schemas.jsonl", f"answers-{model}", schemas=len(schemas), **ends)


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_answers_to_drawn_schemas_are_valid(tiny_dir: Path) -> None:
    ends = check_answers("tiny-8", tiny_dir, drawn(40))
    assert ends["finished"] > 10


@pytest.mark.sweep
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_answers_to_drawn_schemas_are_valid_sweep(tiny_dir: Path) -> None:
    """The schemas of hypothesis-jsonschema, the random model, temperature 1."""
    schemas = drawn(1000)
    ends = check_answers("tiny-8", tiny_dir, schemas, temperature=1.0)
    write_record("grammar_schemas.jsonl", "answers-drawn", schemas=len(schemas), **ends)


@pytest.mark.parametrize(
    "changes",
    [{"grammar_cache_bytes": 0}, {"jump_forward": False}, {"jump_forward": False, "overlap": True}],
)
def test_caches_and_jumps_change_no_token(tiny_dir: Path, changes: dict[str, Any]) -> None:
    """Greedy and seeded rows. The dtype makes rows of a step independent of their number."""
    schemas = list(islice(Schemas(21), 12))
    exact = {"dtype": "float64", "max_tokens": 24}
    plain = answers("tiny-8", tiny_dir, schemas, **exact, **changes)
    default = answers("tiny-8", tiny_dir, schemas, **exact)
    assert [o.token_ids for o in default] == [o.token_ids for o in plain]
    assert [o.finish for o in default] == [o.finish for o in plain]


def test_thinking_ends_before_the_answer_begins(tiny_dir: Path) -> None:
    """SO-1, SO-2: the tokens before the end of thinking are free, those after it are the JSON."""
    with opened("tiny-8", tiny_dir) as (llm, tokenizer):
        end = tokenizer.added["</think>"]
        spec = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "integer"}', (end,))
        outputs = llm.generate(
            ["Hello"] * 8,
            [
                SamplingParams(grammar=spec, max_tokens=60, seed=seed, logit_bias={end: 6.0})
                for seed in range(8)
            ],
        )
    ended = [output.token_ids for output in outputs if output.finish is FinishReason.STOP]
    assert len(ended) >= 4
    for ids in ended:
        border = ids.index(end)
        assert isinstance(json.loads(tokenizer.decode(ids[border + 1 : -1])), int)
    assert any(ids.index(end) > 0 for ids in ended)
