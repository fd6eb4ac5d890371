"""Forced tokens that a step takes together: answers are what they were, in fewer steps.

On the fake model, whose logits depend on every cache row that should be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from headrace.config import EngineConfig
from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.core.output import TokenChunk
from headrace.core.request import Request
from headrace.core.sampling import Coupling, LogprobsMode, SamplingParams
from headrace.engine.engine import MAX_FORCED, Engine
from headrace.engine.plan import NO_TOKEN_DRAWN
from headrace.engine.speculation.draft_picker import NO_DRAFT, DraftPicker
from headrace.engine.speculation.drafts import DraftPool, Proposal
from headrace.errors import ConfigError
from tests.equivalence.speculation import Oracle
from tests.unit.engine.fakes import EOS, VOCAB, FakeModel
from tests.unit.engine.grammar.grammars import Letters
from tests.unit.engine.sampling_rows import Row, state_of

CONFIG = EngineConfig(
    dtype="float64",
    kv_quant=False,
    max_model_len=400,
    num_blocks=60,
    max_num_seqs=6,
    max_num_batched_tokens=64,
    replay="exact",
    seed=5,
)
# Runs of 12, 2 and 24 letters behind a choice each, the last longer than a step takes.
TEXT = GrammarSpec(
    GrammarKind.REGEX, "[0-9]{1,3}a long name([abc]no|[xyz]{2}end of this text at last)"
)
MARK = tuple(Letters().encode("{[:]}"))
BOUND = replace(TEXT, trigger_token_ids=MARK, bound_token_id=MARK[0])
(BREAK, AT) = Letters().encode("n@")
CASES: dict[str, dict[str, Any]] = {
    "seeded": {},
    "greedy": {"temperature": 0.0},
    "shaped": {"top_k": 3, "top_p": 0.9, "min_p": 0.01},
    "maximal": {"coupling": Coupling.MAXIMAL},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.8, "presence_penalty": 0.3},
    "choices": {"n": 4},
    "raw": {"logprobs": 3},
    "processed": {"logprobs": VOCAB, "logprobs_mode": LogprobsMode.PROCESSED},
    "prompt": {"prompt_logprobs": 2, "logprobs": 0},
    "stop string": {"stop": ("ong n",)},
    "stop strings": {"stop": ("zz", "this", "no")},
    "stop token": {"stop_token_ids": (BREAK,)},
    "stop token late": {"stop_token_ids": (BREAK,), "min_tokens": 14},
    "stop string late": {"stop": ("a",), "min_tokens": 15},
    "min_tokens": {"min_tokens": 55},
    "ignore_eos": {"ignore_eos": True},
    "trigger": {"grammar": BOUND, "logit_bias": {MARK[0]: 4.0}},
    "cut": {"max_tokens": 9},
    "cut at the run": {"max_tokens": 3},
    "one token": {"max_tokens": 1},
    "banned": {"banned_token_ids": (BREAK,)},
    "free": {"grammar": None, "max_tokens": 30},
}
PLAIN = SamplingParams(grammar=TEXT, seed=3, max_tokens=60)


def requests(names: Sequence[str] = tuple(CASES), prompt: int = 5) -> list[Request]:
    found = []
    for number, name in enumerate(names):
        ids = np.random.default_rng(number).integers(14, VOCAB, prompt + number).tolist()
        found.append(Request(name, tuple(ids), replace(PLAIN, **CASES[name])))
    return found


def engine(drafter: Oracle | None = None, **changes: Any) -> Engine:
    config = replace(CONFIG, **({"speculation": "off"} | changes))
    return Engine(config, FakeModel(), tokenizer=Letters(), drafter=drafter)


def run(one: Engine, asked: Sequence[Request]) -> list[TokenChunk]:
    """All chunks, by request, choice and index."""
    for request in asked:
        one.add(request)
    chunks: list[TokenChunk] = []
    while one.has_work():
        chunks += one.step()
    stats = one.stats()
    assert (stats.free_blocks, stats.running, stats.waiting) == (stats.total_blocks, 0, 0)
    return sorted(chunks, key=lambda chunk: (chunk.request_id, chunk.choice, chunk.index))


def merged(chunks: Sequence[TokenChunk]) -> dict[tuple[str, int], list[Any]]:
    """Everything that was said of each choice, but for how it was cut into chunks."""
    found: dict[tuple[str, int], list[Any]] = {}
    for chunk in chunks:
        one = found.setdefault((chunk.request_id, chunk.choice), [[], [], []])
        assert chunk.index == len(one[0])
        one[0] += chunk.tokens
        one[1] += chunk.logprobs or ()
        told = (chunk.finish, chunk.error, chunk.stop, chunk.stop_cut, chunk.prompt_logprobs)
        one[2] += [field for field in told if field is not None and field != 0]
    return found


def known(asked: Sequence[Request], answers: dict[tuple[str, int], list[Any]]) -> list[list[int]]:
    prompts = {request.request_id: request.prompt_token_ids for request in asked}
    return [[*prompts[name[0]], *one[0]] for name, one in answers.items()]


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, int], list[Any]]:
    one = engine(jump_forward=False)
    answers = merged(run(one, requests()))
    assert one.stats().forced_tokens == 0
    return answers


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_are_the_same_in_fewer_steps(plain: dict[Any, Any], overlap: bool) -> None:
    one = engine(overlap=overlap)
    assert merged(run(one, requests())) == plain
    stats = one.stats()
    assert stats.forced_tokens > 200
    assert stats.steps < 60  # the longest answer alone has 55 tokens, and there are 6 rows for 26


@pytest.mark.parametrize(
    ("kind", "policy", "overlap"),
    list(product(["perfect", "mixed", "wrong"], ["fixed:5", "fixed:1", "adaptive"], [False, True])),
)
def test_drafts_go_on_behind_forced_tokens(
    plain: dict[Any, Any], kind: str, policy: str, overlap: bool
) -> None:
    asked = [request for request in requests() if request.request_id != "maximal"]
    expected = {name: answer for name, answer in plain.items() if name[0] != "maximal"}
    drafter = Oracle(kind, 5, VOCAB, known(asked, expected))
    one = engine(drafter, speculation=policy, overlap=overlap)
    assert merged(run(one, asked)) == expected
    assert one.stats().forced_tokens > 100
    if kind == "wrong":
        assert sum(one.stats().accepted_drafts) < sum(one.stats().verified_drafts) / 5


def test_one_request_takes_a_step_a_choice() -> None:
    """A run is found once the token in front of it is known; 16 of its tokens are taken a step."""
    steps = {}
    for jump in (False, True):
        one = engine(jump_forward=jump)
        params = replace(PLAIN, logit_bias=dict.fromkeys(Letters().encode("xyz"), 50.0))
        (answer,) = merged(run(one, [Request("r", (20, 30), params)])).values()
        steps[jump] = one.stats().steps
        assert steps[jump] + one.stats().forced_tokens == len(answer[0])
    assert steps[True] <= 3 + 1 + 2 + 2 + 1  # digits, a run, two choices, a long run, the end


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_preemption_in_little_memory(overlap: bool, drafts: bool) -> None:
    names = ["seeded", "choices", "trigger", "maximal" if not drafts else "greedy", "stop strings"]
    asked = requests(names, prompt=110)
    expected = merged(run(engine(jump_forward=False), asked))
    drafter = Oracle("mixed", 5, VOCAB, known(asked, expected)) if drafts else None
    policy = "fixed:3" if drafts else "off"
    tight = engine(drafter, num_blocks=6, overlap=overlap, speculation=policy)
    assert merged(run(tight, asked)) == expected
    stats = tight.stats()
    assert stats.preemptions > 0 and stats.forced_tokens > 50


def test_few_rows_a_step(plain: dict[Any, Any]) -> None:
    """More requests than rows: forced tokens take what is left, and nobody starves."""
    for rows in (6, 7, 9):
        assert merged(run(engine(max_num_batched_tokens=rows), requests())) == plain


def test_blocks_of_forced_tokens_are_found_again() -> None:
    """What was computed in runs is cached like everything else."""
    grammar = GrammarSpec(GrammarKind.REGEX, "[ab]" + "c" * 270)
    asked = Request("r", (20, 30), replace(PLAIN, grammar=grammar, max_tokens=300))
    hits, answers = [], []
    for jump in (False, True):
        one = engine(jump_forward=jump)
        (first,) = merged(run(one, [asked])).values()
        assert (one.stats().forced_tokens > 200) is jump
        follow = Request("s", (20, 30, *first[0][:-1]), SamplingParams(seed=1, max_tokens=5))
        answers.append(merged(run(one, [follow])))
        hits.append(one.stats().prefix_hit_tokens)
    assert hits[0] == hits[1] > 0
    assert answers[0] == answers[1]


def test_a_step_that_fails_is_done_again() -> None:
    expected = merged(run(engine(), requests(["seeded", "choices"])))
    one, chunks = engine(overlap=True), list[TokenChunk]()
    for request in requests(["seeded", "choices"]):
        one.add(request)
    model = one._executor._runner._model
    assert isinstance(model, FakeModel)
    step = 0
    while one.has_work():
        step += 1
        if step in (4, 6):
            model.fail_next = RuntimeError("lost")
        try:
            chunks += one.step()
        except RuntimeError:
            continue
    assert merged(chunks) == expected


def test_a_broken_row_ends_its_run_with_the_reason() -> None:
    asked = Request(
        "r", (13, 20), replace(PLAIN, grammar=GrammarSpec(GrammarKind.REGEX, "abcdefg"))
    )
    on, off = (merged(run(engine(jump_forward=jump), [asked])) for jump in (True, False))
    assert on == off
    assert "not finite" in str(on)


def test_the_setting_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"engine\.jump_forward must be true or false"):
        EngineConfig(jump_forward=1)  # type: ignore[arg-type]


# --- where forced tokens wait --------------------------------------------------------------------


def test_the_pool_keeps_forced_tokens_in_front_of_drafts() -> None:
    pool, rows = DraftPool(4, 3, MAX_FORCED), np.array([1, 2, 3])
    pool.force(1, [7, 8])
    pool.force(2, [4, 5, 6, 7, 8])
    assert pool.known(rows).tolist() == [[7, 8, NO_DRAFT], [4, 5, 6], [NO_DRAFT] * 3]
    weights = torch.rand(3, 3, VOCAB)
    pool.put(rows, Proposal(np.full((3, 3), 9), np.zeros((3, 3)), weights))
    assert pool.count.tolist() == [0, 3, 5, 3]
    assert pool.forced.tolist() == [0, 2, 5, 0]
    assert pool.token_ids[1, :3].tolist() == [7, 8, 9]
    assert pool.token_ids[2, :5].tolist() == [4, 5, 6, 7, 8]
    assert pool.token_ids[3, :3].tolist() == [9, 9, 9]
    assert (pool.features[1] > 0).tolist() == [True, True, False]
    table, places = np.array([1, 1, 1, 2, 2, 3]), np.array([0, 2, -1, 1, 4, 0])
    found = pool.weights(table, places)
    assert found is not None
    expected = [None, weights[0, 2], None, None, None, weights[2, 0]]
    for one, right in zip(found, expected, strict=True):
        assert torch.equal(one, torch.zeros(VOCAB) if right is None else right)
    pool.clear(rows)
    assert not pool.count.any() and not pool.forced.any()


@pytest.mark.parametrize("coupling", Coupling)
def test_drafts_are_drawn_behind_what_is_known(coupling: Coupling) -> None:
    """Penalties and weights of the places behind see the forced tokens; theirs are certain."""
    params = SamplingParams(coupling=coupling, presence_penalty=2.0, seed=4)
    state = state_of([Row(params, 4, [5, 6], []), Row(params, 5, [5, 6], [])], VOCAB)
    known_ids = np.array([[8, NO_DRAFT], [NO_DRAFT, NO_DRAFT]])
    picker = DraftPicker(state, np.array([1, 2]), np.array([2, 2]), known_ids)
    logits = torch.zeros(2, VOCAB, dtype=torch.float64)
    logits[:, 8] = 3.0
    first, second = picker(0, logits).tolist(), picker(1, logits).tolist()
    assert first[0] == 8 and NO_TOKEN_DRAWN not in second
    if coupling is Coupling.MAXIMAL:
        weights = picker.weights
        assert weights is not None
        assert (weights[0, 0] == 0).all()
        assert (weights[1, 0] > 0).all()
        assert weights[0, 1, 8] / weights[0, 1, 9] < weights[1, 0, 8] / weights[1, 0, 9]


assert EOS not in MARK
