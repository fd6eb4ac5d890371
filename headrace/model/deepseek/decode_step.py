"""Indices of a decode step of fixed shape, computed on the device from what differs between steps.

`DecodeStep` offers what `step.Step` does, for B sequences of q rows each, without looking at a
number: the same kernels run for every step of a shape, so that they can be captured as a graph.
Rows behind a sequence's own (drafts that it does not have) and sequences of no rows are computed
too; what they store goes to slot 0 and block 0, which nobody owns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from headrace.model.deepseek.step import (
    BLOCK_TOKENS,
    Completed,
    Kept,
    Selection,
    Span,
    Step,
    angles,
    frequencies_of,
)
from headrace.model.spec import ModelSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """int64, all on the model's device: token_ids [B * q], q_start, q_len (at most q), slots and
    window_floor [B], block_tables [B, M]. embedded: rows of the Engram tables, one [B * q, ..] per
    Engram layer, see `Engram.gather`."""

    token_ids: Tensor
    q_start: Tensor
    q_len: Tensor
    slots: Tensor
    window_floor: Tensor
    block_tables: Tensor
    embedded: tuple[Tensor, ...] = ()

    @property
    def rows(self) -> int:
        """q."""
        return self.token_ids.shape[0] // self.q_start.shape[0]


class DecodeStep:
    """As `Step`; dtype: of angles."""

    def __init__(self, spec: ModelSpec, inputs: DecodeInputs, dtype: torch.dtype) -> None:
        self.spec = spec
        self.dtype = dtype
        self.row_tile = 1
        self.device = str(inputs.token_ids.device)
        self.token_ids = inputs.token_ids
        self.slots = inputs.slots
        self.total_rows = inputs.token_ids.shape[0]
        self._inputs = inputs
        self._rows, self._sequences = inputs.rows, inputs.q_start.shape[0]
        place = self._range(self._rows)
        self._positions = (inputs.q_start.unsqueeze(1) + place).flatten()
        self._owned = (place < inputs.q_len.unsqueeze(1)).flatten()
        self._sequence = self._range(self._sequences).repeat_interleave(self._rows)
        self.plain, self.compressed = (self._turn(self._positions, ratio) for ratio in (0, 1))
        self.tokens = inputs.block_tables.shape[1] * BLOCK_TOKENS  # that the tables have room for
        everyone = np.arange(self._sequences)
        self.spans = [Span(everyone, None, None, self._rows, self.tokens)]
        self.single = self._rows == 1
        self.nothing = torch.empty((self.total_rows, 0), dtype=torch.int64, device=self.device)
        self._cached: dict[Any, Any] = {}

    def _range(self, *bounds: int) -> Tensor:
        return torch.arange(*bounds, device=self.device)

    def _turn(self, positions: Tensor, ratio: int) -> Tensor:
        frequencies = frequencies_of(self.spec, ratio, self.dtype, self.device)
        return angles(positions, frequencies, self.dtype)

    def _once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        if key not in self._cached:
            self._cached[key] = make()
        found: T = self._cached[key]
        return found

    def visible(self, ratio: int) -> Tensor:
        """Entries each row sees, int64 [T]: never more than there are, though rows that nobody owns
        may lie behind the tables."""
        most = self.tokens // ratio
        return self._once(
            ("visible", ratio), lambda: ((self._positions + 1) // ratio).clamp_max(most)
        )

    # --- rings ---------------------------------------------------------------------------------

    def history(self, reach: int, rows: int) -> tuple[Tensor, Tensor]:
        """(slots, minor) int64 [B, reach] of the positions before each sequence's rows."""

        def make() -> tuple[Tensor, Tensor]:
            before = self._inputs.q_start.unsqueeze(1) + self._range(-reach, 0)
            return self.slots.unsqueeze(1).expand(-1, reach), before.clamp_min(0) % rows

        return self._once(("history", reach, rows), make)

    def kept(self, rows: int, *, replayed: bool = True) -> Kept:
        """All rows: rings are longer than a sequence's share of a decode step."""

        def make() -> Kept:
            slots = self.slots[self._sequence].where(self._owned, 0)
            return Kept(None, slots, self._positions % rows)

        return self._once(("kept", rows), make)

    def recent(self, rows: int) -> Tensor:
        """Window of a `single` step in the order of the rings, int64 [B, rows]."""

        def make() -> Tensor:
            own = self._positions.unsqueeze(1)
            places = own - (own - self._range(rows)) % rows
            floor = self._inputs.window_floor.maximum(self._positions - self.spec.window + 1)
            seen = places >= floor.clamp_min(0).unsqueeze(1)
            return self._range(places.numel()).view(places.shape).where(seen, -1)

        return self._once(("recent", rows), make)

    @property
    def window_index(self) -> Tensor:
        """int64 [T, W]: rows of (history of W - 1, chunk) in position order, -1 = not visible."""

        def make() -> Tensor:
            places = self._positions.unsqueeze(1) + self._range(1 - self.spec.window, 1)
            floor = self._inputs.window_floor.clamp_min(0)[self._sequence]
            found = self._locate(places, self._sequence.unsqueeze(1), self.spec.window - 1)
            return found.where(places >= floor.unsqueeze(1), -1)

        return self._once(("window",), make)

    def _locate(self, positions: Tensor, sequence: Tensor, reach: int) -> Tensor:
        """Rows of (history [B * reach], chunk [T]) holding these positions of these sequences."""
        after = positions - self._inputs.q_start[sequence]
        in_chunk = self._sequences * reach + sequence * self._rows + after
        return torch.where(after >= 0, in_chunk, (sequence + 1) * reach + after)

    # --- compressed entries --------------------------------------------------------------------

    def completed(self, ratio: int, span: int) -> Completed:
        """As many entries as the rows can complete; those they do not are stored in block 0."""
        return self._once(("completed", ratio, span), lambda: self._completed(ratio, span))

    def _completed(self, ratio: int, span: int) -> Completed:
        each = -(-self._rows // ratio)
        start = self._inputs.q_start.unsqueeze(1)
        places = start + (ratio - 1 - start % ratio) + self._range(each) * ratio
        done = places < start + self._inputs.q_len.unsqueeze(1)
        # Others pool the first row, so that every index is one.
        places = torch.where(done, places, start).flatten()
        sequence = self._range(self._sequences).repeat_interleave(each)
        members = places.unsqueeze(1) + self._range(1 - span, 1)
        tokens = self._locate(members, sequence.unsqueeze(1), span - 1)
        column = (places // BLOCK_TOKENS).clamp_max(self._inputs.block_tables.shape[1] - 1)
        rows = sequence * self._rows + places - self._inputs.q_start[sequence]
        return Completed(
            count=sequence.shape[0],
            tokens=tokens.where(members >= 0, -1),
            rows=None if ratio == 1 else rows,
            block=self._inputs.block_tables[sequence, column].where(done.flatten(), 0),
            offset=places % BLOCK_TOKENS // ratio,
            rotation=self._turn(places - ratio + 1, ratio),
        )

    def everything(self, ratio: int) -> Selection:
        """All entries that each row sees."""

        def make() -> Selection:
            places = self._range(self.tokens // ratio)
            seen = places < self.visible(ratio).unsqueeze(1)
            places = places.expand(self.total_rows, -1).where(seen, -1)
            return Selection(places, *self.entry_slots(places, ratio))

        return self._once(("everything", ratio), make)

    def entry_slots(self, places: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        """(block, offset) of each row's entries `places` int64 [T, k]; -1 is kept."""
        absent, known = places < 0, places.clamp_min(0)
        tables, per_block = self._inputs.block_tables, BLOCK_TOKENS // ratio
        column = (known // per_block).clamp_max(tables.shape[1] - 1)
        block = tables[self._sequence.unsqueeze(1), column].masked_fill(absent, -1)
        return block, (known % per_block).masked_fill(absent, -1)

    def entry_blocks(self, span: Span, ratio: int) -> Tensor:
        """Blocks [B, M] of all sequences, in order."""
        return self._inputs.block_tables

    def entries(self, span: Span, ratio: int) -> int:
        """Entries that the tables have room for."""
        return self.tokens // ratio


# What the layers take.
AnyStep = Step | DecodeStep
