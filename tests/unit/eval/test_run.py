from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.core.output import FinishReason, TokenChunk
from headrace.core.request import Request
from headrace.eval import families
from headrace.eval.families import FAMILIES, draw
from headrace.eval.items import FIRST_TEST_SEED, Draw, Item
from headrace.eval.plan import Question, questions
from headrace.eval.run import Examiner
from headrace.kv.resume import ResumeRules
from headrace.recipe.constants import SpecialTokens
from headrace.recipe.tokenizer import Tokenizer
from train.data import Encoder

TOKENIZER = Path(families.__file__).parents[2] / "assets/tiny/tokenizer.json"


class OracleEngine:
    """Answers each request with what `answers` has for it, a few tokens a step."""

    def __init__(self, answers: dict[str, list[int]], room: int = 10**6) -> None:
        self.answers = answers
        self.requests: dict[str, Request] = {}
        self.given: dict[str, int] = {}
        self.room = room
        self.reuse = SimpleNamespace(resume=None)  # no prefix hits
        self.order: list[tuple[str, int]] = []  # (request, how many others ran) as they came

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.given[request.request_id] = 0
        self.order.append((request.request_id, len(self.requests) - 1))

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> Iterable[TokenChunk]:
        chunks = []
        for name, request in list(self.requests.items()):
            start = self.given[name]
            limit = min(request.sampling.max_tokens or 0, self.room)
            tokens = tuple(self.answers[name][start : min(start + 3, limit)])
            self.given[name] += len(tokens)
            finish = None
            if self.given[name] == len(self.answers[name]):
                finish = FinishReason.STOP
            elif self.given[name] >= limit:
                finish = FinishReason.LENGTH
            if finish is not None:
                del self.requests[name]
            chunks.append(TokenChunk(name, start, tokens, finish))
        return chunks


def expected_ids(encoder: Encoder, item: Item) -> list[int]:
    ((ids, weights),) = encoder.items([item])
    last_prompt = max(i for i, weight in enumerate(weights) if not weight)
    return ids[last_prompt + 1 :]


def examiner(engine: OracleEngine) -> Examiner:
    made = Examiner.__new__(Examiner)
    made.model = SimpleNamespace()  # type: ignore[assignment]
    made.tokenizer = Tokenizer(TOKENIZER.read_bytes())
    made.special = SpecialTokens()
    made.engine = engine  # type: ignore[assignment]
    return made


def some(family: str) -> list[Question]:
    return [q for q in questions(family, FIRST_TEST_SEED, 12) if len(str(q.item)) < 20_000]


@pytest.mark.parametrize("family", FAMILIES)
def test_expected_answers_as_tokens_are_right(family: str) -> None:
    asked = some(family)
    encoder = Encoder(TOKENIZER)
    answers = {str(i): expected_ids(encoder, q.item) for i, q in enumerate(asked)}
    progress: list[int] = []
    results = examiner(OracleEngine(answers)).ask(asked, progress.append)
    assert [result.right for result in results] == [True] * len(asked)
    assert all(result.valid in (None, True) for result in results)
    assert sum(progress) == len(asked)
    assert {result.thinking for result in results} == {True, False}


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_that_are_cut_are_wrong(family: str) -> None:
    asked = some(family)
    encoder = Encoder(TOKENIZER)
    answers = {str(i): expected_ids(encoder, q.item) for i, q in enumerate(asked)}
    # In the middle: the parser takes a call whose block alone is not closed.
    cut = {name: [*ids[: len(ids) // 2 - 1], ids[-1]] for name, ids in answers.items()}
    assert not any(result.right for result in examiner(OracleEngine(cut)).ask(asked))


def test_an_answer_that_does_not_end_is_stopped() -> None:
    asked = some("arithmetic")[:1]
    endless = {"0": [300] * 100_000}
    (result,) = examiner(OracleEngine(endless)).ask(asked)
    assert not result.right
    assert result.tokens < 200


def test_the_first_question_about_a_long_text_is_answered_before_the_others_are_asked() -> None:
    items = draw("recall", FIRST_TEST_SEED, Draw(tokens=600, far=True))[:3]
    short = draw("copying", FIRST_TEST_SEED, Draw())[0]
    asked = [Question(item, FIRST_TEST_SEED) for item in (*items, short)]
    encoder = Encoder(TOKENIZER)
    engine = OracleEngine({str(i): expected_ids(encoder, q.item) for i, q in enumerate(asked)})
    engine.reuse.resume = ResumeRules("bounded", keep=135, replay_rows=128, windows_suffice=True)
    assert all(result.right for result in examiner(engine).ask(asked))
    assert engine.order == [("0", 0), ("3", 1), ("1", 0), ("2", 1)]
    # Shorter prompts can hit nothing and wait for nobody.
    asked = [replace(q, item=short) for q in asked]
    engine.answers = {str(i): expected_ids(encoder, short) for i in range(4)}
    engine.order = []
    examiner(engine).ask(asked)
    assert [name for name, _ in engine.order] == ["0", "1", "2", "3"]
