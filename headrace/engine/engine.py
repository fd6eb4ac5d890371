"""The synchronous engine: take requests in, run one step at a time, hand tokens out.

Contract: `add` validates and queues, `step` runs one step (plan, copies, batch, model, sampler,
commit), `abort` frees at once. A request's tokens do not depend on what runs beside it, on chunking
or on preemption. One thread calls it: `LLM` in process, the engine host in its own process.
Whatever a step raises leaves the requests as they were before the step.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

from headrace.config import EngineConfig
from headrace.core.protocols import Tokenizer
from headrace.core.request import Request
from headrace.core.rng import choice_seed
from headrace.core.sampling import SamplingParams
from headrace.engine.capacity import Capacity, plan_capacity
from headrace.engine.grammar.rows import GrammarRows, Masks
from headrace.engine.grammar.service import GRAMMAR_EVENT, GrammarService
from headrace.engine.inputs import INVARIANT_ROW_MULTIPLE, build_batch, logits_per_share
from headrace.engine.logprobs import prompt_logprobs
from headrace.engine.outputs import NOTHING, StepOutput
from headrace.engine.plan import Ints, PromptRecords, StepPlan, StepResult, Tokens
from headrace.engine.reuse import Reuse, plan_reuse
from headrace.engine.runner import ModelLike, Runner, SpecLike
from headrace.engine.sampler import sample
from headrace.engine.sampling_state import SamplerState
from headrace.engine.scheduler import NewRequest, Scheduler, SchedulerLimits
from headrace.engine.sequence import Sequence, TokenIds
from headrace.engine.stats import EngineStats
from headrace.errors import ContextTooLong, InvalidRequest
from headrace.kv.cache import KVCache
from headrace.kv.manager import KVManager
from headrace.kv.pool import BlockPool
from headrace.platforms import CpuPlatform, Platform

__all__ = ["Engine", "EngineStats"]


# Products of narrower models are too small to share: threads that wait for each other cost more
# than they save, on a busy machine thirty times as much.
SMALL_HIDDEN = 1024

# How long an engine with nothing else to do waits for a grammar, before it looks for commands.
GRAMMAR_WAIT_S = 0.005
NOTHING_LEFT = (
    "No token can be drawn: the logits are not finite, or banned_token_ids and allowed_token_ids "
    "exclude every token that the grammar allows."
)


def default_threads(spec: SpecLike, platform: Platform) -> int:
    """Threads of the operators where the config names no number."""
    return 1 if spec.hidden < SMALL_HIDDEN else platform.physical_cores()


class Engine:
    """A model with its cache memory and the requests that use them."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelLike,
        *,
        tokenizer: Tokenizer | None = None,
        platform: Platform | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reserve the cache memory. Raises ConfigError when model, config and memory do not fit.

        tokenizer: for stop strings; without one requests that have some are refused. platform: the
        CPU by default. clock: seconds, monotonic; for waiting times only.
        """
        platform = CpuPlatform() if platform is None else platform
        device = platform.devices()[0]
        groups = model.kv_groups()
        dtype = model.numerics.torch_dtype
        self.config = config
        self.spec: SpecLike = model.spec
        self.capacity: Capacity = plan_capacity(
            config,
            groups,
            max_position=model.spec.max_position,
            number_bytes=dtype.itemsize,
            available_bytes=platform.memory(device).available_bytes,
        )
        self.reuse: Reuse = plan_reuse(config, model.spec, groups, model.numerics)
        cache = KVCache(
            groups,
            num_blocks=self.capacity.num_blocks,
            num_slots=self.capacity.num_slots,
            dtype=dtype,
            device=device,
        )
        invariant = model.numerics.batch_invariant
        threads = 1 if invariant else config.threads or default_threads(model.spec, platform)
        self._runner = Runner(model, cache, platform, threads)
        self._row_multiple = INVARIANT_ROW_MULTIPLE if invariant else 1
        self._max_ngram = model.max_ngram
        self._sampler = SamplerState(
            self.capacity.num_slots, model.spec.vocab_size, model.spec.eos_id, tokenizer
        )
        self._grammars = GrammarService(
            config,
            tokenizer,
            vocab_size=model.spec.vocab_size,
            eos_id=model.spec.eos_id,
            clock=clock,
        )
        self._scheduler = self._new_scheduler()
        self._clock = clock
        self._seed = secrets.randbits(64) if config.seed is None else config.seed
        self._added = 0
        self._undelivered: list[StepOutput] = []  # last entries of aborted requests

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together that one request may have."""
        return self.capacity.max_model_len

    @property
    def scheduler(self) -> Scheduler:
        """Who decides what runs."""
        return self._scheduler

    def check(self, request: Request) -> None:
        """Raise what `add` would raise because of the request itself; changes nothing."""
        self._checked(request, 0)

    def add(self, request: Request) -> int:
        """Queue a request; its choice i has the returned number + i in the outputs.

        Raises InvalidRequest (empty prompt, id outside the vocabulary, id of the request in use,
        what the sampler cannot do), ContextTooLong, Overloaded.
        """
        # Numbered from 1: number 0 would give the engine's own seed.
        new = self._checked(request, choice_seed(self._seed, self._added + 1))
        ticket = self._grammars.open(request.sampling.grammar)
        waits = ticket is not None and not ticket.done
        new = replace(
            new, payload=(*new.payload, ticket), waits_for=(GRAMMAR_EVENT,) if waits else ()
        )
        number = self._scheduler.enqueue(new, self._clock())
        if ticket is not None and waits:
            self._grammars.hold(request.request_id, ticket)
        self._added += 1
        return number

    def abort(self, request_id: str) -> None:
        """End a request and free all it holds; its last entries come with the next `step`.

        An unknown id, or one that has ended, is ignored.
        """
        self._grammars.drop(request_id)
        output = self._scheduler.cancel(request_id, self._clock())
        if output is not None:
            self._undelivered.append(output)

    def abort_all(self) -> None:
        """End every request."""
        for request_id in self._scheduler.request_ids:
            self.abort(request_id)

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._undelivered) or len(self._scheduler) > 0

    def step(self) -> StepOutput:
        """Run one step; entries of all requests that got tokens or ended. Empty when idle."""
        output = NOTHING
        self._settle_grammars(0.0)
        plan = self._scheduler.plan(self._clock())
        if plan is None:
            self._settle_grammars(GRAMMAR_WAIT_S)
        else:
            self._runner.copy(plan.block_copies, plan.slot_copies)
            batch = build_batch(
                plan,
                self._scheduler.tokens,
                self._scheduler.kv.block_tables,
                max_ngram=self._max_ngram,
                row_multiple=self._row_multiple,
            )
            masks = self._grammars.rows.masks(plan.sampling_rows)
            result = self._draw(plan, self._runner.execute(batch), masks)
            output = self._scheduler.commit(plan, result, self._clock())
        # Taken out last: had the step raised, they would still be due.
        ended, self._undelivered = self._undelivered, []
        return StepOutput.concatenated([*ended, output]) if ended else output

    def stats(self) -> EngineStats:
        """Counters of now."""
        return self._scheduler.stats(self._clock())

    # --- sampling ----------------------------------------------------------------------------

    def _draw(self, plan: StepPlan, logits: Tensor, masks: Masks | None) -> StepResult:
        """Tokens of the sampling rows, and what ends with them."""
        rows = plan.sampling_rows
        positions = plan.q_start + plan.q_len
        prompts = self._prompt_logprobs(plan, logits)
        if plan.decodes < plan.rows.size:
            positions = positions[plan.samples]
        if plan.all_logits is not None:
            last = logits_per_share(plan).cumsum()[plan.samples] - 1
            logits = logits[last]
        sampled = sample(logits, self._sampler, rows, positions, masks)
        ended = self._sampler.commit(rows, sampled.tokens)
        errors = None if masks is None else self._mask_errors(rows, sampled.tokens, masks)
        self._grammars.rows.commit(rows, None, sampled.tokens)
        return StepResult(sampled.tokens, ended, sampled.logprobs, prompts or None, errors)

    def _mask_errors(self, rows: Ints, tokens: Ints, masks: Masks) -> dict[int, str] | None:
        """Why nothing was drawn for rows with a grammar, by place in `rows`."""
        undrawn = masks.index[tokens[masks.index] < 0].tolist()
        return {
            place: self._grammars.rows.error(int(rows[place])) or NOTHING_LEFT for place in undrawn
        } or None

    def _settle_grammars(self, timeout_s: float) -> None:
        """Let requests run whose grammars are compiled, and end those whose cannot be."""
        for request_id, error in self._grammars.settle(timeout_s):
            if error is None:
                self._scheduler.ready(request_id, GRAMMAR_EVENT, self._clock())
                continue
            now = self._clock()
            output = self._scheduler.fail(request_id, error.message, error.code, now)
            if output is not None:
                self._undelivered.append(output)

    def _prompt_logprobs(self, plan: StepPlan, logits: Tensor) -> dict[int, PromptRecords]:
        """Take the prompt rows in; records of the prompts that are complete, by sampling row."""
        complete: dict[int, PromptRecords] = {}
        if plan.all_logits is None:
            return complete
        counts = logits_per_share(plan)
        first = counts.cumsum() - counts
        place = plan.samples.cumsum() - 1
        for share in np.flatnonzero(plan.all_logits).tolist():
            row, start = int(plan.rows[share]), int(plan.q_start[share])
            collected = self._sampler.prompt_logprobs[row]
            prompt_length = int(self._sampler.prompt_lengths[row])
            end = min(start + int(plan.q_len[share]), prompt_length - 1)
            chunk = logits[int(first[share]) : int(first[share]) + end - start]
            following = self._scheduler.tokens[row, start + 1 : end + 1].astype(np.int64)
            collected.put(start, prompt_logprobs(chunk, following, collected.top_count))
            if plan.samples[share]:
                complete[int(place[share])] = collected.records()
        return complete

    # --- set-up and checks -------------------------------------------------------------------

    def _new_scheduler(self) -> Scheduler:
        config, capacity = self.config, self.capacity
        return Scheduler(
            KVManager(
                BlockPool(capacity.num_blocks),
                num_rows=capacity.num_slots,
                max_blocks=capacity.max_blocks,
            ),
            SchedulerLimits(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_waiting=config.max_waiting,
                max_tokens=capacity.max_model_len,
                ageing_steps=config.ageing_steps,
                keep=self.reuse.keep,
            ),
            resume=self.reuse.resume,
            root_key=self.reuse.root,
            hooks=_RowState(self._sampler, self._grammars.rows),
        )

    def _checked(self, request: Request, default_seed: int) -> NewRequest:
        params = request.sampling
        prompt = _token_ids(request.prompt_token_ids, self.spec.vocab_size)
        self._sampler.check(params)
        self._grammars.check(params.grammar)
        eos = () if params.ignore_eos else (self.spec.eos_id,)
        return NewRequest(
            request_id=request.request_id,
            prompt=prompt,
            length_limit=self._length_limit(len(prompt), params),
            stop_ids=tuple({*params.stop_token_ids, *eos}),
            min_tokens=params.min_tokens,
            priority=request.priority,
            choices=params.n,
            all_logits=request.needs_all_rows,
            payload=(request, default_seed if params.seed is None else params.seed),
        )

    def _length_limit(self, prompt_length: int, params: SamplingParams) -> int:
        """Tokens of prompt and output at most."""
        limit = self.max_model_len
        if prompt_length >= limit:
            raise ContextTooLong(
                f"The prompt has {prompt_length} tokens, the limit is {limit} tokens for prompt "
                "and output together.",
                param="prompt",
            )
        if params.max_tokens is None:
            return limit
        if prompt_length + params.max_tokens > limit:
            raise ContextTooLong(
                f"The prompt has {prompt_length} tokens and max_tokens is {params.max_tokens}, "
                f"together {prompt_length + params.max_tokens}; the limit is {limit} tokens.",
                param="max_tokens",
            )
        return prompt_length + params.max_tokens


