"""Verification: splits, prefixes, masks, log probabilities, broken rows, errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.sampling import Coupling, LogprobsMode, SamplingParams
from headrace.engine.edits import Prefixes, edited
from headrace.engine.grammar.rows import Masks
from headrace.engine.plan import NO_TOKEN_DRAWN
from headrace.engine.sampler import sample
from headrace.engine.sampling_state import SamplerState
from headrace.engine.speculation.verify import VerifyRows, draft_picker, verify
from headrace.errors import InvalidRequest
from tests.unit.engine import sampling_reference as reference
from tests.unit.engine.sampling_rows import EOS, Row, admit, state_of

VOCAB = 97
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_p": 0.8, "temperature": 1.3},
    {"top_k": 12, "min_p": 0.02},
    {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    {"temperature": 0.0, "frequency_penalty": 1.0, "min_tokens": 9},
    {"logit_bias": {3: 3.0, EOS: 9.0}, "min_tokens": 6, "banned_token_ids": (5, 6)},
    {"allowed_token_ids": tuple(range(0, VOCAB, 3)), "stop_token_ids": (9,), "min_tokens": 5},
]


def model(known: list[int]) -> torch.Tensor:
    """fp32 [VOCAB]: logits behind known tokens, a function of the last two."""
    generator = torch.Generator().manual_seed(known[-1] * VOCAB + known[-2])
    return torch.randn(VOCAB, generator=generator) * 2


def drafter(known: list[int]) -> torch.Tensor:
    """Not far from the model."""
    generator = torch.Generator().manual_seed(7 + known[-1])
    return model(known) + torch.randn(VOCAB, generator=generator) * 0.7


def drafts_of(state: SamplerState, known: dict[int, list[int]], count: int) -> Any:
    """(ids int64 [R, count], weights) that the picker draws behind the known tokens of each row."""
    rows = np.array(list(known))
    positions = np.array([len(tokens) for tokens in known.values()])
    picker = draft_picker(state, rows, positions)
    so_far = {row: list(tokens) for row, tokens in known.items()}
    ids = []
    for place in range(count):
        drawn = picker(place, torch.stack([drafter(tokens) for tokens in so_far.values()]))
        for row, token in zip(rows.tolist(), drawn.tolist(), strict=True):
            so_far[row].append(token)
        ids.append(drawn.numpy())
    return np.stack(ids, axis=1), picker.weights


def stream(rows: list[Row], lengths: Any, total: int) -> list[list[int]]:
    """Output of each row, `total` tokens or more, verifying lengths(round, row) drafts a round."""
    state = state_of(rows, VOCAB)
    known = {n: [*row.prompt, *row.output] for n, row in enumerate(rows, 1)}
    outputs: list[list[int]] = [[] for _ in rows]
    turn = 0
    while min(map(len, outputs)) < total:
        counts = np.array([1 + lengths(turn, row) for row in known])
        ids, weights = drafts_of(state, known, 5)
        flat_ids, flat_weights, logits = [], [], []
        for index, (row, tokens) in enumerate(known.items()):
            used = int(counts[index]) - 1
            flat_ids += [*ids[index, :used].tolist(), -1]
            if weights is not None:
                flat_weights += [*weights[index, :used], torch.zeros(VOCAB)]
            seen = [*tokens, *ids[index, :used].tolist()]
            logits += [model(seen[: len(tokens) + j]) for j in range(used + 1)]
            assert row == index + 1
        verified = verify(
            torch.stack(logits),
            state,
            VerifyRows(
                np.array(list(known)),
                np.array([len(tokens) for tokens in known.values()]),
                counts,
                np.array(flat_ids),
                torch.stack(flat_weights) if flat_weights else None,
            ),
        )
        emitted = verified.accepted + 1
        starts = counts.cumsum() - counts
        flat: list[int] = []
        for index, tokens in enumerate(known.values()):
            new = verified.tokens[starts[index] : starts[index] + emitted[index]].tolist()
            assert min(new) >= 0
            tokens += new
            outputs[index] += new
            flat += new
        state.commit(np.array(list(known)), np.array(flat), emitted)
        turn += 1
    return [output[:total] for output in outputs]


def rows_of(coupling: Coupling) -> list[Row]:
    return [
        Row(SamplingParams(**kind, coupling=coupling), 100 + n, [4, 8, n], [n + 1, 8])
        for n, kind in enumerate(KINDS)
    ]


def test_gumbel_streams_are_equal_for_every_split() -> None:
    rows = rows_of(Coupling.GUMBEL)
    plain = stream(rows, lambda turn, row: 0, 24)
    assert len({tuple(output) for output in plain}) == len(rows)
    for length in range(1, 6):
        assert stream(rows, lambda turn, row, n=length: n, 24) == plain
    rng = np.random.default_rng(1)
    assert stream(rows, lambda turn, row: int(rng.integers(0, 6)), 24) == plain
    for number, row in enumerate(rows):  # and alone
        assert stream([row], lambda turn, row: 3, 24) == [plain[number]]


def test_without_drafts_the_streams_are_those_of_sample() -> None:
    for coupling in Coupling:
        rows = rows_of(coupling)
        verified = stream(rows, lambda turn, row: 0, 12)
        state = state_of(rows, VOCAB)
        known = [[*row.prompt, *row.output] for row in rows]
        table = np.arange(1, len(rows) + 1)
        for step in range(12):
            logits = torch.stack([model(tokens) for tokens in known])
            drawn = sample(logits, state, table, np.array([len(tokens) for tokens in known]))
            state.commit(table, drawn.tokens)
            for tokens, token in zip(known, drawn.tokens.tolist(), strict=True):
                tokens.append(token)
            assert drawn.tokens.tolist() == [output[step] for output in verified]


def test_greedy_rows_are_equal_in_both_couplings() -> None:
    def greedy(coupling: Coupling) -> list[Row]:
        return [row for row in rows_of(coupling) if row.params.greedy]

    plain = stream(greedy(Coupling.GUMBEL), lambda turn, row: 0, 20)
    assert stream(greedy(Coupling.MAXIMAL), lambda turn, row: 4, 20) == plain


def test_maximal_rows_accept_what_the_same_drafter_draws() -> None:
    """A perfect drafter is always right, for every kind of parameters."""
    rows = rows_of(Coupling.MAXIMAL)
    state = state_of(rows, VOCAB)
    table = np.arange(1, len(rows) + 1)
    first = np.array([row.position for row in rows])
    known = [[*row.prompt, *row.output] for row in rows]
    logits = []
    picker = draft_picker(state, table, first)
    for place in range(4):
        logits.append(torch.stack([model(tokens) for tokens in known]))
        for tokens, token in zip(known, picker(place, logits[-1]).tolist(), strict=True):
            tokens.append(token)
    logits.append(torch.stack([model(tokens) for tokens in known]))
    weights = picker.weights
    assert weights is not None and weights.shape == (len(rows), 4, VOCAB)
    greedy = [n for n, row in enumerate(rows) if row.params.greedy]
    assert (weights[greedy] == 0).all() and (weights.sum(-1) > 0).sum() == 4 * (len(rows) - 2)
    drafts = np.array([[*tokens[-4:], -1] for tokens in known])
    padded = torch.nn.functional.pad(weights, (0, 0, 0, 1)).flatten(0, 1)
    counts = np.full(len(rows), 5)
    target = torch.stack(logits, dim=1).flatten(0, 1)
    rows_to_verify = VerifyRows(table, first, counts, drafts.ravel(), padded)
    verified = verify(target, state, rows_to_verify)
    assert verified.accepted.tolist() == [4] * len(rows)
    agreement = verified.agreement
    assert agreement is not None
    random = np.repeat([not row.params.greedy for row in rows], 5) & (drafts.ravel() >= 0)
    assert np.array_equal(np.isfinite(agreement), random)
    assert np.allclose(agreement[random], 1.0, atol=1e-6)


def test_drafts_are_drawn_with_the_numbers_of_position_and_anchor() -> None:
    """`maximal`: other numbers for the same position in another round; `gumbel`: the target's own,
    whatever the round and the place in it."""
    count = 64
    flat = torch.zeros(count, VOCAB)
    drawn: dict[tuple[Coupling, int], np.ndarray] = {}
    for coupling in Coupling:
        state = state_of([Row(SamplingParams(coupling=coupling), n) for n in range(count)], VOCAB)
        table = np.arange(1, count + 1)
        for anchor in (29, 30):
            picker = draft_picker(state, table, np.full(count, anchor + 1))
            places = 32 - anchor  # up to the draft of position 32, in both rounds
            drawn[coupling, anchor] = [picker(place, flat) for place in range(places)][-1].numpy()
        at_target = sample(flat, state, table, np.full(count, 32)).tokens
        same = {anchor: int((drawn[coupling, anchor] == at_target).sum()) for anchor in (29, 30)}
        assert same == {29: count, 30: count} if coupling == "gumbel" else max(same.values()) < 9
    again = drawn[Coupling.MAXIMAL, 29] == drawn[Coupling.MAXIMAL, 30]
    assert again.sum() < 9


def test_rows_see_the_drafts_before_them() -> None:
    """Edits of row j are those of the reference behind drafts 1 .. j; the state stays."""
    params = SamplingParams(
        repetition_penalty=1.5,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        min_tokens=4,
        stop_token_ids=(11,),
    )
    row = Row(params, 3, [4, 8, 8], [7, 7])
    state = state_of([Row(), row], VOCAB)
    drafts = np.array([7, 20, 7, 4, 21])
    logits = torch.stack([model([4, n]) for n in range(6)])
    begin, end = np.zeros(6, dtype=np.int64), np.arange(6)
    counts = state.edits[2].counts
    assert counts is not None
    before = counts.ids.tolist(), counts.counts.tolist()
    changed = edited(
        logits, state, np.full(6, 2), row.position + end, prefixes=Prefixes(drafts, begin, end)
    )
    for place in range(6):
        output = [*row.output, *drafts[:place].tolist()]
        line = logits[place].numpy()
        assert np.array_equal(
            changed[place].numpy(), reference.edited(line, params, row.prompt, output, EOS)
        )
    assert torch.isinf(changed[1, 11]) and torch.isfinite(changed[2, 11])
    assert (counts.ids.tolist(), counts.counts.tolist()) == before


def mask_of(ids: list[int]) -> np.ndarray:
    words = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    for token in ids:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


@pytest.mark.parametrize("coupling", list(Coupling))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_are_of_each_row(coupling: Coupling, temperature: float) -> None:
    """Also of rows without any edit; bit 31 of a word counts; what is left is drawn from."""
    params = SamplingParams(temperature=temperature, coupling=coupling)
    allowed = [[31], [63, 96], [0], [], list(range(VOCAB))]
    logits = torch.stack([model([4, n]) for n in range(5)])
    before = logits.clone()
    masks = Masks(np.arange(5), np.stack([mask_of(ids) for ids in allowed]))
    drafts = np.array([31, -1, 0, 5, -1])
    rows = VerifyRows(np.array([1, 2]), np.array([9, 9]), np.array([2, 3]), drafts)
    verified = verify(logits, state_of([Row(params), Row(params)], VOCAB), rows, masks=masks)
    assert verified.accepted.tolist() == [1, 1]
    assert verified.tokens[0] == 31 and verified.tokens[1] in (63, 96) and verified.tokens[2] == 0
    # The second row of the second request allows nothing: that ends it.
    assert verified.tokens[3:].tolist() == [NO_TOKEN_DRAWN, NO_TOKEN_DRAWN]
    assert torch.equal(logits, before)
    forbidden = replace(rows, draft_ids=np.array([30, -1, 1, 5, -1]))
    again = verify(logits, state_of([Row(params), Row(params)], VOCAB), forbidden, masks=masks)
    assert again.accepted.tolist() == [0, 0]
    assert again.tokens.tolist() == [31, -1, 0, -1, -1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("coupling", list(Coupling))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_ends_acceptance(bad: float, coupling: Coupling, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, coupling=coupling, logprobs=1)
    logits = torch.zeros(8, 10)
    logits[:, 7] = 60.0
    logits[2, 3] = bad
    drafts = np.array([7, 7, 7, -1, 7, 7, 7, -1])
    rows = VerifyRows(np.array([1, 2]), np.array([4, 4]), np.array([4, 4]), drafts)
    verified = verify(logits, state_of([Row(params), Row(params)], 10), rows)
    assert verified.accepted.tolist() == [2, 3]
    assert verified.tokens.tolist() == [7, 7, NO_TOKEN_DRAWN, NO_TOKEN_DRAWN, 7, 7, 7, 7]
    assert verified.logprobs is not None
    assert verified.logprobs.index.tolist() == [0, 1, 4, 5, 6, 7]


@pytest.mark.parametrize("coupling", list(Coupling))
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_draft_is_some_id(bad: float, coupling: Coupling) -> None:
    params = SamplingParams(coupling=coupling)
    state = state_of([Row(params), Row(params)], 10)
    picker = draft_picker(state, np.array([1, 2]), np.array([1, 1]))
    logits = torch.zeros(2, 10)
    logits[0, 3] = bad
    assert int(picker(0, logits)[0]) == 3
    weights = picker.weights
    assert weights is None or ((weights[0] == 0).all() and (weights[1] > 0).all())


@pytest.mark.parametrize("mode", list(LogprobsMode))
@pytest.mark.parametrize("coupling", list(Coupling))
def test_log_probabilities_are_the_targets(mode: LogprobsMode, coupling: Coupling) -> None:
    """Those of the emitted tokens, the bits of single draws behind the same tokens."""
    params = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        presence_penalty=0.5,
        coupling=coupling,
        logprobs=3,
        logprobs_mode=mode,
    )
    rows = [Row(params, 5, [4, 8], [9]), Row(SamplingParams(temperature=0.0), 6, [4, 9], [2])]
    state = state_of(rows, VOCAB)
    known = {n: [*row.prompt, *row.output] for n, row in enumerate(rows, 1)}
    first = np.array([3, 3])
    for turn in range(6):
        ids, weights = drafts_of(state, known, 3)
        seen = [[*tokens, *ids[i].tolist()] for i, tokens in enumerate(known.values())]
        logits = torch.stack([model(tokens[: 3 + turn + j]) for tokens in seen for j in range(4)])
        drafts = np.pad(ids, ((0, 0), (0, 1)), constant_values=-1).ravel()
        if weights is not None:
            weights = torch.nn.functional.pad(weights, (0, 0, 0, 1)).flatten(0, 1)
        rows_now = VerifyRows(np.array([1, 2]), first + turn, np.array([4, 4]), drafts, weights)
        verified = verify(logits, state, rows_now)
        assert verified.logprobs is not None
        assert verified.logprobs.index.tolist() == list(range(int(verified.accepted[0]) + 1))
        for place in range(int(verified.accepted[0]) + 1):
            output = [*rows[0].output, *known[1][3:], *ids[0, :place].tolist()]
            forced = replace(params, logit_bias={int(verified.tokens[place]): 0.0})
            alone = state_of([Row(forced, 5, rows[0].prompt, output)], VOCAB)
            single = sample(
                logits[place : place + 1], alone, np.array([1]), np.array([3 + turn + place])
            )
            record = verified.logprobs.find(place)
            assert record is not None and single.logprobs is not None
            assert record.top_ids == single.logprobs.record(0).top_ids
            assert record.top_logprobs == single.logprobs.record(0).top_logprobs
            if int(verified.tokens[place]) == int(single.tokens[0]):
                assert record == single.logprobs.record(0)
        tokens = verified.tokens[[0, 4]]
        state.commit(np.array([1, 2]), tokens)
        for row, token in zip((1, 2), tokens.tolist(), strict=True):
            known[row].append(token)


def test_other_requests_change_no_bit() -> None:
    rows = rows_of(Coupling.MAXIMAL) + rows_of(Coupling.GUMBEL)
    together = stream(rows, lambda turn, row: (turn + row) % 5, 10)
    for number, row in enumerate(rows):
        alone = stream([row], lambda turn, row, n=number + 1: (turn + n) % 5, 10)
        assert alone == [together[number]]


def test_default_couplings() -> None:
    def draws(params: SamplingParams, deterministic: bool = False) -> list[int]:
        state = SamplerState(2, VOCAB, EOS, deterministic=deterministic)
        state.check(params)
        admit(state, 1, Row(params, 77))
        logits = torch.stack([model([4, n]) for n in range(20)])
        return sample(logits, state, np.ones(20, dtype=np.int64), np.arange(20)).tokens.tolist()

    noisy = draws(SamplingParams(coupling=Coupling.GUMBEL))
    other = draws(SamplingParams(coupling=Coupling.MAXIMAL))
    assert noisy != other
    assert draws(SamplingParams()) == other
    assert draws(SamplingParams(seed=5)) == noisy  # the row's seed is 77 in all of them
    assert draws(SamplingParams(seed=5, coupling=Coupling.MAXIMAL)) == other
    assert draws(SamplingParams(), deterministic=True) == noisy
    with pytest.raises(InvalidRequest, match="deterministic") as caught:
        draws(SamplingParams(coupling=Coupling.MAXIMAL), deterministic=True)
    assert caught.value.param == "coupling"


def test_a_run_is_committed_up_to_the_token_that_ends_it() -> None:
    params = SamplingParams(presence_penalty=1.0, stop_token_ids=(9,))
    state = state_of([Row(params), Row(params), Row(), Row(params)], VOCAB)
    tokens = np.array([5, 6, 7, 9, 4, 4, 8, 9])
    ended = state.commit(np.array([1, 2, 3, 4]), tokens, np.array([3, 2, 1, 2]))
    assert sorted(ended) == [3, 7] and ended[3].stop == 9
    counts = [state.edits[row].counts for row in (1, 2, 4)]
    assert [dict(zip(c.ids.tolist(), c.counts.tolist(), strict=True)) for c in counts if c] == [
        {5: 1, 6: 1, 7: 1},
        {9: 1},
        {8: 1, 9: 1},
    ]
    cut = state.commit(np.array([1]), np.array([9, 9, 3]), np.array([3]))
    assert list(cut) == [0]
    counts_now = state.edits[1].counts
    assert counts_now is not None and 3 not in counts_now.ids.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": np.array([1, 2])}, "add up"),
        ({"counts": np.array([0, 4])}, "at least 1"),
        ({"first": np.array([3])}, "one entry per request"),
        ({"draft_ids": np.array([5, -1, 6, 7])}, "last row"),
        ({"draft_weights": torch.zeros(3, VOCAB)}, "one row per draft"),
    ],
)
def test_rows_that_contradict_each_other(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "rows": np.array([1, 2]),
        "first": np.array([3, 3]),
        "counts": np.array([2, 2]),
        "draft_ids": np.array([5, -1, 6, -1]),
    }
    with pytest.raises(ValueError, match=message):
        VerifyRows(**{**fields, **changes})


def test_places_are_drafted_in_order() -> None:
    picker = draft_picker(state_of([Row()], VOCAB), np.array([1]), np.array([1]))
    with pytest.raises(ValueError, match="Place 0"):
        picker(1, torch.zeros(1, VOCAB))


def test_no_requests() -> None:
    none = np.zeros(0, dtype=np.int64)
    verified = verify(
        torch.zeros(0, VOCAB), state_of([], VOCAB), VerifyRows(none, none, none, none)
    )
    assert len(verified.tokens) == len(verified.accepted) == 0
