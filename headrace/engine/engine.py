"""The engine: take requests in, run steps, hand tokens out.

Contract: `add` validates and queues, `step` runs a step (plan; rows, model, sampler, drafts on the
executor; commit), `abort` frees at once. A request's tokens do not depend on what runs beside it,
on chunking, preemption, drafts or overlap (docs/decisions/0012-overlapped-loop.md). Blocking,
`step` launches a step and waits for it; overlapped, it launches one and takes the results of the
one before, which the executor thread has run meanwhile. One thread calls it: `LLM` in process, the
engine host in its own process. When a step raises, the requests keep all that they were given;
what was in flight is computed again.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial

import numpy as np

from headrace.config import EngineConfig
from headrace.core.grammar import GrammarSpec
from headrace.core.kv import GroupKind, KVGroupSpec
from headrace.core.protocols import Tokenizer
from headrace.core.request import Request
from headrace.core.rng import choice_seed
from headrace.core.sampling import SamplingParams
from headrace.core.schema.normal import normal_spec
from headrace.core.speculation import Policy
from headrace.engine.capacity import (
    DEFAULT_MEMORY_SHARE,
    DEVICE_MEMORY_SHARE,
    Capacity,
    plan_capacity,
)
from headrace.engine.executor import Executor, Order
from headrace.engine.grammar.service import GRAMMAR_EVENT, GrammarService
from headrace.engine.graphs import DecodeGraphs, DecodingModel
from headrace.engine.inputs import INVARIANT_ROW_MULTIPLE
from headrace.engine.outputs import NOTHING, StepOutput
from headrace.engine.plan import Ints, StepPlan, StepResult, Tokens
from headrace.engine.reuse import Reuse, plan_reuse
from headrace.engine.runner import ModelLike, Runner, SpecLike
from headrace.engine.sampling_state import SamplerState
from headrace.engine.scheduler import NewRequest, Scheduler, SchedulerLimits
from headrace.engine.sequence import Sequence as Choice
from headrace.engine.sequence import TokenIds
from headrace.engine.speculation.controller import Controller
from headrace.engine.speculation.cost import StepCost
from headrace.engine.speculation.drafts import Drafter
from headrace.engine.stats import EngineStats
from headrace.errors import ConfigError, ContextTooLong, InvalidRequest
from headrace.kv.cache import KVCache
from headrace.kv.manager import KVManager
from headrace.kv.pool import BlockPool
from headrace.platforms import CpuPlatform, Platform

__all__ = ["Engine", "EngineStats"]


# Products of narrower models are too small to share: threads that wait for each other cost more
# than they save, on a busy machine thirty times as much.
SMALL_HIDDEN = 1024

# Tokens of one request that a step takes because its grammar forces them; each has a row of logits.
MAX_FORCED = 16

# How long an engine with nothing else to do waits for a grammar, before it looks for commands.
GRAMMAR_WAIT_S = 0.005


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
        drafter: Drafter | None = None,
        cost: StepCost | None = None,
        temperatures: Sequence[float] | float = 1.0,
        platform: Platform | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reserve the cache memory. Raises ConfigError when model, config and memory do not fit.

        tokenizer: for stop strings; without one requests that have some are refused. drafter: who
        drafts; None: nobody, requests that want drafts are refused. cost: of steps, for adaptive
        speculation; None: all drafts are verified. temperatures: what the drafter's features are
        divided by to be confidences, one or one per draft of a block. platform: of the model's
        device, the CPU by default. clock: seconds, monotonic; for waiting times only.
        """
        _check_operators(config, model)
        platform = CpuPlatform() if platform is None else platform
        device = platform.device
        groups = model.kv_groups()
        self.config = config
        self.spec: SpecLike = model.spec
        self.capacity: Capacity = plan_capacity(
            config,
            groups,
            max_position=model.spec.max_position,
            number_bytes=model.numerics.torch_dtype.itemsize,
            available_bytes=platform.memory(device).available_bytes,
            memory_share=DEFAULT_MEMORY_SHARE if device == "cpu" else DEVICE_MEMORY_SHARE,
        )
        self.reuse: Reuse = plan_reuse(config, model.spec, groups, model.numerics)
        self._sampler = SamplerState(
            self.capacity.num_slots,
            model.spec.vocab_size,
            model.spec.eos_id,
            tokenizer,
            deterministic=config.deterministic,
        )
        self._grammars = GrammarService(
            config,
            tokenizer,
            vocab_size=model.spec.vocab_size,
            eos_id=model.spec.eos_id,
            clock=clock,
        )
        self._draft_length = 0 if drafter is None else drafter.length
        _check_rings(groups, self._draft_length)
        self._policy = speculation_policy(config, self._draft_length)
        self._controller = Controller(
            self.capacity.num_slots, self._draft_length, cost, temperatures=temperatures
        )
        self._executor = self._new_executor(model, platform, drafter)
        overlap = device != "cpu" if config.overlap is None else config.overlap
        self._ahead = 1 if overlap else 0  # steps in flight while the next is planned
        # A pool ends its thread when nobody refers to it any longer.
        thread = ThreadPoolExecutor(1, "executor") if overlap else None
        self._submit = run_now if thread is None else thread.submit
        self._in_flight: deque[tuple[StepPlan, Future[StepResult]]] = deque()
        self._changes = _RowChanges(self._executor)
        self._scheduler = self._new_scheduler()
        self._clock = clock
        self._seed = _engine_seed(config)
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
        what the sampler cannot do, a schema that cannot be enforced), ContextTooLong, Overloaded.
        """
        # Numbered from 1: number 0 gives the engine's own seed, whatever came before.
        place = 0 if self.config.deterministic else self._added + 1
        new = self._checked(request, choice_seed(self._seed, place))
        ticket = self._grammars.open(_normal(request.sampling))
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
        return bool(self._undelivered or self._in_flight) or len(self._scheduler) > 0

    def step(self) -> StepOutput:
        """Run one step; entries of all requests that got tokens or ended.

        Empty when idle, and overlapped in the first step after that: its results come with the
        next.
        """
        try:
            output = self._step()
        except BaseException:
            self._recover()
            raise
        # Taken out last: had the step raised, they would still be due.
        ended, self._undelivered = self._undelivered, []
        return StepOutput.concatenated([*ended, output]) if ended else output

    def stats(self) -> EngineStats:
        """Counters of now."""
        return self._scheduler.stats(self._clock())

    # --- one step ----------------------------------------------------------------------------

    def _step(self) -> StepOutput:
        self._settle_grammars(0.0)
        plan = self._scheduler.plan(self._clock())
        if plan is not None:
            self._launch(plan)
        elif not self._in_flight:
            self._settle_grammars(GRAMMAR_WAIT_S)
        if not self._in_flight or (plan is not None and len(self._in_flight) <= self._ahead):
            return NOTHING
        done, result = self._in_flight[0]
        drawn = result.result()
        self._in_flight.popleft()
        return self._scheduler.commit(done, drawn, self._clock())

    def _settle_grammars(self, timeout_s: float) -> None:
        """Let requests run whose grammars are compiled, and end those whose cannot be."""
        for request_id, error in self._grammars.settle(timeout_s):
            if error is None:
                self._scheduler.ready(request_id, GRAMMAR_EVENT, self._clock())
                continue
            now = self._clock()
            output = self._scheduler.fail(request_id, error, now)
            if output is not None:
                self._undelivered.append(output)

    def _launch(self, plan: StepPlan) -> None:
        kv = self._scheduler.kv
        width = int(kv.num_blocks[plan.rows].max(initial=1))
        changes, self._changes.pending = self._changes.pending, []
        order = Order(plan, kv.block_tables[plan.rows, :width], changes)
        self._scheduler.launch(plan)
        self._in_flight.append((plan, self._submit(partial(self._executor.run, order))))

    def _recover(self) -> None:
        """After an error: nothing is in flight, and who was running is computed again."""
        wait([result for _, result in self._in_flight])
        self._in_flight.clear()
        self._scheduler.abandon(self._clock())
        self._executor.reset()
        self._changes.pending = []  # nobody has a row

    # --- set-up and checks -------------------------------------------------------------------

    def _new_executor(
        self, model: ModelLike, platform: Platform, drafter: Drafter | None
    ) -> Executor:
        capacity = self.capacity
        cache = KVCache(
            model.kv_groups(),
            num_blocks=capacity.num_blocks,
            num_slots=capacity.num_slots,
            dtype=model.numerics.torch_dtype,
            device=platform.device,
        )
        invariant = model.numerics.batch_invariant
        threads = self.config.threads or default_threads(model.spec, platform)
        graphs = None
        if wants_graphs(self.config, model, platform) and isinstance(model, DecodingModel):
            graphs = DecodeGraphs(
                model,
                cache,
                platform,
                max_sequences=self.config.max_num_seqs,
                max_rows=1 + self._draft_length,
                max_blocks=capacity.max_blocks,
            )
        return Executor(
            Runner(model, cache, platform, 1 if invariant else threads, graphs),
            self._sampler,
            self._grammars.rows,
            drafter,
            self._controller.confidences,
            num_rows=capacity.num_slots,
            max_tokens=capacity.max_model_len,
            max_forced=MAX_FORCED if self.config.jump_forward else 0,
            max_ngram=model.max_ngram,
            row_multiple=INVARIANT_ROW_MULTIPLE if invariant else 1,
        )

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
            hooks=self._changes,
            controller=self._controller if self._draft_length else None,
        )

    def _checked(self, request: Request, default_seed: int) -> NewRequest:
        params = request.sampling
        prompt = _token_ids(request.prompt_token_ids, self.spec.vocab_size)
        self._sampler.check(params)
        self._grammars.check(_normal(params))
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
            drafts=self._wanted_drafts(params),
            payload=(request, default_seed if params.seed is None else params.seed),
        )

    def _wanted_drafts(self, params: SamplingParams) -> int:
        if params.speculation is None:
            return self._policy.drafts
        policy = Policy.parse(params.speculation, param="speculation", error=InvalidRequest)
        policy.require_length(self._draft_length, param="speculation", error=InvalidRequest)
        return policy.drafts

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


class _RowChanges:
    """What the executor must be told of rows before the next plan, in order."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.pending: list[Callable[[], None]] = []

    def admitted(self, row: int, sequence: Choice, tokens: Tokens) -> None:
        """A row got a sequence: its state is rebuilt from the known tokens."""
        request, seed, ticket = sequence.request.payload
        known: Ints = tokens.astype(np.int64)
        choice = choice_seed(seed, sequence.choice)
        limit, drafts = sequence.request.length_limit, sequence.request.drafts
        graph = None if ticket is None else ticket.graph
        admit = self._executor.admit
        self.pending.append(partial(admit, row, request, choice, known, limit, drafts, graph))

    def released(self, row: int) -> None:
        """The row is free again."""
        self.pending.append(partial(self._executor.release, row))


