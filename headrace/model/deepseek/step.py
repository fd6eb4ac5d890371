"""Indices of one step, computed once and shared by all layers.

From a `Batch` and a `ModelSpec`: rotary angles per row, where each row's window keys lie, which
rows complete a compressed entry and where it is stored, how many entries each row may see.
Positions are absolute and 0-based; an index of -1 means "no key".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.model.batch import Batch
from headrace.model.spec import ModelSpec, YarnSpec

BLOCK_TOKENS = 128


def inverse_frequencies(theta: float, dims: int, yarn: YarnSpec | None) -> Tensor:
    """Rotary frequencies fp32 [dims / 2]; YaRN only blends them, without a magnitude factor."""
    frequency = theta ** -(torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    if yarn is None:
        return frequency

    def correction(rotations: float) -> float:
        span = yarn.original_max_position / (rotations * 2 * math.pi)
        return dims * math.log(span) / (2 * math.log(theta))

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn.beta_slow)), dims - 1)
    ramp = (torch.arange(dims // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    ramp = ramp.clamp(0, 1)
    return frequency / yarn.factor * ramp + frequency * (1 - ramp)


def angles(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R] of position * frequency, in `dtype` (fp32, or fp64 in the fp64 mode)."""
    angle = positions.to(dtype).unsqueeze(-1) * frequencies.to(dtype)
    return torch.cos(angle), torch.sin(angle)