class _RowState:
    """Keeps the rows of sampler and grammars in step with the scheduler's."""

    def __init__(self, state: SamplerState, grammars: GrammarRows) -> None:
        self._state = state
        self._grammars = grammars

    def admitted(self, row: int, sequence: Sequence, tokens: Tokens) -> None:
        """A row got a sequence: its sampling state is rebuilt from the known tokens."""
        request, seed, ticket = sequence.request.payload
        known: Ints = tokens.astype(np.int64)
        self._state.admit(row, request, choice_seed(seed, sequence.choice), known)
        if ticket is not None:
            output = known[sequence.prompt_length :].tolist()
            self._grammars.admit(row, request.sampling.grammar, ticket.graph, output)

    def released(self, row: int) -> None:
        """The row is free again."""
        self._state.release(row)
        self._grammars.release(row)


def _token_ids(ids: tuple[int, ...], vocab_size: int) -> TokenIds:
    """`ids` as int32 [n]. Raises InvalidRequest naming the position of the first bad id."""
    if len(ids) == 0:
        raise InvalidRequest("The prompt is empty, at least one token is needed.", param="prompt")
    array = np.asarray(ids)
    if (
        array.ndim == 1
        and array.dtype.kind == "i"
        and array.min() >= 0
        and array.max() < vocab_size
    ):
        return array.astype(np.int32)
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
            raise InvalidRequest(
                f"Token {position} of the prompt is {token!r}, token ids are integers.",
                param="prompt",
            )
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"Token {position} of the prompt is {token}, allowed are 0 to {vocab_size - 1}.",
                param="prompt",
            )
    return np.array([int(token) for token in ids], dtype=np.int32)
