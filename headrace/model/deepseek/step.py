"""Indices of one step, computed once and shared by all layers.

From a `Batch` and a `ModelSpec`: rotary angles per row, where each row's window keys lie, which
rows complete a compressed entry and where it is stored, how many entries each row may see.
Positions are absolute and 0-based; an index of -1 means "no key". A batch lies on the host: indices
are computed there and sent to the model's device, so that no step waits for the device to tell it
what it knew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.model.batch import Batch
from headrace.model.spec import ModelSpec, YarnSpec

BLOCK_TOKENS = 128

# Indices are computed in NumPy, where a call on few numbers costs a third of a torch call.
Ints = NDArray[np.int64]


@cache
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


@cache
def _both_frequencies(
    theta: float,
    compress_theta: float,
    dims: int,
    yarn: YarnSpec | None,
    dtype: torch.dtype,
    device: str,
) -> Tensor:
    """Frequencies of layers without and with compression, [dims]."""
    plain = inverse_frequencies(theta, dims, None)
    both = torch.cat((plain, inverse_frequencies(compress_theta, dims, yarn)))
    return both.to(device=device, dtype=dtype)


@cache
def _placed(
    theta: float, dims: int, yarn: YarnSpec | None, dtype: torch.dtype, device: str
) -> Tensor:
    """`inverse_frequencies` on a device, sent once: a step must not wait for what it sends."""
    return inverse_frequencies(theta, dims, yarn).to(device=device, dtype=dtype)


def frequencies_of(spec: ModelSpec, ratio: int, dtype: torch.dtype, device: str) -> Tensor:
    """Of layers of `ratio`, [dims / 2]: 0 is plain RoPE, else YaRN on another base."""
    if ratio == 0:
        return _placed(spec.rope_theta, spec.rope_dim, None, dtype, device)
    return _placed(spec.compress_rope_theta, spec.rope_dim, spec.yarn, dtype, device)


def angles(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """(cos, sin) [T, R, 2] of position * frequency, in `dtype` (fp32, or fp64 in the fp64 mode)."""
    angle = positions.to(dtype).unsqueeze(-1) * frequencies.to(device=positions.device, dtype=dtype)
    return torch.stack((torch.cos(angle), torch.sin(angle)), dim=-1)


@dataclass(frozen=True, slots=True)
class Kept:
    """Chunk rows that stay in a ring: the last ones of each sequence, as many as it holds.

    rows int64 [n], None: all in order; slots, minor int64 [n]: where they lie.
    """

    rows: Tensor | None
    slots: Tensor
    minor: Tensor

    def of(self, values: Tensor) -> Tensor:
        """Those of the chunk's rows [T, ...]."""
        return values if self.rows is None else values[self.rows]


@dataclass(frozen=True, slots=True)
class Span:
    """Sequences with equally many rows, so that their rows form a rectangle.

    sequences int64 [b]; places, rows int64 [b * q_len], on the host and on the device, None: all
    rows in order; end: highest position + 1.
    """

    sequences: Ints
    places: Ints | None
    rows: Tensor | None
    q_len: int
    end: int

    def of(self, values: Tensor) -> Tensor:
        """The span's rows of `values` [T, ...]."""
        return values if self.rows is None else values[self.rows]


@dataclass(frozen=True, slots=True)
class Completed:
    """Compressed entries that this step completes, E of them (padded to a whole row tile).

    tokens int64 [E, span]: rows into (history, chunk) of the tokens pooled into each, -1 = none.
    rows int64 [E]: the row that completes it, None: all rows in order. block, offset int64 [E]:
    where it is stored. rotation: (cos, sin) [E, R, 2] at the group's first token.
    """

    count: int
    tokens: Tensor
    rows: Tensor | None
    block: Tensor
    offset: Tensor
    rotation: Tensor

    def of(self, values: Tensor) -> Tensor:
        """Rows [E, ...] of `values` [T, ...] that complete the entries."""
        return values if self.rows is None else values[self.rows]


@cache
def _no_entries(device: str) -> Completed:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return Completed(0, none, none, none, none, torch.zeros(0, device=device))


