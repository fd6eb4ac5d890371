"""What the sampler keeps about each running request, by table row.

Contract, for the scheduler (no torch here):
- `check(params)` before a request is queued: ids outside the vocabulary, stop strings without a
  tokenizer, a request that could not draw anything. Raises InvalidRequest.
- `admit(row, request, seed, tokens)` when a request gets its row, the first time and after each
  preemption or restore: everything is rebuilt from the known tokens. `seed`: of this choice, that
  is, already through `rng.choice_seed`.
- `commit(rows, tokens, counts)` once per step with the emitted tokens, some of each row: counts
  them for the penalties and says which answers they end by a stop token or string (EOS and length
  are the scheduler's). Drafts are never committed before they are accepted.
- `copy(parent, child, seed)` for a fork, `release(row)` at the end; a free row may be released.
- `all_rows[row]`: this admission must compute every prompt row and give its logits
  (`logprobs.prompt_logprobs`). Hand the result to `prompt_logprobs[row].put(start, rows)` and send
  `.records()` with the first chunk.
The sampler reads the arrays by row; a row's values depend on its own request only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.core.protocols import Tokenizer
from headrace.core.request import Request
from headrace.core.sampling import Coupling, LogprobsMode, SamplingParams
from headrace.engine.logprob_rows import PromptLogprobs
from headrace.engine.penalties import TokenCounts
from headrace.engine.stops import Ended, StopTable
from headrace.errors import InvalidRequest

Ids = NDArray[np.int64]

# What a row needs beyond the highest logit; 0 everywhere is the fast path of the sampler.
DRAWS = 1  # not greedy
SHAPED = 2  # top_k, top_p or min_p
EDITED = 4  # penalties, bias, masks
LOGPROBS = 8
GUMBEL = 16  # draws by the `gumbel` coupling, else by `maximal`


@dataclass(slots=True)
class RowEdits:
    """Changes of one row's logits, in the order in which they are made; None: there is none.

    stop_ids: what min_tokens forbids while the output is shorter than that.
    """

    counts: TokenCounts | None
    repetition: float
    frequency: float
    presence: float
    bias_ids: Ids | None
    bias: NDArray[np.float64] | None
    banned_ids: Ids | None
    allowed_ids: Ids | None
    min_tokens: int
    stop_ids: Ids

    def copy(self) -> RowEdits:
        """Independent counts; the constant arrays are shared."""
        return RowEdits(
            None if self.counts is None else self.counts.copy(),
            *(getattr(self, name) for name in RowEdits.__slots__[1:]),
        )


class SamplerState:
    """Sampling parameters and history of the running requests; arrays of length `num_rows`."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        eos_id: int,
        tokenizer: Tokenizer | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        """num_rows: of the request table, row 0 (never used) included. deterministic: every request
        draws by the `gumbel` coupling.
        """
        self._deterministic = deterministic
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        self.stops = StopTable(num_rows, tokenizer)
        self.flags = np.zeros(num_rows, dtype=np.uint8)
        self.seeds = np.zeros(num_rows, dtype=np.uint64)
        self.temperatures = np.ones(num_rows, dtype=np.float64)
        self.top_k = np.full(num_rows, -1, dtype=np.int64)
        self.top_p = np.ones(num_rows, dtype=np.float64)
        self.min_p = np.zeros(num_rows, dtype=np.float64)
        self.prompt_lengths = np.zeros(num_rows, dtype=np.int64)
        self.top_logprobs = np.zeros(num_rows, dtype=np.int64)
        self.processed = np.zeros(num_rows, dtype=np.bool_)
        self.all_rows = np.zeros(num_rows, dtype=np.bool_)
        self.edits: dict[int, RowEdits] = {}
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}

    # --- hooks of the scheduler ----------------------------------------------------------------

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequest for what this vocabulary cannot do; changes nothing."""
        for name in ("stop_token_ids", "banned_token_ids", "allowed_token_ids", "logit_bias"):
            self._check_ids(name, getattr(params, name) or ())
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self._vocab_size:
                raise InvalidRequest(
                    f"{name} must be at most {self._vocab_size}, the size of the vocabulary, got "
                    f"{count}.",
                    param=name,
                )
        if self._deterministic and params.coupling == Coupling.MAXIMAL:
            raise InvalidRequest(
                'coupling "maximal" gives tokens that depend on what runs beside a request, and '
                'this engine is deterministic: leave coupling out or set "gumbel".',
                param="coupling",
            )
        self.stops.check(params)
        self._check_drawable(params)

    def admit(self, row: int, request: Request, seed: int, tokens: NDArray[Any]) -> None:
        """Set a free row up; `tokens`: all known ids of this choice, int [prompt + output]."""
        params = request.sampling
        prompt_length = len(request.prompt_token_ids)
        self.seeds[row] = seed
        self.temperatures[row] = 1.0 if params.greedy else params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.prompt_lengths[row] = prompt_length
        self.stops.admit(row, params, tokens[prompt_length:])
        flags = 0
        if not params.greedy:
            flags |= DRAWS | (SHAPED if params.shaped else 0)
            flags |= GUMBEL if self._coupling(params) == Coupling.GUMBEL else 0
        edits = self._edits(params, tokens, prompt_length)
        if edits is not None:
            self.edits[row] = edits
            flags |= EDITED
        if params.logprobs is not None:
            self.top_logprobs[row] = params.logprobs
            self.processed[row] = params.logprobs_mode == LogprobsMode.PROCESSED
            flags |= LOGPROBS
        self.flags[row] = flags
        # Once there is output, the prompt's log probabilities have been sent.
        if request.needs_all_rows and len(tokens) == prompt_length:
            self.all_rows[row] = True
            self.prompt_logprobs[row] = PromptLogprobs(prompt_length, params.prompt_logprobs or 0)

    def commit(
        self, rows: Ids, tokens: NDArray[Any], counts: Ids | None = None
    ) -> dict[int, Ended]:
        """Take the emitted tokens in; gives place in `tokens` -> how that answer ends there.

        rows: int64 [R]. tokens: those of the first row, then those of the next ...; ids below 0:
        nothing was drawn. counts: int64 [R], tokens of each row; None: one. Tokens behind the one
        that ends an answer are not looked at.
        """
        if counts is None:
            return self._commit_one(rows, tokens, np.arange(len(rows)))
        ended: dict[int, Ended] = {}
        going = np.ones(len(rows), dtype=np.bool_)
        starts = counts.cumsum() - counts
        for offset in range(int(counts.max(initial=0))):
            index = np.flatnonzero(going & (counts > offset))
            now = self._commit_one(rows[index], tokens, starts[index] + offset)
            going[np.searchsorted(starts + counts, list(now), side="right")] = False
            ended |= now
        return ended

    def copy(self, parent: int, child: int, seed: int) -> None:
        """Let the free row `child` start like `parent`, with a seed of its own."""
        for array in (
            self.flags,
            self.temperatures,
            self.top_k,
            self.top_p,
            self.min_p,
            self.prompt_lengths,
            self.top_logprobs,
            self.processed,
        ):
            array[child] = array[parent]
        self.seeds[child] = seed
        if parent in self.edits:
            self.edits[child] = self.edits[parent].copy()
        self.stops.copy(parent, child)

    def release(self, row: int) -> None:
        """Forget a row."""
        self.flags[row] = 0
        self.all_rows[row] = False
        self.edits.pop(row, None)
        self.prompt_logprobs.pop(row, None)
        self.stops.release(row)

    # --- inside ------------------------------------------------------------------------------

    def _coupling(self, params: SamplingParams) -> Coupling:
        if params.coupling is not None:
            return params.coupling
        keyed = params.seed is not None or self._deterministic
        return Coupling.GUMBEL if keyed else Coupling.MAXIMAL

    def _commit_one(self, rows: Ids, tokens: NDArray[Any], places: Ids) -> dict[int, Ended]:
        """One token of each of `rows`, at `places` of `tokens`; keys are such places."""
        drawn = tokens[places]
        if self.edits:
            for index in np.flatnonzero(self.flags[rows] & EDITED).tolist():
                counts = self.edits[int(rows[index])].counts
                if counts is not None and drawn[index] >= 0:
                    counts.add(int(drawn[index]))
        return {int(places[index]): end for index, end in self.stops.push(rows, drawn).items()}

    def _edits(
        self, params: SamplingParams, tokens: NDArray[Any], prompt_length: int
    ) -> RowEdits | None:
        if not (
            params.penalised
            or params.logit_bias
            or params.banned_token_ids
            or params.allowed_token_ids is not None
            or params.min_tokens
            or params.grammar is not None  # its masks come with each step
        ):
            return None
        counts = None
        if params.penalised:
            counts = TokenCounts(
                tokens[:prompt_length],
                tokens[prompt_length:],
                with_prompt=params.repetition_penalty != 1.0,
            )
        bias_ids = bias = None
        if params.logit_bias:
            bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
            bias = np.array(list(params.logit_bias.values()), dtype=np.float64)
        allowed = params.allowed_token_ids
        return RowEdits(
            counts=counts,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            bias_ids=bias_ids,
            bias=bias,
            banned_ids=_distinct(params.banned_token_ids) if params.banned_token_ids else None,
            allowed_ids=None if allowed is None else _distinct(allowed),
            min_tokens=params.min_tokens,
            stop_ids=_distinct(self._stop_ids(params)),
        )

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        eos = () if params.ignore_eos else (self._eos_id,)
        return frozenset((*params.stop_token_ids, *eos))

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        for token in ids:
            if token >= self._vocab_size:
                raise InvalidRequest(
                    f"{name} holds {token}, allowed are 0 to {self._vocab_size - 1}.", param=name
                )

    def _check_drawable(self, params: SamplingParams) -> None:
        """At least one id must be left by the masks, in every step."""
        closed = set(params.banned_token_ids)
        if params.min_tokens:
            closed |= self._stop_ids(params)
        if params.allowed_token_ids is not None:
            left = len(set(params.allowed_token_ids) - closed)
        else:
            left = self._vocab_size - len(closed)
        if left == 0:
            raise InvalidRequest(
                "allowed_token_ids, banned_token_ids and min_tokens leave no token to draw.",
                param="min_tokens" if params.min_tokens else "banned_token_ids",
            )


def _distinct(ids: Iterable[int]) -> Ids:
    return np.array(sorted(set(ids)), dtype=np.int64)
