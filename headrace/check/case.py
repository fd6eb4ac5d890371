"""A golden case on disk, and running a model over it.

A case is a directory with config.json, model.safetensors, inputs.npz, expected.npz, meta.json and
(V4.1) tokenizer.json; format: tests/golden/README.md. `Runner` feeds its token ids to a `Model` in
any chunking with a poisoned cache, so that a read of a row nobody wrote shows up as NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.kv.cache import KVCache
from headrace.kv.layout import BLOCK_TOKENS
from headrace.model.batch import Batch, BatchRow
from headrace.model.deepseek.dspark import Drafts
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from headrace.ops.numerics import Numerics
from headrace.platforms import Platform

_FILES = ("config.json", "inputs.npz", "expected.npz")
_SLOT = 1


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """inputs and expected arrays of one case; `token_ids` int64 [n]. platform: that its models
    are loaded for, None: the CPU."""

    directory: Path
    token_ids: np.ndarray
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    platform: Platform | None = None

    @property
    def name(self) -> str:
        """Directory name."""
        return self.directory.name

    @classmethod
    def open(cls, directory: Path, platform: Platform | None = None) -> GoldenCase:
        """Raises CheckpointError where files are missing or damaged."""
        missing = [name for name in _FILES if not (directory / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{directory} is not a golden case: it lacks {', '.join(missing)}. Unpack the "
                "cases of tests/golden with `python scripts/pack_golden.py unpack DIR`."
            )
        try:
            with np.load(directory / "inputs.npz") as f:
                inputs = {k: f[k] for k in f.files}
            with np.load(directory / "expected.npz") as f:
                expected = {k: f[k] for k in f.files}
            ids = inputs["input_ids"].reshape(-1).astype(np.int64)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{directory}: inputs or expected are damaged: {error}"
            ) from error
        return cls(directory, ids, inputs, expected, platform)

    def load(self, numerics: Numerics, *, with_draft: bool = False) -> Model:
        """The case's model in a numeric mode."""
        return load_model(self.directory, numerics, with_draft=with_draft, platform=self.platform)


@dataclass(slots=True)
class Trace:
    """Observed intermediate results: (what, layer) -> parts over the chunks run, in order."""

    parts: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)

    def __call__(self, what: str, layer: int, value: Tensor) -> None:
        """Take one observed value."""
        self.parts.setdefault((what, layer), []).append(value)

    def value(self, what: str, layer: int) -> np.ndarray:
        """All rows seen so far, [rows, ...]; top-k parts of unequal width are padded with -1."""
        parts = self.parts[what, layer]
        width = max(p.shape[-1] for p in parts)
        if what == "top_k":
            parts = [torch.nn.functional.pad(p, (0, width - p.shape[-1]), value=-1) for p in parts]
        return torch.cat(parts).cpu().numpy()


class Runner:
    """One sequence on one model: a cache, the tokens so far, and where they lie."""

    def __init__(self, model: Model, capacity: int, trace: Trace | None = None) -> None:
        """`capacity`: most tokens it will hold."""
        blocks = -(-capacity // BLOCK_TOKENS)
        self.model = model
        self.cache = KVCache(
            model.kv_groups(),
            num_blocks=blocks + 1,
            num_slots=_SLOT + 1,
            dtype=model.numerics.torch_dtype,
            device=model.device,
        )
        self.cache.poison()
        self._table = list(range(1, blocks + 1))
        self._trace = trace
        self.position = 0

    def run(self, token_ids: np.ndarray, chunks: Sequence[int], logits: str = "all") -> Tensor:
        """Feed the next sum(chunks) tokens of `token_ids` (the whole sequence) -> logits on the
        model's device."""
        out = []
        for length in chunks:
            row = BatchRow(token_ids, self.position, length, self._table, _SLOT, logits)
            batch = Batch.build([row], self.model.max_ngram)
            out.append(self.model.forward(batch, self.cache, self._trace))
            self.position += length
        return torch.cat(out)

    def draft(self, next_id: int) -> Drafts:
        """Draft after the tokens so far, with `next_id` as the next token."""
        return self.model.draft(
            torch.tensor([next_id]),
            torch.tensor([self.position]),
            torch.tensor([_SLOT]),
            self.cache,
        )


def run_case(
    case: GoldenCase, model: Model, chunks: Sequence[int] | None = None, trace: Trace | None = None
) -> np.ndarray:
    """Logits fp64 [n, V] of all positions of a case."""
    total = len(case.token_ids)
    runner = Runner(model, total, trace)
    return runner.run(case.token_ids, chunks or [total]).double().cpu().numpy()


def run_plans(
    case: GoldenCase, model: Model, plans: Mapping[str, Sequence[int]]
) -> dict[str, np.ndarray]:
    """Logits fp64 [n, V] of a case fed by several chunk plans, all in one batch, step by step."""
    total = len(case.token_ids)
    blocks = -(-total // BLOCK_TOKENS)
    cache = KVCache(
        model.kv_groups(),
        num_blocks=blocks * len(plans) + 1,
        num_slots=len(plans) + 1,
        dtype=model.numerics.torch_dtype,
        device=model.device,
    )
    cache.poison()
    left = {name: list(plan) for name, plan in plans.items()}
    slots = {name: number for number, name in enumerate(plans, start=1)}
    position = dict.fromkeys(plans, 0)
    out: dict[str, list[Tensor]] = {name: [] for name in plans}
    while active := [name for name in plans if left[name]]:
        lengths = [left[name].pop(0) for name in active]
        rows = []
        for name, length in zip(active, lengths, strict=True):
            first = (slots[name] - 1) * blocks + 1
            table = list(range(first, first + blocks))
            rows.append(BatchRow(case.token_ids, position[name], length, table, slots[name], "all"))
            position[name] += length
        logits = model.forward(Batch.build(rows, model.max_ngram), cache)
        for name, part in zip(active, torch.split(logits, lengths), strict=True):
            out[name].append(part)
    return {name: torch.cat(parts).double().cpu().numpy() for name, parts in out.items()}


def greedy(case: GoldenCase, model: Model, prompt: int, count: int) -> list[int]:
    """`count` greedy tokens after the first `prompt` ids of the case."""
    ids = np.concatenate((case.token_ids[:prompt], np.zeros(count, dtype=np.int64)))
    runner = Runner(model, prompt + count)
    tokens: list[int] = []
    chunk = prompt
    for place in range(prompt, prompt + count):
        logits = runner.run(ids, [chunk], "last")
        tokens.append(int(logits[0].argmax()))
        ids[place] = tokens[-1]
        chunk = 1
    return tokens
