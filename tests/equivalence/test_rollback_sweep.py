"""Verifying drafts leaves the cache as if only the accepted ones had ever been fed.

For every ratio r, every (start mod r, drafts, accepted): all visible rows of all groups, bit for
bit, right after the verification and after one more. A rejected row may lie in a ring, in a state
or in a block, but never where anybody reads it (user report SD-13).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.core.kv import GroupKind, KVGroupSpec
from headrace.engine.inputs import INVARIANT_ROW_MULTIPLE
from headrace.kv.cache import KVCache
from headrace.kv.layout import BLOCK_TOKENS
from headrace.model.batch import Batch, BatchRow
from headrace.model.deepseek.model import Model
from headrace.model.loader import load_model
from headrace.model.tiny import write_tiny
from headrace.ops.numerics import Numerics
from tests.bench_records import write_record

DRAFTS = 5
BACKTRACK = DRAFTS + 1
FIRST = 130  # window and the first group of 128 are full; by default a sequence starts here
TRIALS = [(drafts, kept) for drafts in range(1, DRAFTS + 1) for kept in range(drafts + 1)]
MORE = 2  # drafts of the verification behind
SINGLE = 1  # slot of the sequence that is fed one token at a time


class Bench:
    """A model with one cache: slot 1 is fed one by one, the others are its copies."""

    def __init__(self, directory: Path, starts: int, first: int) -> None:
        numerics = Numerics("float32", kv_quant=True, batch_invariant=True)
        probe = load_model(directory, numerics)
        with_draft = probe.spec.draft is not None
        self.model: Model = load_model(directory, numerics, with_draft=with_draft)
        groups = self.model.spec.kv_groups(True, BACKTRACK)
        names = {group.name for group in self.model.kv_groups()}
        self.groups = [group for group in groups if group.name in names]
        self.first = first
        self.length = first + starts + 2 * BACKTRACK + MORE
        self.width = -(-self.length // BLOCK_TOKENS)
        slots = len(TRIALS) + SINGLE + 1
        self.cache = KVCache(
            self.groups, num_blocks=slots * self.width, num_slots=slots, dtype=torch.float32
        )
        self.cache.poison()
        self.ids = np.random.default_rng(0).integers(0, 512, self.length)

    def table(self, slot: int) -> list[int]:
        return list(range(slot * self.width, (slot + 1) * self.width))

    def feed(self, shares: list[tuple[int, int, np.ndarray]]) -> None:
        """(slot, start, ids [start + n]) of sequences of which the last n rows are fed."""
        rows = [
            BatchRow(ids, start, len(ids) - start, self.table(slot), slot)
            for slot, start, ids in shares
        ]
        total = sum(row.q_len for row in rows)
        if padding := -total % INVARIANT_ROW_MULTIPLE:
            zeros = np.zeros(padding, dtype=np.int64)
            rows.append(BatchRow(zeros, 0, padding, self.table(0), 0, "none"))
        self.model.forward(Batch.build(rows, self.model.max_ngram), self.cache)

    def copy(self, slots: list[int]) -> None:
        """Let these slots be where the single sequence is."""
        self.cache.copy_slots([(SINGLE, slot) for slot in slots])
        pairs = [
            pair
            for slot in slots
            for pair in zip(self.table(SINGLE), self.table(slot), strict=True)
        ]
        self.cache.copy_blocks(pairs)

    def visible(self, slot: int, length: int) -> list[tuple[str, Tensor]]:
        """Rows that a sequence of `length` computed tokens can still read, by group and layer."""
        found = []
        for group in self.groups:
            major, minor = self._places(group, slot, length)
            for layer in group.layers:
                view = self.cache.view(group.name, layer)
                for part in (view.data, view.scales):
                    if part is not None:
                        found.append((f"{group.name} {layer}", part[major, minor].clone()))
        return found

    def _places(self, group: KVGroupSpec, slot: int, length: int) -> tuple[Tensor, Tensor]:
        if group.kind is GroupKind.PAGED:
            tokens = torch.arange(length // group.ratio) * group.ratio
            table = torch.tensor(self.table(slot))
            return table[tokens // BLOCK_TOKENS], tokens % BLOCK_TOKENS // group.ratio
        first = length - group.window
        if group.kind is GroupKind.STATE:
            ratio = int(group.name.rpartition("_c")[2])
            reach = group.rows - BACKTRACK + 1
            assert reach in (ratio, 2 * ratio)
            first = length // ratio * ratio - (reach - ratio)
        else:
            # One more than these drafts need: what `kv_groups` promises to be taken back.
            assert group.rows == group.window + BACKTRACK
        positions = torch.arange(max(first, 0), length)
        return torch.full_like(positions, slot), positions % group.rows

    def check(self, starts: range) -> int:
        """Try everything at these starts; how many trials were made."""
        wanted: dict[int, list[tuple[str, Tensor]]] = {}
        self.feed([(SINGLE, 0, self.ids[: self.first])])
        for length in range(self.first, self.length):
            wanted[length] = self.visible(SINGLE, length)
            self.feed([(SINGLE, length, self.ids[: length + 1])])
        trials = 0
        slots = [SINGLE + 1 + trial for trial in range(len(TRIALS))]
        self.feed([(SINGLE, 0, self.ids[: self.first])])
        at = self.first
        for start in starts:
            for position in range(at, start):
                self.feed([(SINGLE, position, self.ids[: position + 1])])
            at = start
            self.copy(slots)
            rng = np.random.default_rng(start)
            shares = []
            for slot, (drafts, kept) in zip(slots, TRIALS, strict=True):
                ids = self.ids[: start + 1 + drafts].copy()
                ids[start + 1 + kept :] = rng.integers(0, 512, drafts - kept)
                shares.append((slot, start, ids))
            self.feed(shares)
            self._compare(slots, [start + 1 + kept for _, kept in TRIALS], wanted)
            again = [
                (slot, start + 1 + kept, self.ids[: start + 2 + kept + MORE])
                for slot, (_, kept) in zip(slots, TRIALS, strict=True)
            ]
            self.feed(again)
            self._compare(slots, [start + 2 + kept + MORE for _, kept in TRIALS], wanted)
            trials += len(TRIALS)
        return trials

    def _compare(
        self, slots: list[int], lengths: list[int], wanted: dict[int, list[tuple[str, Tensor]]]
    ) -> None:
        for slot, length, trial in zip(slots, lengths, TRIALS, strict=True):
            found = self.visible(slot, length)
            for (name, ours), (_, single) in zip(found, wanted[length], strict=True):
                assert torch.equal(ours.view(torch.uint8), single.view(torch.uint8)), (
                    name,
                    length,
                    trial,
                )


def bench(tmp_path: Path, preset: str, starts: int, first: int = FIRST) -> Bench:
    write_tiny(tmp_path / "model", preset=preset, seed=3)
    return Bench(tmp_path / "model", starts, first)


@pytest.mark.parametrize(("preset", "ratios"), [("tiny-8", {1, 2}), ("v4-tiny", {4, 128})])
def test_every_start_of_the_short_groups(tmp_path: Path, preset: str, ratios: set[int]) -> None:
    """Ratios 1, 2 and 4 completely (4 overlaps), and what 128 does around its border."""
    made = bench(tmp_path, preset, 6)
    assert ratios <= {group.ratio for group in made.groups}
    assert made.check(range(FIRST, FIRST + 5)) == 5 * len(TRIALS)


def test_the_border_of_the_long_groups(tmp_path: Path) -> None:
    first = 2 * BLOCK_TOKENS - 6
    made = bench(tmp_path, "v4-tiny", 8, first)
    assert made.check(range(first, first + 8, 2)) == 4 * len(TRIALS)


@pytest.mark.sweep
def test_every_start_of_the_long_groups(tmp_path: Path) -> None:
    """All 128 starts; the record is docs/bench/rollback.jsonl."""
    made = bench(tmp_path, "v4-tiny", 130)
    trials = made.check(range(FIRST, FIRST + 128))
    assert trials == 128 * len(TRIALS)
    write_record("rollback.jsonl", "rollback-ratio-128", starts=128, equal_trials=trials)
