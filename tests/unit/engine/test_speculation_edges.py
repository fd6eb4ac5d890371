"""Drafts at the edges of an answer: nothing is computed behind its end or its last position.

A run of accepted drafts may go past a stop token, a stop string, EOS or the length limit. The
drafter knows the whole text, so that ends fall on every place of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from headrace.config import EngineConfig
from headrace.core.output import FinishReason
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.kv.cache import KVCache
from headrace.model.batch import Batch
from tests.equivalence.speculation import DRAFTS, LetterTokenizer, Oracle, serve
from tests.unit.engine.fakes import EOS, VOCAB, FakeModel

MAX_MODEL_LEN = 64
PROMPT = tuple(np.random.default_rng(3).integers(14, VOCAB, 20).tolist())
FREE = SamplingParams(temperature=1.0, seed=3, ignore_eos=True)
PLACES = range(DRAFTS + 2, 2 * (DRAFTS + 1) + 1)  # of the second run of a perfect drafter


@dataclass
class Watched(FakeModel):
    """Keeps the highest position of each step."""

    last: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        self.last.append(int(batch.positions[batch.slots[batch.sequence] > 0].max()))
        return super().forward(batch, cache)


def engine(model: FakeModel, known: Sequence[Sequence[int]], kind: str, **settings: Any) -> Engine:
    config: dict[str, Any] = {
        "dtype": "float64",
        "kv_quant": False,
        "max_model_len": MAX_MODEL_LEN,
        "num_blocks": 20,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "speculation": "fixed:5",
        **settings,
    }
    drafter = Oracle(kind, DRAFTS, VOCAB, known)
    return Engine(EngineConfig(**config), model, tokenizer=LetterTokenizer(), drafter=drafter)


def free_text(params: SamplingParams = FREE) -> list[int]:
    """What follows the prompt if nothing ends it."""
    made = engine(FakeModel(), (), "wrong", speculation="off", overlap=False)
    return serve(made, [Request("a", PROMPT, params)]).tokens["a", 0]


def ending(how: str, text: list[int], place: int) -> SamplingParams | None:
    """Parameters with which `text` ends at `place`; None: it would end before it."""
    if how == "length":
        return replace(FREE, max_tokens=place + 1)
    if how == "string":
        stop = LetterTokenizer().decode(text[place - 1 : place + 1])
        ends = stop in LetterTokenizer().decode(text[:place])
        return None if ends else replace(FREE, stop=(stop,))
    return None if text[place] in text[:place] else replace(FREE, stop_token_ids=(text[place],))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", ["length", "string", "token"])
def test_an_end_on_every_place_of_a_run(how: str, overlap: bool) -> None:
    """The answer ends there, says why, and no step runs for it afterwards."""
    text = free_text()
    tried = 0
    for place in PLACES:
        params = ending(how, text, place)
        if params is None:
            continue
        model = Watched()
        made = engine(model, [(*PROMPT, *text)], "perfect", overlap=overlap)
        found = serve(made, [Request("a", PROMPT, params)])
        assert found.tokens["a", 0] == text[: place + 1]
        finish, stop = found.ends["a", 0]
        assert finish is (FinishReason.LENGTH if how == "length" else FinishReason.STOP)
        wanted = {"length": None, "string": params.stop, "token": params.stop_token_ids}[how]
        assert stop == (wanted[0] if wanted else None)
        # The prompt and two runs. The executor knows these ends itself, also before a commit.
        assert len(model.last) == 3
        tried += 1
    assert tried >= 3


@pytest.mark.parametrize("overlap", [False, True])
def test_eos_on_every_place_of_a_run(overlap: bool) -> None:
    """EOS is the host's: overlapped, one step more runs in vain."""
    tried = set()
    for seed in range(12):
        params = replace(FREE, seed=seed, logit_bias={EOS: 3.0}, max_tokens=14)
        text = free_text(params)
        if EOS not in text or not (place := text.index(EOS)):
            continue
        made = engine(FakeModel(), [(*PROMPT, *text)], "perfect", overlap=overlap)
        found = serve(made, [Request("a", PROMPT, replace(params, ignore_eos=False))])
        assert found.tokens["a", 0] == text[: place + 1]
        assert found.ends["a", 0] == (FinishReason.STOP, None)
        assert found.last_places["a", 0] == (place - 1) % (DRAFTS + 1)
        tried.add(found.last_places["a", 0])
    assert len(tried) >= 4


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["perfect", "mixed", "wrong"])
def test_no_row_lies_behind_the_last_token_but_one(kind: str, overlap: bool) -> None:
    """The last token needs no row, whether max_tokens or the context limits the answer."""
    text = free_text()
    assert len(PROMPT) + len(text) == MAX_MODEL_LEN
    for count in (*range(1, 9), len(text) - 1, None):
        model = Watched()
        made = engine(model, [(*PROMPT, *text)], kind, overlap=overlap)
        found = serve(made, [Request("a", PROMPT, replace(FREE, max_tokens=count))])
        assert found.tokens["a", 0] == text[:count]
        length = len(PROMPT) + len(text[:count])
        assert max(model.last) == length - 2, count


@pytest.mark.parametrize("policy", ["fixed:5", "adaptive"])
def test_no_plan_keeps_rows_for_drafts_behind_the_end(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = free_text()
    made = engine(FakeModel(), [(*PROMPT, *text)], "wrong", speculation=policy, overlap=False)
    table, checked = made.scheduler._desk.table, []
    launch = made.scheduler.launch

    def seen(plan: Any) -> None:
        assert plan.drafts is not None
        room = table.limit[plan.rows] - table.length[plan.rows]
        assert (plan.drafts.most <= room[: plan.decodes] - 1).all()
        assert plan.total_rows <= plan.q_len.sum() + (room[: plan.decodes] - 1).sum()
        checked.extend(plan.drafts.most.tolist())
        launch(plan)

    monkeypatch.setattr(made.scheduler, "launch", seen)
    serve(made, [Request("a", PROMPT, replace(FREE, max_tokens=9))])
    assert set(checked) == set(range(DRAFTS + 1))
