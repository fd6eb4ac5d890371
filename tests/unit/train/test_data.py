from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.eval import families
from headrace.eval.families import FAMILIES, draw
from headrace.eval.items import FIRST_TEST_SEED, Draw
from headrace.recipe.conversation import UserMessage
from headrace.recipe.render.v41 import render
from headrace.recipe.tokenizer import Tokenizer
from train import data
from train.data import ENGLISH, FULL, SPECIAL, Encoder, Maker, Plan, chained

TOKENIZER = Path(families.__file__).parents[2] / "assets/tiny/tokenizer.json"
PLAN = Plan(length=512, rows=6)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(TOKENIZER)


@pytest.fixture
def english(tmp_path: Path) -> Path:
    path = tmp_path / "english.npz"
    tokens = np.arange(9000, dtype=np.uint16) % 200 + 300
    np.savez_compressed(path, tokens=tokens, starts=np.array([0, 100, 4000, 9000], np.int64))
    return path


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("thinking", [False, True])
def test_an_item_is_the_prompt_of_the_codec_and_the_answer_has_weight(
    encoder: Encoder, family: str, thinking: bool
) -> None:
    tokenizer = Tokenizer(TOKENIZER.read_bytes())
    for seed in range(8):
        for item in draw(family, seed, Draw(thinking, tokens=300)):
            ((ids, weights),) = encoder.items([item])
            prompt = tokenizer.encode_prompt(render(item.conversation, SPECIAL))
            assert ids[: len(prompt)] == prompt
            assert weights[len(prompt) - 1] == 0
            assert set(weights[len(prompt) :]) == {FULL}
            assert ids[-1] == tokenizer.added[SPECIAL.eos]
            answer = tokenizer.decode(ids[len(prompt) :], skip_special=False)
            assert item.answer.content in answer
            assert (item.answer.reasoning_content or "") in answer


def test_earlier_answers_have_weight_and_their_questions_have_none(encoder: Encoder) -> None:
    item = draw("followups", 3, Draw())[-1]
    ((ids, weights),) = encoder.items([item])
    turns = len([m for m in item.conversation.messages if hasattr(m, "tool_calls")])
    starts = [i for i in range(1, len(ids)) if weights[i] and not weights[i - 1]]
    assert turns > 0
    assert len(starts) == turns + 1
    assert all(ids[i - 1] == encoder.added["</think>"] for i in starts)


def test_a_chain_asks_all_questions_and_every_answer_has_weight(encoder: Encoder) -> None:
    for thinking in (False, True):
        items = [draw("arithmetic", seed, Draw(thinking))[0] for seed in range(4)]
        item = chained(items)
        ((ids, weights),) = encoder.items([item])
        tokenizer = Tokenizer(TOKENIZER.read_bytes())
        text = tokenizer.decode([i for i, w in zip(ids, weights, strict=True) if w])
        answers = [item.answer.content for item in items]
        shown = text.split("</think>")[-1] if thinking else text
        assert ("".join(answers) if not thinking else answers[-1]) in shown
        assert sum(isinstance(m, UserMessage) for m in item.conversation.messages) == 4
        assert item.conversation.thinking == thinking
        assert item.check is items[-1].check


def test_batches_depend_on_seed_and_number_alone(english: Path) -> None:
    one = Maker(PLAN, 1, TOKENIZER, english)
    first, second = one.batch(0), one.batch(1)
    again = Maker(PLAN, 1, TOKENIZER, english).batch(1)
    other = Maker(PLAN, 2, TOKENIZER, english).batch(1)
    assert np.array_equal(second.tokens, again.tokens)
    assert np.array_equal(second.weights, again.weights)
    assert not np.array_equal(second.tokens, first.tokens)
    assert not np.array_equal(second.tokens, other.tokens)


def test_documents_begin_aligned_and_count_up(english: Path) -> None:
    batch = Maker(PLAN, 1, TOKENIZER, english).batch(5)
    for row in range(PLAN.rows):
        positions = batch.positions[row].astype(int)
        starts = np.flatnonzero(positions == 0)
        assert starts[0] == 0
        assert not np.any(starts % PLAN.align)
        steps = np.diff(positions)
        assert np.all((steps == 1) | (positions[1:] == 0))
        assert not np.any(batch.weights[row, starts])


def test_families_and_english_fill_the_rows(english: Path) -> None:
    batch = Maker(PLAN, 1, TOKENIZER, english).batch(2)
    assert batch.tokens.shape == (PLAN.rows, PLAN.length)
    found = set(np.unique(batch.families))
    assert ENGLISH in found and len(found) > 4
    of_english = batch.weights[batch.families == ENGLISH]
    assert set(np.unique(of_english)) <= {0, PLAN.english_weight}
    assert np.mean(of_english > 0) > 0.9


def test_no_training_item_is_drawn_from_a_test_seed(
    english: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def recording(family: str, seed: int, options: Draw) -> object:
        seeds.append(seed)
        return draw(family, seed, options)

    monkeypatch.setattr(data, "draw", recording)
    Maker(PLAN, 1, TOKENIZER, english).batch(0)
    assert seeds
    assert all(0 <= seed < FIRST_TEST_SEED for seed in seeds)
    assert len(set(seeds)) == len(seeds)


def test_the_tokenizer_never_merges_digits_and_has_every_control_token() -> None:
    tokenizer = Tokenizer(TOKENIZER.read_bytes())
    assert tokenizer.vocab_size == 8192
    assert len(tokenizer.encode("1234567890")) == 10
    assert TOKENIZER.stat().st_size < 600_000
    for spelling in (SPECIAL.system, SPECIAL.dsml, SPECIAL.image, *SPECIAL.grounding):
        assert spelling in tokenizer.added