@dataclass(slots=True)
class Selection:
    """What flows from index sources to the layers after them, within one step.

    places int64 [T, K]: entry indices ascending, -1 = none. block, offset [T, K]: where they lie.
    candidates: per span, bool [rows, N] or None (no restriction).
    """

    places: Tensor
    block: Tensor
    offset: Tensor
    candidates: list[Tensor | None] = field(default_factory=list)


class Step:
    """Lazily computed indices of one batch; `row_tile` > 1 pads variable row counts to it.

    All tensors lie on `device`: token_ids int64 [T], slots int64 [B] and what the methods give.
    """

    def __init__(
        self,
        spec: ModelSpec,
        batch: Batch,
        dtype: torch.dtype,
        row_tile: int,
        device: str = "cpu",
    ) -> None:
        self.spec = spec
        self.batch = batch
        self.dtype = dtype
        self.row_tile = row_tile
        self.device = device
        on_host = torch.device(device).type == "cpu"
        self._tensor: Callable[[Any], Tensor] = torch.from_numpy if on_host else self._sent
        self.token_ids = batch.token_ids.to(device)
        self.slots = batch.slots.to(device)
        self._positions: Ints = batch.positions.numpy()
        self._sequence: Ints = batch.sequence.numpy()
        self._tables: Ints = batch.block_tables.numpy()
        self._slots: Ints = batch.slots.numpy()
        self._cu = np.zeros(len(batch.q_len) + 1, np.int64)
        np.cumsum(batch.q_len, out=self._cu[1:])
        self.plain, self.compressed = self._rotations()
        self.spans = self._spans()
        # One row per sequence: decode, and nothing else. Their windows are read in the order of the
        # rings, which rounds sums differently: not where rows must be equal in every batch.
        self.single = row_tile == 1 and len(self.spans) == 1 and self.spans[0].q_len == 1
        # Entries of layers that have none.
        self.nothing = torch.empty((batch.total_rows, 0), dtype=torch.int64, device=device)
        self._cached: dict[Any, Any] = {}

    def _sent(self, values: Any) -> Tensor:
        """NumPy values on a device that is not the host."""
        return torch.from_numpy(values).to(self.device)

    def _frequencies(self, ratio: int) -> Tensor:
        return frequencies_of(self.spec, ratio, self.dtype, self.device)

    def _rotations(self) -> tuple[Tensor, Tensor]:
        """(cos, sin) [T, R, 2] of all rows for ratio 0 and for the others."""
        s = self.spec
        both = _both_frequencies(
            s.rope_theta, s.compress_rope_theta, s.rope_dim, s.yarn, self.dtype, self.device
        )
        turn = angles(self.batch.positions.to(self.device), both, self.dtype)
        return turn[:, : len(both) // 2], turn[:, len(both) // 2 :]

    @property
    def total_rows(self) -> int:
        """T."""
        return self.batch.total_rows

    def visible(self, ratio: int) -> Tensor:
        """Entries each row sees, int64 [T]: groups whose last token is not after the row."""
        key = ("visible", ratio)
        if key not in self._cached:
            self._cached[key] = self._tensor(self._visible(ratio))
        found: Tensor = self._cached[key]
        return found

    def _visible(self, ratio: int) -> Ints:
        return (self._positions + 1) // ratio

    # --- rings ---------------------------------------------------------------------------------

    def history(self, reach: int, rows: int) -> tuple[Tensor, Tensor]:
        """(slots, minor) int64 [B, reach] of the `reach` positions before each chunk, in rings of
        `rows` rows. Positions before the start are clamped: no index refers to them."""
        key = ("history", reach, rows)
        if key not in self._cached:
            before = np.maximum(self.batch.q_start[:, None] + np.arange(-reach, 0), 0)
            slots = self.slots[:, None].expand(-1, reach)
            self._cached[key] = slots, self._tensor(before % rows)
        found: tuple[Tensor, Tensor] = self._cached[key]
        return found

    def kept(self, rows: int, *, replayed: bool = True) -> Kept:
        """Chunk rows that stay in rings of `rows` rows.

        replayed: whether replayed rows are stored too (windows are, open compressor rows not).
        """
        key = ("kept", rows, replayed)
        if key not in self._cached:
            self._cached[key] = self._make_kept(rows, replayed)
        found: Kept = self._cached[key]
        return found

    def _make_kept(self, rows: int, replayed: bool) -> Kept:
        batch, positions, sequence = self.batch, self._positions, self._sequence
        kept = positions >= (batch.q_start + batch.q_len - rows)[sequence]
        if not replayed:
            kept &= positions >= batch.write_from[sequence]
        if kept.all():
            return Kept(None, self._tensor(self._slots[sequence]), self._tensor(positions % rows))
        places = np.flatnonzero(kept)
        slots, minor = self._slots[sequence[places]], positions[places] % rows
        return Kept(*map(self._tensor, (places, slots, minor)))

    def recent(self, rows: int) -> Tensor:
        """Window of a `single` step, whose rings of `rows` rows hold each row's own key too.

        int64 [B, rows]: which of the rows [B * rows] of their rings they see, in the order in which
        they lie there, -1 = not visible.
        """
        key = ("recent", rows)
        if key not in self._cached:
            own = self._positions[:, None]
            # Ring row j holds the newest position p <= own with p % rows = j.
            places = own - (own - np.arange(rows)) % rows
            floor = np.maximum(self.batch.window_floor, self._positions - self.spec.window + 1)
            seen = places >= np.maximum(floor, 0)[:, None]
            index = np.arange(places.size).reshape(places.shape)
            if not seen.all():
                index[~seen] = -1
            self._cached[key] = self._tensor(index)
        found: Tensor = self._cached[key]
        return found

    def _window_positions(self) -> tuple[Ints, NDArray[np.bool_]]:
        """Positions [T, W] of each row's window and whether they may be read."""
        places = self._positions[:, None] + np.arange(1 - self.spec.window, 1)
        floor = np.maximum(self.batch.window_floor, 0)[self._sequence]
        return places, places >= floor[:, None]

    @property
    def window_index(self) -> Tensor:
        """int64 [T, W]: rows of (history of W - 1, chunk) in position order, -1 = not visible."""
        if "window" not in self._cached:
            places, seen = self._window_positions()
            found = self._locate(places, self._sequence[:, None], self.spec.window - 1)
            self._cached["window"] = self._tensor(np.where(seen, found, -1))
        index: Tensor = self._cached["window"]
        return index

    def _locate(self, positions: Ints, sequence: Ints, reach: int) -> Ints:
        """Rows of (history [B * reach], chunk [T]) holding these positions of these sequences."""
        after = positions - self.batch.q_start[sequence]  # of the chunk's first row
        total = len(self.batch.q_len) * reach
        in_chunk = total + self._cu[sequence] + after
        return np.where(after >= 0, in_chunk, (sequence + 1) * reach + after)

    def _spans(self) -> list[Span]:
        q_start, q_len = self.batch.q_start, self.batch.q_len
        if len(q_len) and (q_len == q_len[0]).all():
            every = np.arange(len(q_len))
            return [Span(every, None, None, int(q_len[0]), int(q_start.max() + q_len[0]))]
        spans = []
        for length in np.unique(q_len):
            members = np.flatnonzero(q_len == length)
            rows = (self._cu[members][:, None] + np.arange(length)).ravel()
            end = int((q_start[members] + length).max())
            spans.append(Span(members, rows, self._tensor(rows), int(length), end))
        return spans

    # --- compressed entries --------------------------------------------------------------------

    def completed(self, ratio: int, span: int) -> Completed:
        """Entries completed by this step's rows; `span` tokens are pooled into each."""
        key = ("completed", ratio, span)
        if key not in self._cached:
            self._cached[key] = self._make_completed(ratio, span)
        found: Completed = self._cached[key]
        return found

    def _make_completed(self, ratio: int, span: int) -> Completed:
        # The cached entries of replayed rows stay as they are: other requests share them.
        done = self._positions >= self.batch.write_from[self._sequence]
        done &= (self._positions + 1) % ratio == 0
        rows = np.flatnonzero(done)
        if not len(rows):
            return _no_entries(self.device)
        every = len(rows) == len(done)
        positions, sequence = self._positions[rows], self._sequence[rows]
        members = positions[:, None] + np.arange(1 - span, 1)
        tokens = self._locate(members, sequence[:, None], span - 1)
        tokens = np.where(members >= 0, tokens, -1)
        block = self._tables[sequence, positions // BLOCK_TOKENS]
        offset = positions % BLOCK_TOKENS // ratio
        padding = -len(rows) % self.row_tile

        def pad(a: Ints) -> Tensor:
            # Padding entries pool row 0 and land in the reserved block 0.
            return self._tensor(np.pad(a, ((0, padding),) + ((0, 0),) * (a.ndim - 1)))

        tensor = pad if padding else self._tensor
        return Completed(
            count=len(rows) + padding,
            tokens=tensor(tokens),
            rows=None if every and not padding else tensor(rows),
            block=tensor(block),
            offset=tensor(offset),
            rotation=angles(tensor(positions - ratio + 1), self._frequencies(ratio), self.dtype),
        )

    def everything(self, ratio: int) -> Selection:
        """All entries that each row sees."""
        key = ("everything", ratio)
        if key not in self._cached:
            count = max(span.end for span in self.spans) // ratio
            seen = np.arange(count) < self._visible(ratio)[:, None]
            places = np.where(seen, np.arange(count), -1)
            block, offset = self._entry_slots(places, ratio)
            self._cached[key] = Selection(
                self._tensor(places), self._tensor(block), self._tensor(offset)
            )
        everything: Selection = self._cached[key]
        return everything

    def entry_slots(self, places: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        """(block, offset) of each row's entries `places` int64 [T, k]; -1 is kept."""
        if places.device.type != "cpu":
            return self._entry_slots_on_device(places, ratio)
        block, offset = self._entry_slots(places.numpy(), ratio)
        return torch.from_numpy(block), torch.from_numpy(offset)

    def _entry_slots_on_device(self, places: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        """As `_entry_slots`, of places that only the device knows."""
        if "tables" not in self._cached:
            self._cached["tables"] = self._tensor(self._tables), self._tensor(self._sequence)
        tables, sequence = self._cached["tables"]
        per_block = BLOCK_TOKENS // ratio
        absent = places < 0
        known = places.clamp_min(0)
        column = (known // per_block).clamp_max(tables.shape[1] - 1)
        block = tables[sequence.unsqueeze(-1), column].masked_fill(absent, -1)
        return block, (known % per_block).masked_fill(absent, -1)

    def _entry_slots(self, found: Ints, ratio: int) -> tuple[Ints, Ints]:
        """As `entry_slots`, on the host."""
        column, offset = np.divmod(found, BLOCK_TOKENS // ratio)
        # Places of -1 are in column -1, or in one beside the table, and replaced below.
        np.minimum(column, self._tables.shape[1] - 1, out=column)
        block = self._tables[self._sequence[:, None], column]
        absent = found < 0
        if absent.any():
            block[absent] = -1
            offset[absent] = -1
        return block, offset

    def entry_blocks(self, span: Span, ratio: int) -> Tensor:
        """Blocks [b, n] that hold all entries that any row of the span sees, in order."""
        key = ("blocks", ratio, span.q_len)
        if key not in self._cached:
            per_block = BLOCK_TOKENS // ratio
            tables = self._tables[span.sequences]
            columns = np.arange(-(-self.entries(span, ratio) // per_block))
            columns = np.minimum(columns, tables.shape[1] - 1)
            self._cached[key] = self._tensor(tables[:, columns])
        found: Tensor = self._cached[key]
        return found

    def entries(self, span: Span, ratio: int) -> int:
        """Entries that any row of the span sees, in whole tiles."""
        return -(-(span.end // ratio) // self.row_tile) * self.row_tile
