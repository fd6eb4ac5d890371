"""The device side of the engine: carries out plans, one after another, on state of its own.

Contract: `run` gets a plan with the block tables of its rows and the changes of rows since the plan
before, runs it and returns what was drawn. Where a decode share starts, which tokens and drafts it
feeds and how many of them is decided here, from the tokens that the steps before drew: the host may
plan a step before it knows them. Rows that turn out to have ended take no part. One thread at a
time calls it: the engine's own (blocking) or the executor thread (overlapped), in the order of the
launches. After an error nothing runs until `reset`. Called by `engine/engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from headrace.core.request import Request
from headrace.engine.edits import list_leaving_nothing
from headrace.engine.grammar.backend import MaskWords
from headrace.engine.grammar.rows import GrammarRows, Masks
from headrace.engine.grammar.states import StateGraph
from headrace.engine.inputs import Shares, build_batch, last_rows
from headrace.engine.logprobs import prompt_logprobs
from headrace.engine.plan import (
    NO_TOKEN_DRAWN,
    DraftReport,
    Flags,
    Floats,
    Ints,
    PlannedDrafts,
    PromptRecords,
    StepPlan,
    StepResult,
    Tokens,
)
from headrace.engine.runner import Runner
from headrace.engine.sampling_state import SamplerState
from headrace.engine.speculation.confidence import survivals
from headrace.engine.speculation.drafts import Drafter, DraftPool, DraftRequest
from headrace.engine.speculation.verify import NO_DRAFT, Verified, VerifyRows, draft_picker, verify
from headrace.engine.stops import EOS_ENDED
from headrace.engine.tables import LEAST_TOKENS
from headrace.engine.transfers import sent
from headrace.errors import HeadraceError, InternalError, InvalidGrammar, InvalidRequest


@dataclass(frozen=True, slots=True)
class Order:
    """A plan to carry out. block_tables: int32 [B, M], of its rows when it was launched. changes:
    to be made first, in order: calls of `Executor.admit` and `Executor.release`."""

    plan: StepPlan
    block_tables: npt.NDArray[np.int32]
    changes: Sequence[Callable[[], None]] = ()


@dataclass(slots=True, eq=False)
class _Sampling:
    """Rows of a step that draw: S requests, T logit rows.

    live: bool [S of the plan], which of its sampling rows still run; the rest is of those. rows:
    int64 [S]. drafts: int64 [S], drafts to verify; forced: how many of them are forced. owner,
    place: int64 [T], whose row it is and which of its rows.
    """

    live: Flags
    rows: Ints
    drafts: Ints
    forced: Ints
    owner: Ints
    place: Ints

    @property
    def counts(self) -> Ints:
        """Rows of each request, int64 [S]."""
        counts: Ints = self.drafts + 1
        return counts


class Executor:
    """Tokens, drafts and sampling state of the running requests, beside model and cache."""

    def __init__(
        self,
        runner: Runner,
        sampler: SamplerState,
        grammars: GrammarRows,
        drafter: Drafter | None,
        confidences: Callable[[Floats], Floats],
        *,
        num_rows: int,
        max_tokens: int,
        max_forced: int,
        max_ngram: int,
        row_multiple: int,
    ) -> None:
        """confidences: of drafts, from their features. num_rows: of the request table. max_tokens:
        of one request. max_forced: forced tokens of a request that one step takes. max_ngram,
        row_multiple: see `build_batch`."""
        self._runner = runner
        self._sampler = sampler
        self._grammars = grammars
        self._drafter = drafter
        self._confidences = confidences
        self._max_forced = max_forced
        self._max_ngram = max_ngram
        self._row_multiple = row_multiple
        # Behind the known tokens of a row lie the drafts that are being verified.
        width = max(max_tokens, LEAST_TOKENS)
        self._tokens: Tokens = np.zeros((num_rows, width), dtype=np.int32)
        self._length: Ints = np.zeros(num_rows, dtype=np.int64)
        self._limit: Ints = np.zeros(num_rows, dtype=np.int64)  # 0: ended
        self._wanted: Ints = np.zeros(num_rows, dtype=np.int64)
        length = 0 if drafter is None else drafter.length
        self._pool = DraftPool(num_rows, length, max_forced)
        self._broken = False

    # --- rows --------------------------------------------------------------------------------

    def admit(
        self,
        row: int,
        request: Request,
        seed: int,
        tokens: Ints,
        limit: int,
        drafts: int,
        graph: StateGraph | None = None,
    ) -> None:
        """A free row got a choice of a request. seed: of the choice. tokens: int64 [length], known
        ids. limit: tokens at most. drafts: as in `NewRequest`. graph: of its grammar, if any."""
        self._sampler.admit(row, request, seed, tokens)
        grammar = request.sampling.grammar
        if grammar is not None and graph is not None:
            output = tokens[len(request.prompt_token_ids) :].tolist()
            self._grammars.admit(row, grammar, graph, output)
        self._tokens[row, : tokens.size] = tokens
        self._length[row] = tokens.size
        self._limit[row] = limit
        self._wanted[row] = drafts
        self._pool.clear(np.array([row]))

    def release(self, row: int) -> None:
        """The row is free again."""
        self._sampler.release(row)
        self._grammars.release(row)
        self._limit[row] = 0

    def reset(self) -> None:
        """Free all rows; orders run again."""
        for row in range(1, self._limit.size):
            self.release(row)
        self._broken = False

    # --- one step ----------------------------------------------------------------------------

    def run(self, order: Order) -> StepResult:
        """Carry out a plan. Raises what model and sampler raise; then everything is to be reset."""
        if self._broken:
            raise InternalError("The step before this one failed, so this one cannot run.")
        self._broken = True  # until it has gone well
        plan = order.plan
        for change in order.changes:
            change()
        self._runner.copy(plan.block_copies, plan.slot_copies)
        shares, sampling = self._resolve(order)
        result = StepResult(np.zeros(0, dtype=np.int64), counts=np.zeros(sampling.live.size, int))
        if shares.rows.size:
            batch = build_batch(
                shares, self._tokens, max_ngram=self._max_ngram, row_multiple=self._row_multiple
            )
            forward = self._runner.stopwatch()
            logits = self._runner.execute(batch)
            forward.stop()
            result = self._draw(plan, shares, sampling, logits)
            if result.drafts is not None:
                result.drafts.rows = int(shares.q_len.sum())
                result.drafts.forward_s = forward.seconds()
        self._broken = False
        return result

    def _resolve(self, order: Order) -> tuple[Shares, _Sampling]:
        """What really runs: decode rows where they are now, with as many drafts as there are."""
        plan, decodes = order.plan, order.plan.decodes
        rows = plan.rows[:decodes]
        q_start, q_len = plan.q_start.copy(), plan.q_len.copy()
        room = self._limit[rows] - self._length[rows]
        drafts = np.zeros(plan.rows.size, dtype=np.int64)
        if plan.drafts is not None:
            drafts[:decodes] = self._lengths(rows, plan.drafts, room - 1)
        q_start[:decodes] = self._length[rows] - 1
        q_len[:decodes] += drafts[:decodes]
        logits = np.where(plan.samples, drafts + 1, 0)
        if plan.all_logits is not None:
            logits = np.where(plan.all_logits, plan.q_len, logits)
        shares = Shares(
            plan.rows,
            q_start,
            q_len,
            logits,
            plan.window_floor,
            plan.write_from,
            plan.keep_from,
            order.block_tables,
        )
        live = np.ones(plan.rows.size, dtype=np.bool_)
        live[:decodes] = room > 0
        draws = live & plan.samples
        if not live.all():
            shares = shares.at(np.flatnonzero(live))
        drafts = drafts[draws]
        owner = np.arange(drafts.size).repeat(drafts + 1)
        place = np.arange(owner.size) - ((drafts + 1).cumsum() - drafts - 1)[owner]
        self._feed(plan.rows[draws], drafts)
        forced = np.minimum(drafts, self._pool.forced[plan.rows[draws]])
        return shares, _Sampling(live[plan.samples], plan.rows[draws], drafts, forced, owner, place)

    def _lengths(self, rows: Ints, planned: PlannedDrafts, room: Ints) -> Ints:
        """Drafts that each of `rows` verifies, int64 [n]; the last token needs no drafts."""
        pool = self._pool
        newest = survivals(self._confidences(pool.features[rows]))
        newest[np.arange(newest.shape[1]) >= pool.count[rows, None]] = 0.0
        lengths = np.minimum(planned.decision.lengths(newest), pool.count[rows])
        lengths = np.maximum(lengths, np.minimum(planned.forced, pool.forced[rows]))
        return np.minimum(lengths, np.minimum(planned.most, np.maximum(room, 0)))

    def _feed(self, rows: Ints, drafts: Ints) -> None:
        """Put drafts behind the known tokens, where the batch is built from."""
        owner = np.arange(rows.size).repeat(drafts)
        if owner.size:
            place = np.arange(owner.size) - (drafts.cumsum() - drafts)[owner]
            row = rows[owner]
            self._tokens[row, self._length[row] + place] = self._pool.token_ids[row, place]

    def _draw(
        self, plan: StepPlan, shares: Shares, sampling: _Sampling, logits: Tensor
    ) -> StepResult:
        """Verify, emit, draft. logits: of the shares, those of prompts included."""
        prompts: dict[int, PromptRecords] = {}
        if plan.all_logits is not None:
            prompts = self._prompt_logprobs(plan, shares, sampling, logits)
            draws = np.isin(shares.rows, sampling.rows)
            needed = last_rows(shares.logits.cumsum()[draws], sampling.counts)
            logits = logits[sent(needed, logits)]
        masks = self._masks(sampling)
        drawing = self._runner.stopwatch()
        verified = self._verify(sampling, logits, masks)
        drawing.stop()
        counts = verified.accepted + 1
        tokens, logprobs = verified.tokens, verified.logprobs
        emitted = None  # all rows
        if counts.size < tokens.size:
            emitted = np.flatnonzero(sampling.place <= verified.accepted[sampling.owner])
            tokens = tokens[emitted]
            logprobs = None if logprobs is None else logprobs.at(emitted)
        ended = self._sampler.commit(sampling.rows, tokens, counts)
        errors = None if masks is None else self._mask_errors(sampling, masks, emitted, tokens)
        # The answer is complete, whatever min_tokens and ignore_eos say: more would not fit it.
        for place in self._grammars.commit(sampling.rows, counts, tokens):
            ended.setdefault(place, EOS_ENDED)
        self._advance(sampling.rows, counts, tokens, ended)
        starts = (counts.cumsum() - counts).tolist()
        chunks = {starts[place]: records for place, records in prompts.items()}
        result = StepResult(tokens, ended, logprobs, chunks or None, errors)
        if len(self._grammars) or plan.drafts is not None:
            self._pool.clear(sampling.rows)
        if len(self._grammars):
            result.forced = np.zeros(sampling.live.size, dtype=np.int64)
            result.forced[sampling.live] = self._force(sampling.rows)
        if plan.drafts is not None:
            features = self._draft(sampling.rows, plan.drafts.decision.draft)
            result.drafts = _report(sampling, verified.accepted, features)
            result.drafts.sampler_s = drawing.seconds()
            drafted = self._pool.count[sampling.rows] - self._pool.forced[sampling.rows]
            result.drafts.drafted = int(drafted.sum())
        if plan.drafts is not None or not sampling.live.all():
            result.counts = np.zeros(sampling.live.size, dtype=np.int64)
            result.counts[sampling.live] = counts
        return result

    def _masks(self, sampling: _Sampling) -> Masks | None:
        """What grammars allow in the T logit rows. On a GPU the model still runs meanwhile."""
        if not len(self._grammars):
            return None
        known = self._pool.token_ids[sampling.rows].tolist()
        counts = sampling.drafts.tolist()
        drafts = [ids[:count] for ids, count in zip(known, counts, strict=True)]
        return self._grammars.masks(sampling.rows, drafts)

    def _mask_errors(
        self, sampling: _Sampling, masks: Masks, emitted: Ints | None, tokens: npt.NDArray[Any]
    ) -> dict[int, HeadraceError] | None:
        """Why nothing was drawn for rows with a grammar, by place in `tokens`.

        emitted: int64 [n], which of the T rows the tokens [n] are of; None: all.
        """
        places = np.flatnonzero(tokens == NO_TOKEN_DRAWN).tolist()
        if not places:
            return None
        words = dict(zip(masks.index.tolist(), masks.words, strict=True))
        errors: dict[int, HeadraceError] = {}
        for place in places:
            at = place if emitted is None else int(emitted[place])
            row = int(sampling.rows[sampling.owner[at]])
            error = self._grammars.error(row)
            if error is None and at in words:
                position = int(self._length[row] + sampling.place[at])
                error = self._nothing_left(row, words[at], position)
            if error is not None:
                errors[place] = error
        return errors or None

    def _nothing_left(self, row: int, words: MaskWords, position: int) -> HeadraceError | None:
        """Why a mask left nothing to draw at a position; None: the logits are to blame."""
        if not words.any():
            return InvalidGrammar(
                "The grammar has led to a place where nothing can follow: no complete answer goes "
                "on from here, or the grammar is too complex to tell.",
                param="grammar",
            )
        edits = self._sampler.edits.get(row)
        drawn = position - int(self._sampler.prompt_lengths[row])
        name = None if edits is None else list_leaving_nothing(words, edits, drawn)
        if name is None:
            return None
        return InvalidRequest(
            f"{name} excludes every token that the grammar allows after {drawn} tokens of the "
            "answer (its end is a token too); allow some of them, or leave one of the two out.",
            param=name,
        )

    def _verify(self, sampling: _Sampling, logits: Tensor, masks: Masks | None) -> Verified:
        rows, owner = sampling.rows, sampling.owner
        draft_ids = np.full(owner.size, NO_DRAFT, dtype=np.int64)
        weights = None
        if owner.size > rows.size:
            checks = sampling.place < sampling.drafts[owner]
            table, place = rows[owner], np.where(checks, sampling.place, -1)
            draft_ids[checks] = self._pool.token_ids[table[checks], place[checks]]
            weights = self._pool.weights(table, place)
        first = self._length[rows]
        checked = VerifyRows(rows, first, sampling.counts, draft_ids, weights)
        return verify(logits, self._sampler, checked, masks=masks)

    def _advance(
        self, rows: Ints, counts: Ints, tokens: npt.NDArray[Any], ended: Mapping[int, object]
    ) -> None:
        """Take emitted tokens in; rows that they end, or that drew nothing, do not run again."""
        owner = np.arange(rows.size).repeat(counts)
        place = np.arange(owner.size) - (counts.cumsum() - counts)[owner]
        drawn = tokens != NO_TOKEN_DRAWN
        row = rows[owner]
        self._tokens[row[drawn], (self._length[row] + place)[drawn]] = tokens[drawn]
        self._length[rows] += np.bincount(owner[drawn], minlength=rows.size)
        self._limit[row[~drawn]] = 0
        if ended:
            self._limit[row[list(ended)]] = 0

    def _force(self, rows: Ints) -> Ints:
        """Find the tokens that grammars force next; how many for each of `rows`, int64 [S]."""
        room = np.minimum(self._limit[rows] - self._length[rows] - 1, self._max_forced)
        for row, most in zip(rows.tolist(), room.tolist(), strict=True):
            if most > 0:
                self._pool.force(row, self._grammars.forced(row, most))
        return self._pool.forced[rows]

    def _draft(self, rows: Ints, adaptive: bool) -> Floats:
        """New drafts of those of `rows` that want some; their features, float64 [S, G].

        adaptive: also of requests that do not verify a fixed number. Whose forced tokens take the
        whole block gets none.
        """
        if self._drafter is None:
            return self._pool.features[rows]
        wanted = self._wanted[rows]
        wants = (wanted != 0) if adaptive else (wanted > 0)
        wants &= self._limit[rows] - self._length[rows] > 1
        wants &= self._pool.forced[rows] < self._drafter.length
        chosen = rows[wants]
        if chosen.size:
            lengths = self._length[chosen]
            picker = draft_picker(self._sampler, chosen, lengths, self._pool.known(chosen))
            request = DraftRequest(chosen, lengths, self._tokens, picker)
            self._pool.put(chosen, self._runner.draft(self._drafter, request))
        return self._pool.features[rows]

    def _prompt_logprobs(
        self, plan: StepPlan, shares: Shares, sampling: _Sampling, logits: Tensor
    ) -> dict[int, PromptRecords]:
        """Take the prompt rows in; records of the prompts that are complete, by place in [S]."""
        complete: dict[int, PromptRecords] = {}
        first = shares.logits.cumsum() - shares.logits
        wants = set() if plan.all_logits is None else set(plan.rows[plan.all_logits].tolist())
        draws = {row: place for place, row in enumerate(sampling.rows.tolist())}
        for share, row in enumerate(shares.rows.tolist()):
            if row not in wants:
                continue
            start = int(shares.q_start[share])
            collected = self._sampler.prompt_logprobs[row]
            prompt_length = int(self._sampler.prompt_lengths[row])
            end = min(start + int(shares.q_len[share]), prompt_length - 1)
            chunk = logits[int(first[share]) : int(first[share]) + end - start]
            following = self._tokens[row, start + 1 : end + 1].astype(np.int64)
            collected.put(start, prompt_logprobs(chunk, following, collected.top_count))
            if row in draws:
                complete[draws[row]] = collected.records()
        return complete


def _report(sampling: _Sampling, accepted: Ints, features: Floats) -> DraftReport:
    """By sampling row of the plan; those that had ended have nothing."""
    live = sampling.live
    verified, held, forced = np.zeros((3, live.size), dtype=np.int64)
    verified[live] = sampling.drafts - sampling.forced
    held[live] = np.maximum(accepted - sampling.forced, 0)
    forced[live] = sampling.forced
    everyone = np.zeros((live.size, features.shape[1]))
    everyone[live] = features
    return DraftReport(verified, held, everyone, forced)
