"""The measured side of peer_vllm.py: drives vLLM's v1 scheduler and KV manager without a model.

Runs under the peer's own Python, started by `peer_vllm.Peer`. One JSON object per line comes in on
stdin ({"call": name, ...arguments}), one goes out ({"result": ...} or {"error": text}). All times
are CPU seconds of this process (time.process_time), garbage collection off, inputs built outside.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 129280,
    "max_position_embeddings": 1 << 21,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
VOCABULARY = 129280
now = time.process_time


def kv_config(num_blocks: int, block_tokens: int) -> KVCacheConfig:
    """One group of full attention."""
    spec = FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=64, dtype=torch.float32
    )
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        hash_block_size=block_tokens,
    )


def vllm_config(
    directory: str, *, n: int, max_len: int, block_tokens: int, hash_name: str, asynchronous: bool
) -> VllmConfig:
    """Configuration of an engine with `n` running requests."""
    (Path(directory) / "config.json").write_text(json.dumps(MODEL_CONFIG))
    model = ModelConfig(
        model=directory, skip_tokenizer_init=True, dtype="float32", max_model_len=max_len, seed=0
    )
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(
            block_size=block_tokens,
            gpu_memory_utilization=0.9,
            cache_dtype="auto",
            enable_prefix_caching=True,
            prefix_caching_hash_algo=hash_name,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=n,
            max_num_batched_tokens=max(8192, n),
            max_model_len=max_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=asynchronous,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )


def random_ids(generator: np.random.Generator, count: int) -> list[int]:
    """`count` token ids as Python integers, as vLLM's front end sends them."""
    return generator.integers(2, VOCABULARY, count).tolist()


class SchedulerDriver:
    """Steady decode of n requests with prompts of `prompt_tokens` tokens."""

    def __init__(
        self, n: int, prompt_tokens: int, asynchronous: bool, block_tokens: int, hash_name: str
    ) -> None:
        max_len = prompt_tokens + 4096
        blocks = n * -(-max_len // block_tokens) + 64
        self._directory = tempfile.TemporaryDirectory()
        config = vllm_config(
            self._directory.name,
            n=n,
            max_len=max_len,
            block_tokens=block_tokens,
            hash_name=hash_name,
            asynchronous=asynchronous,
        )
        config.cache_config.num_gpu_blocks = blocks
        kind = AsyncScheduler if asynchronous else Scheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=kv_config(blocks, block_tokens),
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_tokens,
            log_stats=False,
        )
        hash_fn = get_hash_fn_by_name(hash_name)
        init_none_hash(hash_fn)
        hasher = get_request_block_hasher(block_tokens, hash_fn)
        generator = np.random.default_rng(n)
        for i in range(n):
            params = SamplingParams(temperature=0.0, max_tokens=4096, ignore_eos=True)
            params.update_from_generation_config({}, 1)
            self.scheduler.add_request(
                Request(
                    request_id=f"request-{i}",
                    prompt_token_ids=random_ids(generator, prompt_tokens),
                    sampling_params=params,
                    pooling_params=None,
                    block_hasher=hasher,
                )
            )
        self._asynchronous = asynchronous
        self._pending = None
        while any(r.num_computed_tokens < prompt_tokens for r in self.scheduler.requests.values()):
            self._once()
        assert len(self.scheduler.running) == n
        self._once()
        gc.collect()
        gc.freeze()

    def steps(self, count: int) -> list[list[float]]:
        """CPU seconds of (schedule, update_from_output) of `count` steps."""
        return [self._once() for _ in range(count)]

    def _once(self) -> list[float]:
        begin = now()
        planned = self.scheduler.schedule()
        schedule_s = now() - begin
        if self._asynchronous:  # one step in flight: the result of the step before comes now
            planned, self._pending = self._pending, planned
            if planned is None:
                return [schedule_s, 0.0]
        output = self._output(planned)
        begin = now()
        self.scheduler.update_from_output(planned, output)
        return [schedule_s, now() - begin]

    def _output(self, planned) -> ModelRunnerOutput:
        """One drawn token for each request whose prompt is complete, as the runner reports it."""
        ids = list(planned.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = self.scheduler.requests[request_id]
            prefill = request.num_computed_tokens < request.num_prompt_tokens
            sampled.append([] if prefill else [17])
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )


class KvDriver:
    """The KV cache manager alone."""

    def __init__(self, num_blocks: int, block_tokens: int, hash_name: str, max_len: int) -> None:
        hash_fn = get_hash_fn_by_name(hash_name)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(block_tokens, hash_fn)
        self.manager = KVCacheManager(
            kv_cache_config=kv_config(num_blocks, block_tokens),
            max_model_len=max_len,
            scheduler_block_size=block_tokens,
            hash_block_size=block_tokens,
            enable_caching=True,
            log_stats=False,
        )
        self._generator = np.random.default_rng(0)
        self._serial = 0
        gc.collect()
        gc.freeze()

    def measure(self, tokens: int, count: int, fresh: bool) -> dict[str, float]:
        """CPU seconds of each part for `count` new prompts, and for the same prompts again.

        Each part is done for all prompts before the next one, so that one reading of the clock
        covers it. fresh: empty the cache first, so that no allocation evicts.
        """
        if fresh:
            self.manager.reset_prefix_cache()
        prompts = [random_ids(self._generator, tokens) for _ in range(count)]
        seconds = {}
        for state in ("cold", "warm"):
            parts, hits = self._admit(prompts)
            assert (min(hits) > 0) == (max(hits) > 0) == (state == "warm")
            seconds |= {f"{state}_{part}": value for part, value in parts.items()}
        gc.collect()
        return seconds

    def _admit(self, prompts: list[list[int]]) -> tuple[dict[str, float], list[int]]:
        manager, hasher = self.manager, self._hasher
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        requests = []
        for ids in prompts:
            self._serial += 1
            requests.append(Request(f"request-{self._serial}", ids, params, None))
        times = [now()]
        for request in requests:
            request.block_hashes = hasher(request)
        times.append(now())
        found = [manager.get_computed_blocks(request) for request in requests]
        times.append(now())
        for request, (blocks, hit, _) in zip(requests, found, strict=True):
            got = manager.allocate_slots(request, request.num_tokens - hit, hit, blocks)
            assert got is not None
        times.append(now())
        for request in requests:
            manager.free(request)
        times.append(now())
        names = ("hash", "lookup", "allocate", "free")
        parts = dict(zip(names, np.diff(times).tolist(), strict=True))
        return parts | {"admission": times[3] - times[0]}, [hit for _, hit, _ in found]


def serve() -> None:
    """Answer calls until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints must not mix with the answers
    drivers: dict[str, SchedulerDriver | KvDriver] = {}
    answers.write(json.dumps({"result": {"torch": torch.__version__}}) + "\n")
    answers.flush()
    gc.disable()
    for line in sys.stdin:
        call = json.loads(line)
        name, key = call.pop("call"), call.pop("key")
        try:
            result: object = None
            if name == "scheduler":
                drivers[key] = SchedulerDriver(**call)
            elif name == "kv":
                drivers[key] = KvDriver(**call)
            elif name == "drop":
                del drivers[key]
                gc.unfreeze()
                gc.collect()
            else:
                result = getattr(drivers[key], name)(**call)
            answer: dict[str, object] = {"result": result}
        except Exception as error:  # reported to the caller, who raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