def run_now(task: Callable[[], StepResult]) -> Future[StepResult]:
    """Like the `submit` of a thread pool, in this thread."""
    future: Future[StepResult] = Future()
    try:
        future.set_result(task())
    except BaseException as error:
        future.set_exception(error)
    return future


def _normal(params: SamplingParams) -> GrammarSpec | None:
    """The grammar of a request, fit for a library. Raises InvalidGrammar."""
    return None if params.grammar is None else normal_spec(params.grammar)


def _check_operators(config: EngineConfig, model: ModelLike) -> None:
    if config.deterministic and not model.numerics.batch_invariant:
        raise ConfigError(
            "engine.deterministic needs a model loaded with batch-invariant operators.",
            param="engine.deterministic",
        )


def wants_graphs(config: EngineConfig, model: ModelLike, platform: Platform) -> bool:
    """Whether decode steps are recorded. Raises ConfigError where they are asked for in vain."""
    if config.graphs is False or (config.graphs is None and platform.device == "cpu"):
        return False
    reason = ""
    if not isinstance(model, DecodingModel):
        reason = "this model has no decode steps of fixed shape"
    elif model.numerics.batch_invariant:
        reason = "batch-invariant steps are cut into tiles of rows"
    elif model.waiting:
        reason = f"the host waits in these operators: {', '.join(model.waiting)}"
    if reason and config.graphs:
        raise ConfigError(f"engine.graphs cannot be used: {reason}.", param="engine.graphs")
    return not reason


def _check_rings(groups: Sequence[KVGroupSpec], draft_length: int) -> None:
    """Raise ConfigError if drafts that are not accepted would overwrite rows still in a window."""
    for group in groups:
        if group.kind is GroupKind.RING and group.rows < group.window + draft_length:
            raise ConfigError(
                f"The drafter makes {draft_length} drafts, but the ring of {group.name!r} has only "
                f"{group.rows - group.window} rows beyond its window of {group.window}.",
                param="engine.draft_length",
            )


def speculation_policy(config: EngineConfig, draft_length: int) -> Policy:
    """What the config says; by default "adaptive" where drafts can be made.

    draft_length: drafts of a block, 0: there is no drafter. Raises ConfigError.
    """
    if config.speculation is None:
        return Policy.parse("adaptive" if draft_length else "off")
    policy = Policy.parse(config.speculation)
    policy.require_length(draft_length)
    return policy


def _engine_seed(config: EngineConfig) -> int:
    if config.seed is not None:
        return config.seed
    return 0 if config.deterministic else secrets.randbits(64)


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
