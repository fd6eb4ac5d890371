"""Grammars beside drafts, overlap and preemption: the tokens are those of the blocking loop without
drafts, and the masks of verification rows never let a token through that the grammar forbids.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.grammar.backend import TokenTable
from headrace.engine.grammar.llguidance_backend import LlguidanceBackend
from headrace.engine.load import numerics_of
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from headrace.recipe.tokenizer import Tokenizer
from tests.unit.engine.grammar.grammars import Schemas, schema

from .speculation import Answers, Oracle, serve

DRAFTS = 3  # what the rings of tiny-8 take back
CONFIG = EngineConfig(
    dtype="float32",
    batch_invariant=True,
    max_model_len=256,
    num_blocks=96,
    max_num_seqs=16,
    max_num_batched_tokens=96,
    seed=3,
)


@pytest.fixture(scope="module")
def parts(tiny_dir: Path) -> tuple[Model, Tokenizer]:
    return load_model(tiny_dir, numerics_of(CONFIG)), Tokenizer.from_directory(tiny_dir)


def grammars() -> list[GrammarSpec | None]:
    """Schemas, an expression, a choice, one behind a trigger and nothing at all."""
    found: list[GrammarSpec | None] = [schema(value) for value in islice(Schemas(31), 4)]
    found.append(GrammarSpec(GrammarKind.REGEX, "[ab]{3,40}c"))
    found.append(GrammarSpec(GrammarKind.CHOICE, '["yes, of course", "yes", "no"]'))
    found.append(GrammarSpec(GrammarKind.REGEX, "(ab)+", (40, 41), bound_token_id=42))
    # A run of control tokens and of letters that no token joins.
    run = "".join(f"<[{token}]> " for token in (270, 300, 271, 280, 272, 281))
    found.append(GrammarSpec(GrammarKind.LARK, f'start: ({run} /[0-9]/ "JKQZJKQZ")+'))
    return [*found, None]


def requests() -> list[Request]:
    rng = np.random.default_rng(5)
    result = []
    for number, grammar in enumerate(grammars() * 2):
        params = SamplingParams(
            grammar=grammar,
            temperature=float(number % 2),
            seed=number,
            max_tokens=24,
            min_tokens=3 * (number % 3),
            frequency_penalty=0.3 * (number % 4 == 1),
        )
        prompt = rng.integers(14, 200, 5 + 9 * number).tolist()
        result.append(Request(f"r{number}", tuple(prompt), params))
    return result


def answered(parts: tuple[Model, Tokenizer], drafter: Oracle | None, **changes: Any) -> Answers:
    model, tokenizer = parts
    preempt = changes.pop("preempt", None)
    engine = Engine(replace(CONFIG, **changes), model, tokenizer=tokenizer, drafter=drafter)
    answers = serve(engine, requests(), preempt=preempt)
    assert (engine.stats().forced_tokens > 20) is engine.config.jump_forward
    return answers


@pytest.fixture(scope="module")
def plain(parts: tuple[Model, Tokenizer]) -> Answers:
    return answered(parts, None, overlap=False, jump_forward=False)


@pytest.mark.parametrize(
    ("kind", "policy", "overlap", "jump_forward", "preempt"),
    [
        (None, "off", False, True, None),
        (None, "off", True, True, {6: "r0", 9: "r3", 4: "r8"}),
        (None, "off", True, False, {6: "r0", 9: "r3"}),
        ("perfect", "fixed:3", False, True, None),
        ("perfect", "fixed:2", True, True, {5: "r1", 6: "r2"}),
        ("mixed", "fixed:3", True, False, None),
        ("mixed", "fixed:3", True, True, None),
        ("mixed", "adaptive", False, True, {7: "r4"}),
        ("wrong", "fixed:2", True, True, None),
        ("noise", "adaptive", True, False, {5: "r5", 8: "r8"}),
        ("noise", "adaptive", True, True, {5: "r5", 8: "r8"}),
    ],
)
def test_drafts_overlap_and_jumps_change_no_token(
    parts: tuple[Model, Tokenizer],
    plain: Answers,
    kind: str | None,
    policy: str,
    overlap: bool,
    jump_forward: bool,
    preempt: dict[int, str] | None,
) -> None:
    drafter = None
    if kind is not None:
        known = [(*r.prompt_token_ids, *plain.tokens[r.request_id, 0]) for r in requests()]
        drafter = Oracle(kind, DRAFTS, parts[0].spec.vocab_size, known)
    changes = {"speculation": policy, "overlap": overlap, "jump_forward": jump_forward}
    found = answered(parts, drafter, preempt=preempt, **changes)
    assert found == plain


def test_what_is_answered_fits(parts: tuple[Model, Tokenizer], plain: Answers) -> None:
    """Checked by a fresh matcher of the library, token by token."""
    model, tokenizer = parts
    table = TokenTable.of(tokenizer, model.spec.vocab_size, model.spec.eos_id)
    backend = LlguidanceBackend(table)
    checked = 0
    for request in requests():
        grammar = request.sampling.grammar
        if grammar is None or grammar.trigger_token_ids:
            continue
        tokens = plain.tokens[request.request_id, 0]
        ended = tokens[-1] == model.spec.eos_id
        matcher = backend.compile(grammar.kind, grammar.text).matcher()
        matcher.accept(tokens[:-1] if ended else tokens)  # raises at a token that does not fit
        checked += 1
    assert checked == 14
