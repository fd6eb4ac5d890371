"""Draws by the two couplings, and what checking drafts adds to drawing rows.

    python bench/sampler.py [--pairs 15] [--out FILE]

gumbel.*: rows of the `gumbel` coupling, the peer is the same rows of `maximal`, which draw by
cumulative mass. verify.*: R requests with five drafts each are verified (6 R rows, drafts drawn
from the same logits with noise of their own), the peer draws as many plain rows of the coupling.
Times are medians in us of CPU time per row, one thread; both sides run in turn, `ratio` is the
median of ours / peer over the pairs, `spread` the smallest and the largest. One JSON line per case.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

from headrace.core.request import Request
from headrace.core.sampling import Coupling, SamplingParams
from headrace.engine.sampler import sample
from headrace.engine.sampling_state import SamplerState
from headrace.engine.speculation.verify import VerifyRows, draft_picker, verify

SHAPES = ((8_192, 1), (8_192, 32), (129_280, 1), (129_280, 8))  # vocabulary, requests
KINDS: dict[str, dict[str, float]] = {"plain": {}, "top_p": {"top_p": 0.9}, "top_k": {"top_k": 40}}
DRAFTS = 5
PROMPT = (1, 2, 3)

Call = Callable[[], object]


def state_of(vocab: int, requests: int, coupling: Coupling, kind: str) -> SamplerState:
    """Requests 1 .. `requests` with three known tokens."""
    state = SamplerState(requests + 1, vocab, eos_id=1)
    for row in range(1, requests + 1):
        params = SamplingParams(temperature=0.8, coupling=coupling, **KINDS[kind])
        state.admit(row, Request(str(row), PROMPT, params), row, np.array(PROMPT, np.int32))
    return state


def logits_of(rows: int, vocab: int) -> torch.Tensor:
    """A few likely ids and a long tail, fp32 [rows, vocab]."""
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 3


def draws(vocab: int, requests: int, coupling: Coupling, kind: str) -> Call:
    """One row per request."""
    state, logits = state_of(vocab, requests, coupling, kind), logits_of(requests, vocab)
    rows, positions = np.arange(1, requests + 1), np.full(requests, len(PROMPT))
    return lambda: sample(logits, state, rows, positions)


def verified(vocab: int, requests: int, coupling: Coupling, kind: str) -> tuple[Call, Call]:
    """Five drafts per request, and as many plain rows."""
    state = state_of(vocab, requests, coupling, kind)
    table, first = np.arange(1, requests + 1), np.full(requests, len(PROMPT))
    logits = logits_of((DRAFTS + 1) * requests, vocab)
    by_place = logits.unflatten(0, (requests, DRAFTS + 1))
    noise = torch.randn(by_place.shape, generator=torch.Generator().manual_seed(2)) * 0.5
    picker = draft_picker(state, table, first)
    ids = [picker(place, by_place[:, place] + noise[:, place]) for place in range(DRAFTS)]
    drafts = torch.stack([*ids, torch.full_like(ids[0], -1)], dim=1).flatten().numpy()
    weights = picker.weights
    if weights is not None:
        weights = torch.nn.functional.pad(weights, (0, 0, 0, 1)).flatten(0, 1)
    rows = VerifyRows(table, first, np.full(requests, DRAFTS + 1), drafts, weights)
    flat = np.repeat(table, DRAFTS + 1)
    positions = np.tile(np.arange(DRAFTS + 1) + len(PROMPT), requests)
    return lambda: verify(logits, state, rows), lambda: sample(logits, state, flat, positions)


def compare(ours: Call, peer: Call, rows: int, pairs: int) -> dict[str, object]:
    """Times per row, and their ratio over `pairs` interleaved turns."""
    ours()
    peer()
    start = time.process_time()
    ours()
    repeats = max(1, int(0.02 / max(1e-6, time.process_time() - start)))
    found = []
    for number in range(pairs):
        # The order alternates: neither side always runs on the other's warm caches.
        order = (ours, peer) if number % 2 == 0 else (peer, ours)
        spent = {call: _cpu_us(call, repeats) / rows for call in order}
        found.append((spent[ours], spent[peer]))
    ratios = [a / b for a, b in found]
    return {
        "ours": round(median(a for a, _ in found), 2),
        "peer": round(median(b for _, b in found), 2),
        "ratio": round(median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "n": pairs,
    }


def _cpu_us(call: Call, repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - start) / repeats * 1e6


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    env = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "unit": "us of CPU time per row",
    }
    lines = []
    for vocab, requests in SHAPES:
        for kind in KINDS:
            sides = [draws(vocab, requests, c, kind) for c in (Coupling.GUMBEL, Coupling.MAXIMAL)]
            cases = {f"gumbel.{kind}.{vocab}.{requests}": (*sides, requests)}
            for coupling in Coupling:
                pair = verified(vocab, requests, coupling, kind)
                rows = requests * (DRAFTS + 1)
                cases[f"verify.{coupling}.{kind}.{vocab}.{requests}"] = (*pair, rows)
            for name, (ours, peer, rows) in cases.items():
                record = {"name": f"sampler.{name}", **compare(ours, peer, rows, options.pairs)}
                lines.append(json.dumps({**record, "env": env}))
                print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
