"""The synchronous engine: take requests in, run one step at a time, hand tokens out.

Contract: `add` validates and queues, `step` runs one step (plan, batch, model, sampler, commit),
`abort` frees at once. A request's tokens do not depend on what runs beside it, on chunking or on
preemption. One thread calls it: `LLM` in process, the engine host in its own process. Whatever a
step raises leaves the requests as they were before the step.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headrace.config import EngineConfig
from headrace.core.output import TokenChunk
from headrace.core.request import Request
from headrace.core.rng import choice_seed
from headrace.core.sampling import SamplingParams
from headrace.engine.capacity import Capacity, plan_capacity
from headrace.engine.inputs import INVARIANT_ROW_MULTIPLE, build_batch
from headrace.engine.outputs import EngineStats
from headrace.engine.runner import ModelLike, Runner, SpecLike
from headrace.engine.sampler import SamplingRow, sample
from headrace.engine.scheduler import Scheduler, SchedulerLimits, StepPlan
from headrace.engine.sequence import Sequence, TokenIds
from headrace.errors import ContextTooLong, InvalidRequest
from headrace.kv.cache import KVCache
from headrace.kv.manager import KVManager
from headrace.kv.pool import BlockPool, SlotPool
from headrace.platforms import CpuPlatform, Platform

__all__ = ["Engine", "EngineStats"]


# Products of narrower models are too small to share: threads that wait for each other cost more
# than they save, on a busy machine thirty times as much.
SMALL_HIDDEN = 1024


def default_threads(spec: SpecLike, platform: Platform) -> int:
    """Threads of the operators where the config names no number."""
    return 1 if spec.hidden < SMALL_HIDDEN else platform.physical_cores()


@dataclass(frozen=True, slots=True)
class _Checked:
    """A request that passed validation."""

    prompt: TokenIds
    length_limit: int


class Engine:
    """A model with its cache memory and the requests that use them."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelLike,
        *,
        platform: Platform | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reserve the cache memory. Raises ConfigError when model, config and memory do not fit.

        platform: the CPU by default. clock: seconds, monotonic; for waiting times only.
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
        self._scheduler = Scheduler(
            KVManager(BlockPool(self.capacity.num_blocks), SlotPool(self.capacity.num_slots)),
            SchedulerLimits(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_waiting=config.max_waiting,
            ),
        )
        self._clock = clock
        self._seed = secrets.randbits(64) if config.seed is None else config.seed
        self._added = 0
        self._undelivered: list[TokenChunk] = []  # last chunks of aborted requests

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together that one request may have."""
        return self.capacity.max_model_len

    def check(self, request: Request) -> None:
        """Raise what `add` would raise because of the request itself; changes nothing."""
        self._checked(request)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises InvalidRequest (empty prompt, id outside the vocabulary, id of the request in use),
        ContextTooLong, Overloaded.
        """
        checked = self._checked(request)
        params = request.sampling
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= {self.spec.eos_id}
        seed = params.seed
        self._scheduler.enqueue(
            Sequence(
                request_id=request.request_id,
                prompt=checked.prompt,
                sampling=params,
                # Numbered from 1: number 0 would give the engine's own seed.
                seed=choice_seed(self._seed, self._added + 1) if seed is None else seed,
                stop_ids=stop_ids,
                length_limit=checked.length_limit,
            ),
            self._clock(),
        )
        self._added += 1

    def abort(self, request_id: str) -> None:
        """End a request and free all it holds; its last chunk comes with the next `step`.

        An unknown id, or one that has ended, is ignored.
        """
        chunk = self._scheduler.cancel(request_id)
        if chunk is not None:
            self._undelivered.append(chunk)

    def abort_all(self) -> None:
        """End every request."""
        for request_id in self._scheduler.request_ids:
            self.abort(request_id)

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._undelivered) or len(self._scheduler) > 0

    def step(self) -> list[TokenChunk]:
        """Run one step; chunks of all requests that got tokens or ended. [] when idle."""
        chunks: list[TokenChunk] = []
        plan = self._scheduler.plan(self._clock())
        if plan is not None:
            batch = build_batch(plan, max_ngram=self._max_ngram, row_multiple=self._row_multiple)
            logits = self._runner.execute(batch)
            tokens = sample(logits, _sampling_rows(plan))
            chunks = self._scheduler.commit(plan, tokens, self._clock())
        # Taken out last: had the step raised, they would still be due.
        ended, self._undelivered = self._undelivered, []
        return ended + chunks

    def stats(self) -> EngineStats:
        """Counters of now."""
        return self._scheduler.stats(self._clock())

    def _checked(self, request: Request) -> _Checked:
        prompt = _token_ids(request.prompt_token_ids, self.spec.vocab_size)
        params = request.sampling
        for token in params.stop_token_ids:
            if token >= self.spec.vocab_size:
                raise InvalidRequest(
                    f"stop_token_ids holds {token}, allowed are 0 to {self.spec.vocab_size - 1}.",
                    param="stop_token_ids",
                )
        return _Checked(prompt, self._length_limit(len(prompt), params))

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


def _token_ids(ids: tuple[int, ...], vocab_size: int) -> TokenIds:
    """`ids` as int64 [n]. Raises InvalidRequest naming the position of the first bad id."""
    if len(ids) == 0:
        raise InvalidRequest("The prompt is empty, at least one token is needed.", param="prompt")
    array = np.asarray(ids)
    if (
        array.ndim == 1
        and array.dtype.kind == "i"
        and array.min() >= 0
        and array.max() < vocab_size
    ):
        return array.astype(np.int64)
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
    return np.array([int(token) for token in ids], dtype=np.int64)


def _sampling_rows(plan: StepPlan) -> list[SamplingRow]:
    return [
        SamplingRow(
            params=share.sequence.sampling,
            seed=share.sequence.seed,
            position=share.q_start + share.q_len,
        )
        for share in plan.sampling_shares
    ]