@dataclass(frozen=True, slots=True)
class History:
    """Rows of the last `reach` positions before each sequence's chunk, then the chunk's own rows.

    slots, minor int64 [B, reach]: where they lie in the ring. write_rows int64 [n]: chunk rows that
    stay in the ring (the last `rows` of each sequence), write_slots / write_minor: where.
    """

    reach: int
    slots: Tensor
    minor: Tensor
    write_rows: Tensor
    write_slots: Tensor
    write_minor: Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Sequences with equally many rows, so that their rows form a rectangle.

    sequences int64 [b]; rows int64 [b * q_len]; entries: most entries that any of the rows sees
    (per ratio: `entries_for`).
    """

    sequences: Tensor
    rows: Tensor
    q_len: int
    end: int  # highest position + 1


@dataclass(frozen=True, slots=True)
class Completed:
    """Compressed entries that this step completes, E of them (padded to a whole row tile).

    tokens int64 [E, span]: rows into (history, chunk) of the tokens pooled into each, -1 = none.
    rows int64 [E]: the row that completes it. block, offset int64 [E]: where it is stored.
    positions int64 [E]: of the group's first token.
    """

    tokens: Tensor
    rows: Tensor
    block: Tensor
    offset: Tensor
    positions: Tensor


class Step:
    """Lazily computed indices of one batch; `row_tile` > 1 pads variable row counts to it."""

    def __init__(self, spec: ModelSpec, batch: Batch, dtype: torch.dtype, row_tile: int) -> None:
        self.spec = spec
        self.batch = batch
        self.dtype = dtype
        self.row_tile = row_tile
        self._write_from = torch.from_numpy(batch.write_from)
        self._cu = np.concatenate(([0], np.cumsum(batch.q_len)))
        self.plain = self.rotation(batch.positions, 0)
        self.compressed = self.rotation(batch.positions, 1)
        self.window_index = self._window_index()
        self.spans = self._spans()
        self._histories: dict[tuple[int, int, bool], History] = {}
        self._completed: dict[tuple[int, int], Completed] = {}

    def rotation(self, positions: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        """cos, sin [n, R] for a layer of `ratio` (0: plain RoPE, else YaRN on the other base)."""
        s = self.spec
        theta, yarn = (s.rope_theta, None) if ratio == 0 else (s.compress_rope_theta, s.yarn)
        return angles(positions, inverse_frequencies(theta, s.rope_dim, yarn), self.dtype)

    def visible(self, ratio: int) -> Tensor:
        """Entries each row sees, int64 [T]: groups whose last token is not after the row."""
        return (self.batch.positions + 1) // ratio

    def history(self, reach: int, rows: int, *, replayed: bool = True) -> History:
        """Index of the `reach` positions before each chunk in rings of `rows` rows.

        replayed: whether replayed rows are stored too (windows are, open compressor rows not).
        """
        key = (reach, rows, replayed)
        if key not in self._histories:
            self._histories[key] = self._make_history(reach, rows, replayed)
        return self._histories[key]

    def _make_history(self, reach: int, rows: int, replayed: bool) -> History:
        batch = self.batch
        before = torch.from_numpy(batch.q_start).unsqueeze(-1) - reach + torch.arange(reach)
        ends = torch.from_numpy(batch.q_start + batch.q_len)[batch.sequence]
        kept = torch.where(batch.positions >= ends - rows)[0]
        if not replayed:
            kept = kept[batch.positions[kept] >= self._write_from[batch.sequence[kept]]]
        return History(
            reach=reach,
            slots=batch.slots.unsqueeze(-1).expand(-1, reach),
            # Positions before the start are clamped: no index refers to them.
            minor=before.clamp_min(0) % rows,
            write_rows=kept,
            write_slots=batch.slots[batch.sequence[kept]],
            write_minor=batch.positions[kept] % rows,
        )

    def _locate(self, positions: Tensor, sequence: Tensor, reach: int) -> Tensor:
        """Rows of (history [B * reach], chunk [T]) holding these positions of these sequences."""
        q_start = torch.from_numpy(self.batch.q_start)[sequence]
        cu = torch.from_numpy(self._cu[:-1])[sequence]
        total = len(self.batch.q_len) * reach
        in_chunk = total + cu + positions - q_start
        in_history = sequence * reach + positions - (q_start - reach)
        return torch.where(positions >= q_start, in_chunk, in_history)

    def _window_index(self) -> Tensor:
        """int64 [T, W]: rows of (history of W - 1, chunk) in position order, -1 = not visible."""
        batch, width = self.batch, self.spec.window
        positions = batch.positions.unsqueeze(-1) - width + 1 + torch.arange(width)
        sequence = batch.sequence.unsqueeze(-1).expand(-1, width)
        floor = torch.from_numpy(batch.window_floor)[sequence].clamp_min(0)
        found = self._locate(positions, sequence, width - 1)
        return torch.where(positions >= floor, found, -1)

    def _spans(self) -> list[Span]:
        spans = []
        for length in np.unique(self.batch.q_len):
            members = np.flatnonzero(self.batch.q_len == length)
            rows = (self._cu[members][:, None] + np.arange(length)).reshape(-1)
            spans.append(
                Span(
                    sequences=torch.from_numpy(members),
                    rows=torch.from_numpy(rows),
                    q_len=int(length),
                    end=int((self.batch.q_start[members] + length).max()),
                )
            )
        return spans

    def completed(self, ratio: int, span: int) -> Completed:
        """Entries completed by this step's rows; `span` tokens are pooled into each."""
        key = (ratio, span)
        if key not in self._completed:
            self._completed[key] = self._make_completed(ratio, span)
        return self._completed[key]

    def _make_completed(self, ratio: int, span: int) -> Completed:
        batch = self.batch
        # The cached entries of replayed rows stay as they are: other requests share them.
        fresh = batch.positions >= self._write_from[batch.sequence]
        rows = torch.where(((batch.positions + 1) % ratio == 0) & fresh)[0]
        padding = -len(rows) % self.row_tile
        positions = batch.positions[rows]
        sequence = batch.sequence[rows]
        members = positions.unsqueeze(-1) - span + 1 + torch.arange(span)
        wide_sequence = sequence.unsqueeze(-1).expand(-1, span)
        tokens = self._locate(members, wide_sequence, span - 1)
        tokens = torch.where(members >= 0, tokens, -1)
        block = batch.block_tables[sequence, positions // BLOCK_TOKENS]
        offset = positions % BLOCK_TOKENS // ratio

        def pad(t: Tensor) -> Tensor:
            # Padding entries pool row 0 and land in the reserved block 0.
            return torch.nn.functional.pad(t, (0, 0) * (t.ndim - 1) + (0, padding))

        return Completed(
            pad(tokens), pad(rows), pad(block), pad(offset), pad(positions - ratio + 1)
        )

    def entry_slots(self, places: Tensor, rows: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        """(block, offset) of entries `places` [n, k] of the sequences of `rows` [n]; -1 is kept."""
        tokens = places.clamp_min(0) * ratio
        tables = self.batch.block_tables
        sequence = self.batch.sequence[rows].unsqueeze(-1).expand_as(places)
        block = tables[sequence, (tokens // BLOCK_TOKENS).clamp_max(tables.shape[1] - 1)]
        block = torch.where(places >= 0, block, -1)
        return block, torch.where(places >= 0, tokens % BLOCK_TOKENS // ratio, -1)

    def entry_rows(self, span: Span, ratio: int) -> tuple[Tensor, Tensor]:
        """(block, offset) [b, N] of all entries 0..N-1 that any row of the span sees."""
        count = span.end // ratio
        if self.row_tile > 1:
            count = -(-count // self.row_tile) * self.row_tile
        tokens = torch.arange(count) * ratio
        tables = self.batch.block_tables[span.sequences]
        columns = (tokens // BLOCK_TOKENS).clamp_max(tables.shape[1] - 1)
        offset = (tokens % BLOCK_TOKENS // ratio).expand(len(span.sequences), -1)
        return tables[:, columns], offset
