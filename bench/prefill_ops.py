"""CPU operators of many rows (`ops/cpu/prefill`) beside the reference, and a prompt with both.

    python bench/prefill_ops.py [--pairs 9]

`ours` and `peer` are milliseconds of CPU time on one thread (medians), both sides taking turns in
one process; `ratio` is the median of the pairs (above 1: ours is faster), `spread` its smallest and
largest value. "prompt": the embedded model on a held-out text; there the peer is the same model
with the three operators of the reference. One JSON line per case.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from headrace.assets import embedded_model
from headrace.eval.english import held_out, tail_loss
from headrace.model.loader import load_model
from headrace.ops.cases import Inputs, written_view
from headrace.ops.cpu import prefill
from headrace.ops.numerics import Numerics
from headrace.ops.reference import attention, indexer
from headrace.platforms.cpu import CpuPlatform
from headrace.recipe.tokenizer import Tokenizer

Work = Callable[[], object]


def attention_case(heads: int, width: int, rows: int, top_k: int, seen: int) -> tuple[Work, Work]:
    """A window of 128 and `top_k` of the newest `seen` entries for each row."""
    i = Inputs(1, torch.float32)
    record = "fp4_e4m3_released" if width == 512 else "fp4_e4m3"
    view = written_view(i, record, 17, 128) if top_k else None
    place = i.distinct(rows, top_k, seen)
    index = torch.arange(rows).unsqueeze(-1) + torch.arange(128)
    given = (
        *(i.normal(rows, heads, width), i.normal(rows + 128, width), index, view),
        *(place // 128, place % 128, i.wide(heads), width**-0.5),
    )
    return lambda: prefill.sparse_attention(*given), lambda: attention.sparse_attention(*given)


def indexer_cases(rows: int, keys: int) -> Iterator[tuple[str, Work, Work]]:
    """Scores of 8 heads and the choice of 64 of them."""
    i = Inputs(1, torch.float32)
    given = i.normal(1, rows, 8, 64), i.normal(1, rows, 8), i.normal(1, keys, 64)
    scores = i.normal(rows, keys)
    name = f"{rows} rows, {keys} keys"
    yield (
        f"index_scores, {name}",
        lambda: prefill.index_scores(*given),
        lambda: indexer.index_scores(*given),
    )
    yield (
        f"select_top_k, {name}",
        lambda: prefill.select_top_k(scores, 64),
        lambda: indexer.select_top_k(scores, 64),
    )


def prompt_case(length: int) -> tuple[Work, Work]:
    """The embedded model on `length` tokens of English."""
    ids = [0, *Tokenizer.from_directory(embedded_model()).encode(held_out()[0][1])][:length]
    ours, peer = (load_model(embedded_model(), Numerics("float32")) for _ in range(2))
    peer.ops = replace(
        peer.ops,
        sparse_attention=attention.sparse_attention,
        index_scores=indexer.index_scores,
        select_top_k=indexer.select_top_k,
    )
    return lambda: tail_loss(ours, ids, 16), lambda: tail_loss(peer, ids, 16)


def cases() -> Iterator[tuple[str, Work, Work]]:
    """(name, ours, the reference's)."""
    for heads, width, rows, top_k, seen in (
        (8, 128, 512, 0, 1),
        (8, 32, 512, 64, 300),
        (8, 32, 512, 64, 2000),
        (16, 512, 300, 48, 200),
        (64, 512, 128, 64, 300),
    ):
        name = f"sparse_attention, {rows} rows, {heads} heads of {width}, {top_k} of {seen}"
        yield name, *attention_case(heads, width, rows, top_k, seen)
    yield from indexer_cases(512, 1000)
    yield from indexer_cases(512, 8000)
    for length in (1024, 8192):
        yield f"prompt of {length} tokens", *prompt_case(length)


def milliseconds(work: Work) -> float:
    """CPU time of one call."""
    started = time.process_time()
    work()
    return 1000 * (time.process_time() - started)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    env = {**asdict(CpuPlatform().fingerprint()), "threads": 1, "cores": CpuPlatform().cores()}
    for name, ours, peer in cases():
        ours(), peer()
        count = pairs if "prompt" not in name else max(3, pairs // 3)
        found = [(milliseconds(ours), milliseconds(peer)) for _ in range(count)]
        ratios = [b / a for a, b in found]
        line = {
            "name": name,
            "ours": round(median(a for a, _ in found), 2),
            "peer": round(median(b for _, b in found), 2),
            "unit": "ms of CPU time",
            "ratio": round(median(ratios), 2),
            "spread": [round(min(ratios), 2), round(max(ratios), 2)],
            "n": count,
            "env": env,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
