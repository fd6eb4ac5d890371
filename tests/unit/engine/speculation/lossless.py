"""A Markov chain drawn with drafts many times over, and chi-square tests of what came out.

The target's logits of a position are a row of a table, chosen by the token before; with penalties
they depend on all tokens before. So the exact distribution of the stream is known: `exact_pairs`
computes it with the plain NumPy transforms of `sampling_reference`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.sampling_state import SamplerState
from headrace.engine.speculation.verify import VerifyRows, draft_picker, verify
from tests.unit.engine import sampling_reference as reference

VOCAB = 64
LENGTH = 3  # tokens of each stream
DRAFTS = 2  # of each round
PROMPT, OUTPUT = (3, 5), (5, 7, 7)  # what every stream begins behind

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0.3": {"temperature": 0.3},
    "temperature 1": {"temperature": 1.0},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 10},
    "min_p": {"min_p": 0.1},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
    },
    "all": {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.02,
        "repetition_penalty": 0.8,
        "frequency_penalty": 0.5,
        "logit_bias": {9: 2.0, 11: -1.0},
        "banned_token_ids": (12, 13),
    },
}

# (round's drafts int64 [R, DRAFTS], those of the round before or -1, same shape) -> how many of
# each to verify, int64 [R]
Policy = Callable[[np.ndarray, np.ndarray], np.ndarray]


def target_logits() -> torch.Tensor:
    """fp32 [last token, id]: a few likely ids, many unlikely ones."""
    generator = torch.Generator().manual_seed(64)
    return torch.randn(VOCAB, VOCAB, generator=generator) * 1.5


def drafter_logits(drafter: str) -> torch.Tensor | None:
    """fp32 [last token, id] of a scripted drafter; None: its drafts are not drawn at random."""
    target = target_logits()
    if drafter == "perfect":
        return target
    if drafter == "half":  # between target and uniform
        return target / 2
    if drafter == "uniform":
        return torch.zeros_like(target)
    if drafter == "adversarial":
        return -target
    if drafter == "all wrong":  # as good as certain of the least likely id
        wrong = torch.zeros_like(target)
        return wrong.scatter_(1, target.argmin(dim=1, keepdim=True), 60.0)
    assert drafter == "certain"
    return None


DRAFTERS = ("perfect", "half", "uniform", "adversarial", "all wrong", "certain")


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode())


class Streams:
    """`draws` independent streams: one request, drawn at as many separate stretches of positions.

    A table row stands for a history of drawn tokens, so that penalties see them.
    """

    def __init__(self, params: SamplingParams, name: str, draws: int) -> None:
        self.seed = seed_of(name)
        self.params = params
        self.state = SamplerState(1 + 1 + VOCAB + VOCAB**2, VOCAB, eos_id=0)
        self._known: set[int] = set()
        self.tokens = np.full((draws, LENGTH), -1)
        self.lengths = np.zeros(draws, dtype=np.int64)
        self.base = 100 + np.arange(draws) * 16
        self.drafts_verified = self.drafts_accepted = 0
        self.agreement: list[np.ndarray] = []

    def run(self, drafter: str, policy: Policy | None = None) -> np.ndarray:
        """Tokens int64 [draws, LENGTH]."""
        target, table = target_logits(), drafter_logits(drafter)
        before = np.full((len(self.tokens), DRAFTS), -1)
        while len(active := np.flatnonzero(self.lengths < LENGTH)):
            last = self._last(active)
            rows = self._rows(active)
            first = self.base[active] + self.lengths[active]
            drafts = np.zeros((len(active), DRAFTS), dtype=np.int64)
            weights = None
            if table is None:
                drafts[:, 0] = target[last].argmax(-1).numpy()
                drafts[:, 1] = target[drafts[:, 0]].argmax(-1).numpy()
            else:
                picker = draft_picker(self.state, rows, first)
                for place in range(DRAFTS):
                    previous = drafts[:, place - 1] if place else last
                    drafts[:, place] = picker(place, table[previous]).numpy()
                weights = picker.weights
            counts = np.full(len(active), DRAFTS)
            if policy is not None:
                counts = policy(drafts, before[active])
            before[active] = drafts
            self._round(active, rows, first, last, drafts, weights, counts + 1, target)
        return self.tokens

    def _round(
        self,
        active: np.ndarray,
        rows: np.ndarray,
        first: np.ndarray,
        last: np.ndarray,
        drafts: np.ndarray,
        weights: torch.Tensor | None,
        counts: np.ndarray,
        target: torch.Tensor,
    ) -> None:
        places = np.arange(DRAFTS + 1)
        used = places < counts[:, None]
        previous = np.concatenate((last[:, None], drafts), axis=1)[used]
        checked = np.where(places < counts[:, None] - 1, np.pad(drafts, ((0, 0), (0, 1))), -1)
        flat_weights = None
        if weights is not None:
            padded = torch.nn.functional.pad(weights, (0, 0, 0, 1))
            flat_weights = padded[torch.from_numpy(used)]
        verified = verify(
            target[previous],
            self.state,
            VerifyRows(rows, first, counts, checked[used], flat_weights),
        )
        self.drafts_verified += int((counts - 1).sum())
        self.drafts_accepted += int(verified.accepted.sum())
        if verified.agreement is not None:
            self.agreement.append(verified.agreement[checked[used] >= 0])
        emitted = np.full((len(active), DRAFTS + 1), -1)
        emitted[used] = verified.tokens
        for place in places:
            put = (place <= verified.accepted) & (self.lengths[active] < LENGTH)
            index = active[put]
            assert (emitted[put, place] >= 0).all()
            self.tokens[index, self.lengths[index]] = emitted[put, place]
            self.lengths[index] += 1

    def _last(self, active: np.ndarray) -> np.ndarray:
        lengths = self.lengths[active]
        drawn = self.tokens[active, np.maximum(lengths - 1, 0)]
        return np.where(lengths > 0, drawn, OUTPUT[-1])

    def _rows(self, active: np.ndarray) -> np.ndarray:
        tokens, lengths = self.tokens[active], self.lengths[active]
        rows = np.select(
            [lengths == 0, lengths == 1],
            [1, 2 + tokens[:, 0]],
            2 + VOCAB + VOCAB * tokens[:, 0] + tokens[:, 1],
        )
        for row, index in zip(*np.unique(rows, return_index=True), strict=True):
            if int(row) not in self._known:
                self._known.add(int(row))
                output = (*OUTPUT, *tokens[index, : lengths[index]].tolist())
                request = Request(f"r{row}", PROMPT, self.params)
                known = np.array([*PROMPT, *output], dtype=np.int32)
                self.state.admit(int(row), request, self.seed, known)
        return rows


def conditional(params: SamplingParams, drawn: tuple[int, ...]) -> np.ndarray:
    """Exact distribution of the token behind `drawn`, fp64 [VOCAB]."""
    output = (*OUTPUT, *drawn)
    logits = target_logits()[output[-1]].numpy()
    changed = reference.edited(logits, params, PROMPT, output, eos=0)
    weights = reference.weights(changed, params)
    return weights / weights.sum()


def exact_pairs(params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Distributions of (token 1, token 2) and of (token 2, token 3), [VOCAB, VOCAB] each."""
    one = conditional(params, ())
    pair, later = np.zeros((VOCAB, VOCAB)), np.zeros((VOCAB, VOCAB))
    by_last: dict[int, np.ndarray] = {}
    for a in np.flatnonzero(one).tolist():
        pair[a] = one[a] * conditional(params, (a,))
        for b in np.flatnonzero(pair[a]).tolist():
            if params.penalised:
                third = conditional(params, (a, b))
            else:
                third = by_last.setdefault(b, conditional(params, (b,)))
            later[b] += pair[a, b] * third
    return pair, later


@dataclass
class Result:
    """p-values of (token 1), (token 1, token 2), (token 2, token 3); 0: an impossible token."""

    p_values: tuple[float, float, float]
    acceptance: float

    def holds(self, alpha: float) -> bool:
        return min(self.p_values) >= alpha


def p_values_of(
    tokens: np.ndarray, pairs: tuple[np.ndarray, np.ndarray]
) -> tuple[float, float, float]:
    pair, later = pairs
    one = np.bincount(tokens[:, 0], minlength=VOCAB)
    two = np.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB**2)
    three = np.bincount(tokens[:, 1] * VOCAB + tokens[:, 2], minlength=VOCAB**2)
    return (
        p_value(one, pair.sum(axis=1)),
        p_value(two, pair.ravel()),
        p_value(three, later.ravel()),
    )


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of Pearson's chi-square test; cells that expect fewer than 5 are one cell."""
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * counts.sum()
    large = expected >= 5
    cells = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    cells, wanted = cells[wanted > 0], wanted[wanted > 0]
    chi2 = float(((cells - wanted) ** 2 / wanted).sum())
    half = torch.tensor([(len(cells) - 1) / 2, chi2 / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
