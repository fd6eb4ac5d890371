"""Asks a checkpoint the questions of an evaluation, greedily, and says which answers are right.

Contract: results depend on the checkpoint, the options and the seeds alone (up to the last bits of
sums in a batch). Called by `headrace eval tiny`, in several processes at once, and by `train/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.config import EngineConfig
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.load import loading_threads, numerics_of, warm_up
from headrace.errors import Overloaded
from headrace.eval.ablation import Ablation, ablate
from headrace.eval.plan import Question
from headrace.eval.replies import read_reply
from headrace.model.loader import load_model
from headrace.platforms import CpuPlatform
from headrace.recipe.constants import SpecialTokens
from headrace.recipe.conversation import AssistantMessage
from headrace.recipe.render.v41 import render
from headrace.recipe.tokenizer import Tokenizer

# Longest prompt and answer of the families; the checkpoint must hold as much.
MAX_MODEL_LEN = 8704
_SPARE_TOKENS = 24


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """replay, truncate, dtype, kv_quant: as in EngineConfig, whatever the weights are stored in.

    ablation: what is taken out of the model, if anything. batch: requests computed at once.
    """

    model: Path
    replay: str = "bounded"
    truncate: str | None = None
    ablation: Ablation = Ablation.NONE
    batch: int = 32
    dtype: str = "float32"
    kv_quant: bool = True

    def engine_config(self) -> EngineConfig:
        """The engine that answers."""
        return EngineConfig(
            dtype=self.dtype,
            kv_quant=self.kv_quant,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=self.batch,
            replay=self.replay,
            truncate=self.truncate,
            seed=0,
            speculation="off",  # drafts change no answer; figures stay comparable
        )


@dataclass(frozen=True, slots=True)
class Result:
    """How one question went. valid: None where the family has no weaker check."""

    family: str
    part: str
    thinking: bool
    seed: int
    right: bool
    valid: bool | None
    answer: str
    expected: str
    tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PromptWork:
    """What the prompts of some questions cost, in tokens.

    hit: found in the prefix cache, of all `prompt` tokens. replayed: rows computed again to rebuild
    windows before a hit.
    """

    prompt: int = 0
    hit: int = 0
    replayed: int = 0

    def __add__(self, other: PromptWork) -> PromptWork:
        return PromptWork(
            self.prompt + other.prompt, self.hit + other.hit, self.replayed + other.replayed
        )

    def __sub__(self, other: PromptWork) -> PromptWork:
        return PromptWork(
            self.prompt - other.prompt, self.hit - other.hit, self.replayed - other.replayed
        )


class Examiner:
    """An engine of a checkpoint and what is needed to ask it."""

    def __init__(self, options: EvalOptions) -> None:
        """Raises the errors of a checkpoint and of an engine config."""
        config = options.engine_config()
        # Several processes ask at once: each with a core of its own.
        with loading_threads(options.model, config, CpuPlatform()):
            model = load_model(options.model, numerics_of(config))
        ablate(model, options.ablation)
        warm_up(model)
        self.model = model
        self.tokenizer = Tokenizer.from_directory(options.model)
        self.special = SpecialTokens()
        self.engine = Engine(config, model, tokenizer=self.tokenizer)

    def ask(
        self, questions: Sequence[Question], progress: Callable[[int], None] = lambda done: None
    ) -> list[Result]:
        """Answer all; `progress` is called with the number of newly finished ones.

        Of questions about one long text the first is answered before the others are asked, so that
        they find the text in the prefix cache.
        """
        requests = [self._request(number, question) for number, question in enumerate(questions)]
        waits_for = self._waits_for(questions, requests)
        waiting = list(range(len(questions)))
        answers: list[list[int]] = [[] for _ in questions]
        done: dict[int, Result] = {}
        while waiting or self.engine.has_work():
            for number in [n for n in waiting if waits_for[n] is None or waits_for[n] in done]:
                try:
                    self.engine.add(requests[number])
                except Overloaded:
                    break
                waiting.remove(number)
            before = len(done)
            for chunk in self.engine.step():
                number = int(chunk.request_id)
                answers[number] += chunk.text_tokens
                if chunk.finish is not None:
                    prompt_tokens = len(requests[number].prompt_token_ids)
                    done[number] = self._result(questions[number], answers[number], prompt_tokens)
            if len(done) > before:
                progress(len(done) - before)
        return [done[number] for number in range(len(questions))]

    def _waits_for(
        self, questions: Sequence[Question], requests: Sequence[Request]
    ) -> list[int | None]:
        """Which question each one lets go first; None where it would find nothing in the cache."""
        rules = self.engine.reuse.resume
        first: dict[tuple[int, str, str], int] = {}
        result: list[int | None] = []
        for number, (question, request) in enumerate(zip(questions, requests, strict=True)):
            sample = (question.seed, question.item.family, question.item.part)
            before = first.setdefault(sample, number)
            hits = rules and len(request.prompt_token_ids) >= rules.shortest_prompt
            result.append(before if hits and before != number else None)
        return result

    def prompt_work(self) -> PromptWork:
        """Of all questions asked so far."""
        stats = self.engine.stats()
        hit = stats.prefix_hit_tokens
        return PromptWork(hit + stats.prefix_miss_tokens, hit, stats.replayed_rows)

    def _request(self, number: int, question: Question) -> Request:
        item = question.item
        prompt = self.tokenizer.encode_prompt(render(item.conversation, self.special))
        # A right answer needs no more; one that does not end is wrong anyway.
        room = 2 * self._length(item.answer) + _SPARE_TOKENS
        params = SamplingParams(temperature=0.0, max_tokens=room)
        return Request(str(number), tuple(prompt), params)

    def _length(self, answer: AssistantMessage) -> int:
        calls = "".join(f"{call.name}{call.arguments}" for call in answer.tool_calls or ())
        text = f"{answer.reasoning_content or ''}{answer.content}{calls}"
        markup = 16 + 12 * calls.count(":") if calls else 0
        return len(self.tokenizer.encode(text)) + markup

    def _result(self, question: Question, ids: list[int], prompt_tokens: int) -> Result:
        item = question.item
        reply = read_reply(ids, item.conversation, self.tokenizer, self.special)
        answer = item.answer
        calls = " ".join(f"{call.name}{call.arguments}" for call in answer.tool_calls or ())
        return Result(
            family=item.family,
            part=item.part,
            thinking=item.conversation.thinking,
            seed=question.seed,
            right=item.check(reply),
            valid=None if item.valid is None else item.valid(reply),
            answer=self.tokenizer.decode(ids, skip_special=False),
            expected=f"{answer.content}{calls}",
            tokens=len(ids),
            prompt_tokens=prompt_tokens,
        )
