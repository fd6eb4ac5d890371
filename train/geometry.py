"""What a packed batch fixes before any weight is used: rotations, visibility, n-gram rows.

Rows of a batch hold several documents; a document's queries see only its own keys. A key is seen by
the queries first[k] <= q <= last[k] of its row, which says window, causality and document borders
at once. Keys of a row are its `length` window keys followed by its compressed entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.model.batch import NO_TOKEN
from headrace.model.deepseek.engram import compress_ngrams
from headrace.model.deepseek.step import angles, inverse_frequencies
from headrace.model.engram_tables import EngramTables
from headrace.model.spec import ModelSpec
from headrace.ops.reference.engram import ngram_rows

BLOCK = 128


@dataclass(frozen=True, slots=True)
class Visibility:
    """first, last int32 [B, K]: the queries that see each key; blocks bool [B, Q/128, K/128]:
    tiles that hold any such pair."""

    first: Tensor
    last: Tensor
    blocks: Tensor

    @classmethod
    def of(cls, first: Tensor, last: Tensor, length: int) -> Visibility:
        """With the tiles worked out."""
        size = min(BLOCK, length)
        tiles = -(-first.shape[1] // size)
        padding = tiles * size - first.shape[1]
        # Keys that nobody sees must not widen a tile.
        dead = first > last
        low = torch.nn.functional.pad(first.masked_fill(dead, length), (0, padding), value=length)
        high = torch.nn.functional.pad(last.masked_fill(dead, -1), (0, padding), value=-1)
        low = low.unflatten(1, (tiles, size)).amin(-1).unsqueeze(1)
        high = high.unflatten(1, (tiles, size)).amax(-1).unsqueeze(1)
        start = torch.arange(0, length, size, device=first.device).view(1, -1, 1)
        return cls(first.contiguous(), last.contiguous(), (low < start + size) & (high >= start))

    def mask(self, rows: Tensor) -> Tensor:
        """bool [B, R, K]: what the queries `rows` [R] see."""
        q = rows.view(1, -1, 1)
        return (q >= self.first.unsqueeze(1)) & (q <= self.last.unsqueeze(1))


@dataclass(slots=True)
class Geometry:
    """ids int64 [B, S]; plain, compressed: turns [B * S, R, 2] of layers without and with entries;
    entry_turns: of each ratio's entries; window: [B, S] visibility by (is a consumer layer);
    views: visibility of window keys and entries by (ratio, is a consumer layer);
    hashed: table rows int64 [B * S, columns] by Engram layer."""

    ids: Tensor
    plain: Tensor
    compressed: Tensor
    entry_turns: dict[int, Tensor]
    views: dict[tuple[int, bool], Visibility]
    hashed: dict[int, Tensor]
    masks: dict[tuple[int, bool], object] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, length)."""
        return self.ids.shape[0], self.ids.shape[1]


@dataclass(frozen=True, slots=True)
class Cuts:
    """Random borders that window keys cannot be seen across, int64 [B, S] (position in the row of
    the border that lies next at or after each place; `length` where there is none).

    replay: for all layers (a prefix hit rebuilds windows from there); truncation: for consumer
    layers (the prompt's earlier rows never ran through them)."""

    replay: Tensor
    truncation: Tensor


