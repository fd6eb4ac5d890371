"""Tile choices per card: every card gets some, unknown ones the smallest, and none asks twice."""

from __future__ import annotations

import pytest
import torch

from headrace.ops.triton import tiles


def test_unknown_cards_get_the_smallest_tiles():
    for capability in ((8, 6), (8, 9), (12, 1), (13, 0)):
        assert tiles.for_capability(capability) is tiles.SMALLEST
    for row in tiles.CARDS.values():
        assert row.shared_bytes >= tiles.SMALLEST.shared_bytes
        assert all(a <= b for a, b in zip(tiles.SMALLEST.attention, row.attention, strict=True))
        assert set(tiles.SMALLEST.attention_bf16) <= set(row.attention_bf16)


def test_all_choices_are_powers_of_two_where_triton_wants_them():
    for row in tiles.CARDS.values():
        for shape in (row.attention, *row.attention_bf16):
            assert all(n.bit_count() == 1 for n in (shape.heads, shape.keys, shape.warps))
            assert min(shape.heads, shape.keys) >= 16  # what tl.dot takes
        heads = [shape.heads for shape in row.attention_bf16]
        assert heads == sorted(set(heads))
        assert heads[0] == 16


def test_a_card_is_asked_once(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def capability(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 9, 0

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    tiles.of.cache_clear()
    try:
        for index in (0, 1, 0, 1):
            assert tiles.of(torch.device("cuda", index)) is tiles.CARDS[9, 0]
    finally:
        tiles.of.cache_clear()
    assert asked == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert tiles.of(torch.device("cpu")) is tiles.SMALLEST
