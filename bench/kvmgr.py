"""Prefix keys and block bookkeeping: headrace's KVManager beside vLLM 0.33.0's KVCacheManager.

    python bench/kvmgr.py [--peer-dir DIR] [--pairs 15] [--out FILE]

For prompts of 4,096 and 131,072 tokens (1,048,576: ours alone) on an empty cache: hash, look up
(what the second request with the same prompt pays), allocate (with binding the computed blocks to
their keys) and free, each per block; and admission (hash to allocation) of a new and of a repeated
prompt, in whole. Sixteen short prompts are taken at once, part by part, a long one alone.

Blocks have 128 tokens here and 64 there; the lines `peer_128` repeat it with 128 there too. `ours`
and `peer` are us per 128 tokens, or us in whole (medians of process CPU time), `ratio` is the
median over the pairs, `spread` its 10 to 90 % range. Ours reads ids from an int32 buffer,
where the engine keeps them, the peer from a list; both copy a prompt once into such a buffer, which
neither figure has in it. `admit_cold_from_list` adds that to ours alone. The sides take turns in
one run, with the peer's default hash (SHA-256 of pickled blocks); see peer_vllm.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer_vllm import DEFAULT_DIR, Peer, VllmKvManager

from headrace.core.hashing import BlockKeys, namespace_key, pack_tokens, root_key, salt_key
from headrace.kv import BlockPool, KVManager

BLOCK = 128
LENGTHS = {"4k": 4096, "128k": 131_072, "1M": 1_048_576}
PARTS = ("hash", "lookup", "allocate", "free")
VOCABULARY = 129280
TURNS = 7  # of each side in a pair, alternating; the median of each side counts
now = time.process_time


class Ours:
    """KVManager with room for `count` prompts of `tokens` tokens, twice."""

    def __init__(self, tokens: int, count: int) -> None:
        blocks = -(-tokens // BLOCK)
        self.pool = BlockPool(2 * count * blocks + 2)
        self.kv = KVManager(self.pool, count + 1, blocks)
        self._root = root_key(namespace_key({"model_id": "bench"}), salt_key(b"", "public"))
        self._generator = np.random.default_rng(0)

    def measure(self, tokens: int, count: int) -> dict[str, float]:
        """CPU seconds of each part for `count` new prompts (cold_*) and for them again (warm_*)."""
        self.pool.evict(self.pool.num_blocks)
        prompts = self._generator.integers(2, VOCABULARY, (count, tokens), dtype=np.int32)
        lists = prompts.tolist()
        begin = now()
        for ids in lists:
            pack_tokens(ids)
        seconds = {"from_list": now() - begin}
        for state in ("cold", "warm"):
            parts = self._admit([ids.data for ids in prompts], tokens)
            seconds |= {f"{state}_{part}": value for part, value in parts.items()}
        return seconds

    def _admit(self, prompts: list[memoryview], tokens: int) -> dict[str, float]:
        kv, rows = self.kv, range(1, len(prompts) + 1)
        keys = [BlockKeys(self._root) for _ in prompts]
        times = [now()]
        for chain, ids in zip(keys, prompts, strict=True):
            chain.cover(ids, tokens)
        times.append(now())
        hits = [min(kv.match(chain.keys), (tokens - 1) // BLOCK) for chain in keys]
        times.append(now())
        for row, chain, hit in zip(rows, keys, hits, strict=True):
            kv.admit(row, tokens, hit, chain.keys)
            kv.bind(row, hit, chain.keys[hit:])
        times.append(now())
        for row in rows:
            kv.release(row)
        times.append(now())
        parts = dict(zip(PARTS, np.diff(times).tolist(), strict=True))
        return parts | {"admission": times[3] - times[0]}


def line(name: str, ours: list[float], peer: list[float] | None, scale: float) -> dict[str, object]:
    """One measurement; `scale` turns seconds into the unit."""
    record: dict[str, object] = {"name": name, "ours": round(median(ours) * scale, 4)}
    if peer is None:
        return record | {"peer": None, "ratio": None, "spread": None, "n": len(ours)}
    ratios = [p / o for o, p in zip(ours, peer, strict=True)]
    return record | {
        "peer": round(median(peer) * scale, 4),
        "ratio": round(median(ratios), 2),
        "spread": np.percentile(ratios, [10, 90]).round(2).tolist(),
        "n": len(ratios),
    }


def compare(
    peer: Peer, length: str, pairs: int, peer_block: int, suffix: str
) -> list[dict[str, object]]:
    """All lines of one prompt length against blocks of `peer_block` tokens there."""
    tokens = LENGTHS[length]
    count = max(1, 65_536 // tokens)
    ours = Ours(tokens, count)
    theirs = VllmKvManager(
        peer,
        num_blocks=2 * count * tokens // peer_block + 2,
        max_len=2 * tokens,
        block_tokens=peer_block,
    )
    samples: list[tuple[dict[str, float], dict[str, float]]] = []
    for pair in range(pairs + 1):
        turns = [
            (ours.measure(tokens, count), theirs.measure(tokens, count, fresh=True))
            for _ in range(TURNS)
        ]
        gc.collect()
        if pair:  # the first is a warm-up
            one, two = zip(*turns, strict=True)
            samples.append((_middle(one), _middle(two)))
    theirs.close()
    per_block = 1e6 / (count * tokens / BLOCK)
    lines = []
    for part in PARTS:
        name = f"{'warm' if part == 'lookup' else 'cold'}_{part}"
        pair_of = [[side[name] for side in sides] for sides in zip(*samples, strict=True)]
        lines.append(line(f"kvmgr.{part}.{length}{suffix}", *pair_of, per_block))
    for state in ("cold", "warm"):
        name = f"{state}_admission"
        pair_of = [[side[name] for side in sides] for sides in zip(*samples, strict=True)]
        lines.append(line(f"kvmgr.admit_{state}.{length}{suffix}", *pair_of, 1e6 / count))
    listed = [one["cold_admission"] + one["from_list"] for one, _ in samples]
    peer_s = [two["cold_admission"] for _, two in samples]
    lines.append(line(f"kvmgr.admit_cold_from_list.{length}{suffix}", listed, peer_s, 1e6 / count))
    return lines


def alone(length: str, runs: int) -> list[dict[str, object]]:
    """Our parts on a prompt that vLLM is not asked for."""
    tokens = LENGTHS[length]
    ours = Ours(tokens, 1)
    samples = [ours.measure(tokens, 1) for _ in range(runs + 1)][1:]
    lines = []
    for part in PARTS:
        name = f"{'warm' if part == 'lookup' else 'cold'}_{part}"
        values = [sample[name] for sample in samples]
        lines.append(line(f"kvmgr.{part}.{length}", values, None, 1e6 / (tokens / BLOCK)))
    values = [sample["cold_admission"] for sample in samples]
    return [*lines, line(f"kvmgr.admit_cold.{length}", values, None, 1e6)]


def _middle(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: median(sample[name] for sample in samples) for name in samples[0]}


def main() -> None:
    """Run all pairs and print one JSON line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-dir", type=Path, default=DEFAULT_DIR)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the lines into this file too")
    arguments = parser.parse_args()
    gc.disable()
    with Peer(arguments.peer_dir) as peer:
        lines = []
        for length in ("4k", "128k"):
            lines += compare(peer, length, arguments.pairs, 64, "")
            lines += compare(peer, length, arguments.pairs, 128, ".peer_128")
        lines += alone("1M", arguments.pairs)
        environment = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            **peer.versions,
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "load": [round(value, 1) for value in os.getloadavg()],
            "unit": "us of CPU time; per 128 tokens, admit_*: per prompt",
        }
    text = "".join(json.dumps(entry | {"env": environment}) + "\n" for entry in lines)
    print(text, end="")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
