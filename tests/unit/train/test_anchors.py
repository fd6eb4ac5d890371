"""Anchors and blocks: which tokens are drafted from, what they see, what they shall say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.assets import embedded_model
from headrace.model.spec import ModelSpec
from train.anchors import BlockMaker, sample_anchors
from train.config import make_config
from train.draft_forward import Blocks, draft_spec

TOKENIZER = embedded_model() / "tokenizer.json"
LENGTH = 16


@pytest.fixture(scope="module")
def maker() -> BlockMaker:
    spec = ModelSpec.from_config(make_config(TOKENIZER, draft=True, sliding_window=4))
    return BlockMaker(spec, torch.device("cpu"), torch.float32)


def row() -> tuple[Tensor, Tensor, Tensor]:
    """ids, positions, weights [1, 16]: a document of 10 tokens whose answers are its tokens 2..4
    and 6..9, and one of 6 whose tokens 1..5 are an answer."""
    ids = torch.arange(100, 100 + LENGTH).unsqueeze(0)
    positions = torch.cat((torch.arange(10), torch.arange(6))).unsqueeze(0)
    weights = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1]]).float()
    return ids, positions, weights


def blocks(maker: BlockMaker, *anchors: int) -> Blocks:
    return maker.make(torch.tensor(anchors), *row())


def test_anchors_are_answer_tokens_that_another_one_follows() -> None:
    weights = row()[2]
    found = sample_anchors(weights, 9, torch.Generator().manual_seed(0))
    assert sorted(found.tolist()) == [2, 3, 6, 7, 8, 11, 12, 13, 14]


def test_a_heavier_token_is_drawn_more_often() -> None:
    weights = torch.ones((1, 200))
    weights[:, :100] = 0.25
    generator = torch.Generator().manual_seed(1)
    drawn = torch.cat([sample_anchors(weights, 10, generator) for _ in range(200)])
    share = float((drawn < 100).float().mean())
    assert 0.16 < share < 0.25  # about 0.25 / 1.25, a little more since nothing comes twice


def test_places_count_until_the_answer_ends(maker: BlockMaker) -> None:
    counts = blocks(maker, 2, 7, 9, 11, 14).counts.long().sum(1).tolist()
    # The answer of 2 ends at 4; that of 7 at 9, where the document ends too; 14 ends the row.
    assert counts == [2, 2, 0, 4, 1]


def test_what_does_not_start_in_an_answer_counts_nowhere(maker: BlockMaker) -> None:
    assert not blocks(maker, 1, 5, 10).counts.any()


def test_a_place_beyond_a_gap_does_not_count(maker: BlockMaker) -> None:
    # Tokens 6 and 7 are answers again, but of another turn.
    assert blocks(maker, 3).counts.tolist() == [[True, False, False, False, False]]


def test_labels_follow_what_they_are_drafted_after(maker: BlockMaker) -> None:
    made = blocks(maker, 11)
    assert made.previous.tolist() == [[111, 112, 113, 114, 115]]
    assert made.labels[0, :4].tolist() == [112, 113, 114, 115]
    assert made.source[0, :4].tolist() == [11, 12, 13, 14]
    noise = draft_spec(maker.spec).noise_id
    assert made.ids.tolist() == [[111, noise, noise, noise, noise]]


def test_a_block_sees_the_window_before_it_and_no_other_document(maker: BlockMaker) -> None:
    made = blocks(maker, 2, 8, 11)
    seen = [w[e].tolist() for w, e in zip(made.window, made.exists, strict=True)]
    assert seen == [[0, 1], [4, 5, 6, 7], [10]]


def test_rows_stand_behind_each_other_from_the_anchor_on(maker: BlockMaker) -> None:
    made = blocks(maker, 11)
    assert torch.equal(made.turn, maker.turns(torch.arange(1, 6)))
