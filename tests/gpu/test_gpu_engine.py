"""The engine on a card: the embedded model's greedy tokens, and all that a request may ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.assets import embedded_model
from headrace.config import EngineConfig
from headrace.core.output import FinishReason, RequestOutput
from headrace.core.sampling import Coupling, LogprobsMode, SamplingParams
from headrace.engine import load
from headrace.engine.llm import LLM
from headrace.eval.families import FAMILIES
from headrace.eval.items import FIRST_TEST_SEED
from headrace.eval.plan import questions
from headrace.model.tiny import write_tiny
from headrace.platforms import CpuPlatform, Platform
from headrace.recipe.constants import SpecialTokens
from headrace.recipe.render.v41 import render
from headrace.recipe.tokenizer import Tokenizer

pytestmark = pytest.mark.gpu

PROMPTS = 200
# Where the two best logits are closer than this, rounding may choose.
CLOSE = 0.05
Ask = Callable[..., list[RequestOutput]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, rehearsed: bool) -> Ask:
    """Answers of an engine of its own."""

    def run(
        platform: Platform,
        folder: Path,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | list[SamplingParams],
        **settings: Any,
    ) -> list[RequestOutput]:
        monkeypatch.setattr(load, "choose_platform", lambda *_, **__: platform)
        settings = {"dtype": "float32", "seed": 1, "max_model_len": 1024, **settings}
        if rehearsed:
            settings["overlap"] = False
        with LLM(folder, EngineConfig(**settings)) as llm:
            return llm.generate(prompts, params)

    return run


def embedded_prompts(count: int) -> list[list[int]]:
    """Of tasks that the embedded model knows, all families but the long ones."""
    tokenizer, special = Tokenizer.from_directory(embedded_model()), SpecialTokens()
    families = [name for name in FAMILIES if name != "recall"]
    each = -(-count // len(families))
    prompts = [
        tokenizer.encode_prompt(render(question.item.conversation, special))
        for name in families
        for question in questions(name, FIRST_TEST_SEED, each)[:each]
    ]
    return [list(ids) for ids in prompts[:count]]


def test_greedy_tokens_are_those_of_the_cpu(card: Platform, ask: Ask, rehearsed: bool):
    """A first difference only where the two best logits are close."""
    prompts = embedded_prompts(2 if rehearsed else PROMPTS)
    assert len(prompts) == (2 if rehearsed else PROMPTS)
    params = SamplingParams(temperature=0.0, max_tokens=3 if rehearsed else 64, logprobs=2)
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    found = ask(card, embedded_model(), prompts, params, **settings)
    expected = ask(CpuPlatform(), embedded_model(), prompts, params, **settings)
    wrong, differing = [], 0
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert theirs.logprobs is not None
        pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            assert len(ours.token_ids) == len(theirs.token_ids)
            continue
        best, second = theirs.logprobs[first].top_logprobs[:2]
        differing += 1
        if best - second >= CLOSE:
            wrong.append(f"prompt {number}, token {first}: gap {best - second:.3g}")
    assert not wrong, "\n".join(wrong)
    assert differing <= PROMPTS // 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "m"
    write_tiny(folder, preset="tiny-8", seed=1)
    return folder


def random_prompts(count: int, length: int) -> list[list[int]]:
    return np.random.default_rng(3).integers(3, 500, (count, length)).tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 33},
        {"speculation": "fixed:3"},
        {"speculation": "adaptive"},
        {"prefix_cache": False},
    ],
    ids=["alone", "chunked", "fixed", "adaptive", "cold"],
)
def test_fp64_tokens_do_not_depend_on_how_they_are_computed(
    card: Platform, ask: Ask, tiny: Path, rehearsed: bool, settings: dict[str, Any]
):
    """fp64 leaves no ties to rounding, so that one choice of steps must give what another gives."""
    exact = {"dtype": "float64", "kv_quant": False, "replay": "exact", "speculation": "off"}
    prompts = random_prompts(2 if rehearsed else 6, 20 if rehearsed else 150)
    prompts.append([*prompts[0][:-4], 7, 8])  # a hit where blocks are kept
    tokens = 3 if rehearsed else 40
    params = [
        SamplingParams(temperature=t, seed=5, max_tokens=tokens, ignore_eos=True)
        for t in (0.0, 1.0)
    ]
    each = [params[number % 2] for number in range(len(prompts))]
    base = {"max_num_seqs": 32, "max_num_batched_tokens": 512, **exact}
    expected = ask(card, tiny, prompts, each, **base)
    found = ask(card, tiny, prompts, each, **{**base, **_fitting(settings)})
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]


def _fitting(settings: dict[str, Any]) -> dict[str, Any]:
    rows = settings.get("max_num_batched_tokens", 512)
    return {"max_num_seqs": min(32, rows), **settings}


SAMPLING = [
    {"top_k": 5, "top_p": 0.9, "min_p": 0.02, "n": 2, "logprobs": 3},
    {"seed": 7, "logprobs": 1, "logprobs_mode": LogprobsMode.PROCESSED},
    {"seed": 8, "coupling": Coupling.MAXIMAL, "top_p": 0.5},
    {"seed": 9, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    {"logit_bias": {5: 3.0}, "banned_token_ids": (6, 7), "min_tokens": 3, "prompt_logprobs": 1},
    {"allowed_token_ids": (8, 9, 10), "temperature": 0.0},
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("speculation", ["off", "fixed:3", "adaptive"])
def test_whatever_a_request_asks_for(
    card: Platform, ask: Ask, tiny: Path, dtype: str, speculation: str
):
    """Every parameter at once, drafts and overlapped steps included."""
    params = [
        SamplingParams(**{"temperature": 0.8, "max_tokens": 6, **fields}) for fields in SAMPLING
    ]
    prompts = random_prompts(len(params), 40)
    settings = {"dtype": dtype, "speculation": speculation, "overlap": True}
    found = ask(card, tiny, prompts, params, **settings)
    assert len(found) == len(params) + 1  # n = 2
    for answer in found:
        assert answer.finish in (FinishReason.LENGTH, FinishReason.STOP), answer.error
        assert answer.token_ids
    assert set(found[-1].token_ids) <= {8, 9, 10}
    assert found[-2].prompt_logprobs is not None