class GeometryMaker:
    """Builds the `Geometry` of batches on one device."""

    def __init__(
        self, spec: ModelSpec, tables: EngramTables | None, device: torch.device, wide: torch.dtype
    ) -> None:
        self.spec = spec
        self.device = device
        self.wide = wide
        self.frequencies = {
            False: inverse_frequencies(spec.rope_theta, spec.rope_dim, None).to(device),
            True: inverse_frequencies(spec.compress_rope_theta, spec.rope_dim, spec.yarn).to(
                device
            ),
        }
        self.tables = tables
        if tables is not None:
            self.token_map = torch.from_numpy(tables.token_map).long().to(device)

    def make(self, ids: Tensor, positions: Tensor, cuts: Cuts | None = None) -> Geometry:
        """ids, positions (within the document) int64 [B, S]."""
        rows, length = ids.shape
        flat = positions.reshape(-1)
        place = torch.arange(length, device=self.device).expand(rows, length)
        start = place - positions
        end = self._ends(positions, place)
        entry_turns, views = {}, {}
        for ratio in sorted({layer.ratio for layer in self.spec.layers}):
            if ratio:
                entry_turns[ratio] = self._turns(positions[:, ::ratio].reshape(-1), True)
            for consumer in (False, True):
                views[ratio, consumer] = self._view(ratio, consumer, place, end, cuts)
        return Geometry(
            ids=ids,
            plain=self._turns(flat, False),
            compressed=self._turns(flat, True),
            entry_turns=entry_turns,
            views=views,
            hashed=self._hashed(ids, place, start),
        )

    def _turns(self, positions: Tensor, compressed: bool) -> Tensor:
        return angles(positions, self.frequencies[compressed], self.wide)

    @staticmethod
    def _ends(positions: Tensor, place: Tensor) -> Tensor:
        """Last place of the document of each place."""
        length = positions.shape[1]
        starts = torch.where(positions == 0, place, length)
        following = torch.nn.functional.pad(starts[:, 1:], (0, 1), value=length)
        return following.flip(1).cummin(1).values.flip(1) - 1

    def _view(
        self, ratio: int, consumer: bool, place: Tensor, end: Tensor, cuts: Cuts | None
    ) -> Visibility:
        last = torch.minimum(place + self.spec.window - 1, end)
        if cuts is not None:
            border = cuts.replay
            if consumer:
                border = torch.minimum(border, cuts.truncation)
            last = torch.minimum(last, torch.where(border > place, border - 1, last))
        first = place
        if ratio:
            entry_first = place[:, ratio - 1 :: ratio]
            first = torch.cat((first, entry_first), dim=1)
            last = torch.cat((last, end[:, ::ratio]), dim=1)
        return Visibility.of(first.int(), last.int(), place.shape[1])

    def _hashed(self, ids: Tensor, place: Tensor, start: Tensor) -> dict[int, Tensor]:
        engram, tables = self.spec.engram, self.tables
        if engram is None or tables is None:
            return {}
        back = place.unsqueeze(-1) - torch.arange(engram.max_ngram, device=self.device)
        gathered = ids.gather(1, back.clamp_min(0).flatten(1)).view(back.shape)
        ngrams = torch.where(back >= start.unsqueeze(-1), gathered, NO_TOKEN).flatten(0, 1)
        compressed = compress_ngrams(ngrams, self.token_map, tables.pad)
        result = {}
        for number, layer in enumerate(engram.layers):
            constants = (
                torch.from_numpy(part[number]).to(self.device)
                for part in (tables.multipliers, tables.primes, tables.offsets)
            )
            result[layer] = ngram_rows(compressed, *constants)
        return result


def random_cuts(positions: Tensor, share: tuple[float, float], generator: torch.Generator) -> Cuts:
    """Borders in about `share` (replay, truncation) of the stretches of 256 places."""
    rows, length = positions.shape
    borders = []
    for wanted in share:
        stretch = 256
        count = -(-length // stretch)
        drawn = torch.rand((2, rows, count), generator=generator).to(positions.device)
        begins = torch.arange(count, device=positions.device) * stretch
        at = begins + (drawn[0] * stretch).long()
        at = torch.where(drawn[1] < wanted, at, length).clamp_max(length)
        marks = torch.full((rows, length + 1), length, device=positions.device)
        marks.scatter_(1, at, at)
        following = torch.nn.functional.pad(marks[:, 1:length], (0, 1), value=length)
        borders.append(following.flip(1).cummin(1).values.flip(1))
    return Cuts(*borders)
