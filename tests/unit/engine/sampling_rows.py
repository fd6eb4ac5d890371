"""A row of the sampler in a test: parameters and known tokens, put into a `SamplerState`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.sampler import SampledTokens, sample
from headrace.engine.sampling_state import SamplerState

EOS = 1


@dataclass
class Row:
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    prompt: Sequence[int] = (0,)
    output: Sequence[int] = ()

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


def admit(state: SamplerState, number: int, row: Row) -> None:
    request = Request(f"r{number}", tuple(row.prompt), row.params)
    state.admit(number, request, row.seed, np.array([*row.prompt, *row.output], dtype=np.int32))


def state_of(rows: Sequence[Row], vocab: int) -> SamplerState:
    state = SamplerState(len(rows) + 1, vocab, EOS)
    for number, row in enumerate(rows, 1):
        if not row.params.stop:  # this state has no tokenizer
            state.check(row.params)
        admit(state, number, row)
    return state


def sample_rows(logits: torch.Tensor, rows: Sequence[Row]) -> SampledTokens:
    """Sample logits [S, vocab], row i for rows[i]; the logits must stay as they are."""
    before = logits.clone()
    result = sample(
        logits,
        state_of(rows, logits.shape[1]),
        np.arange(1, len(rows) + 1),
        np.array([row.position for row in rows], dtype=np.int64),
    )
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    return result


def tokens_of(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    return sample_rows(logits, rows).tokens.tolist()
