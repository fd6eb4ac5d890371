"""The whole engine on a card that is none (`tests/fake_card.py`).

No operator may get host and device tensors together, whatever requests ask for; and what comes out
is what the same operators give on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.assets import embedded_model
from headrace.config import EngineConfig
from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.core.output import RequestOutput
from headrace.core.sampling import Coupling, LogprobsMode, SamplingParams
from headrace.engine import load
from headrace.engine.llm import LLM
from headrace.errors import ConfigError, UnsupportedError
from headrace.kv.cache import KVCache
from headrace.model.batch import Batch, BatchRow
from headrace.model.loader import load_model
from headrace.model.tiny import write_tiny
from headrace.ops import triton
from headrace.ops.numerics import Numerics
from headrace.platforms import CpuPlatform, Platform
from headrace.recipe.tokenizer import Tokenizer
from tests.fake_card import CARD, CardTensor, FakePlatform, MixedDevices, fake_card

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "overlap": False,  # the executor thread cannot make tensors of the card
    "max_num_seqs": 4,
    "max_num_batched_tokens": 96,
    "max_model_len": 512,
    "num_blocks": 24,
    "threads": 1,
    "seed": 1,
}
Checkpoint = Callable[[str], Path]


class HostPlatform(FakePlatform):
    """The same operators, on the host."""

    @property
    def device(self) -> str:
        return "cpu"

    def devices(self) -> tuple[str, ...]:
        return ("cpu",)

    def memory(self, device: str = "cpu") -> Any:
        return super().memory()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    base = tmp_path_factory.mktemp("tiny")

    def folder(preset: str) -> Path:
        if not (base / preset).exists():
            write_tiny(base / preset, preset=preset, seed=1)
        return base / preset

    return folder


def answers(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    prompts: list[list[int]],
    params: list[SamplingParams],
    **settings: Any,
) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """On the card and on the host; every prompt is asked twice, for hits in the prefix cache."""
    config = EngineConfig(**{**SETTINGS, **settings})

    def ask(platform: FakePlatform) -> list[RequestOutput]:
        monkeypatch.setattr(load, "choose_platform", lambda *_, **__: platform)
        llm = LLM(folder, config, tokenizer=Tokenizer.from_directory(folder))
        return llm.generate(prompts, params) + llm.generate(prompts, params)

    with fake_card():
        found = ask(FakePlatform())
    return found, ask(HostPlatform())


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


LONG, SHORT, SOME = prompt(300, 0), prompt(5, 1), prompt(140, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "mode"),
    [
        ("tiny-8", {}),
        ("v4-tiny", {"dtype": "bfloat16", "act_quant": True}),
        ("tiny-8", {"dtype": "float64", "kv_quant": False, "truncate": "off", "replay": "exact"}),
    ],
)
def test_greedy(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, preset: str, mode: dict[str, Any]
):
    """Prompts in chunks beside decoding rows, hits in the prefix cache, every numeric mode."""
    params = [SamplingParams(max_tokens=n, temperature=0.0, logprobs=2) for n in (2, 5, 3)]
    mode = {"speculation": "off", **mode}
    found, expected = answers(monkeypatch, checkpoint(preset), [LONG, SHORT, SOME], params, **mode)
    assert found == expected


def sampled(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, "temperature": 0.8, **fields})


SAMPLING = [
    sampled(top_k=5, top_p=0.9, min_p=0.02, n=2, logprobs=3),
    sampled(seed=7, logprobs=1, logprobs_mode=LogprobsMode.PROCESSED),
    sampled(seed=8, coupling=Coupling.MAXIMAL, top_p=0.5),
    sampled(seed=9, top_k=3, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1),
    sampled(logit_bias={5: 3.0}, banned_token_ids=(6, 7), min_tokens=3, prompt_logprobs=1),
    sampled(allowed_token_ids=(8, 9, 10), temperature=0.0),
]


@pytest.mark.slow
@pytest.mark.parametrize("speculation", ["off", "fixed:3", "adaptive"])
def test_sampling(monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, speculation: str):
    """Every parameter, without drafts and with drafts to verify."""
    prompts = [prompt(20 + seed, seed) for seed in range(len(SAMPLING))]
    found, expected = answers(
        monkeypatch, checkpoint("tiny-8"), prompts, SAMPLING, speculation=speculation
    )
    if speculation == "adaptive":  # how many drafts pay is measured, and moves `maximal` draws
        # and how rows are grouped, so the last bits of log probabilities
        kept = [
            [(one.token_ids, one.text) for one in answers if one.request_id[-1] in "135"]
            for answers in (found, expected)
        ]
        assert kept[0] == kept[1]
        return
    assert found == expected


@pytest.mark.slow
def test_grammars_and_stop_strings(monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint):
    """Masks come from the host; min_tokens and a mask that leaves only the end meet there."""
    digits = GrammarSpec(GrammarKind.REGEX, "[0-9]{1,2}")
    params = [
        sampled(grammar=digits, min_tokens=4, seed=3),
        sampled(grammar=digits, temperature=0.0),
        sampled(stop=("zzz",), seed=4),
    ]
    prompts = [prompt(20 + seed, seed) for seed in range(len(params))]
    found, expected = answers(
        monkeypatch, checkpoint("tiny-8"), prompts, params, speculation="fixed:2"
    )
    assert found == expected
    assert all(answer.error is None for answer in found)


def test_a_decode_step_reads_only_what_it_must(checkpoint: Checkpoint):
    """What the model itself waits for: which experts were chosen. Indices never come back."""
    with fake_card() as card:
        platform = FakePlatform()
        model = load_model(checkpoint("tiny-8"), Numerics(), platform=platform)
        cache = KVCache(
            model.kv_groups(), num_blocks=5, num_slots=2, dtype=torch.float32, device=CARD
        )
        ids = np.array(LONG)
        for start, length in ((0, 290), (290, 1)):
            card.reads.clear()
            row = BatchRow(ids, start, length, [1, 2, 3], 1)
            logits = model.forward(Batch.build([row], model.max_ngram), cache)
        assert isinstance(logits, CardTensor)
        assert set(card.reads) <= {"aten::_unique2", "aten::nonzero", "aten::_to_copy"}
        layers = model.spec.num_layers
        assert card.reads.count("aten::_to_copy") == layers  # the list of chosen experts


def test_the_card_notices_a_host_tensor():
    with fake_card():
        x = torch.ones(3, device=CARD)
        assert (x + 1.0).tolist() == [2.0, 2.0, 2.0]
        with pytest.raises(MixedDevices, match=r"aten::add"):
            x + torch.ones(3)
        with pytest.raises(MixedDevices, match=r"aten::index"):
            x[torch.tensor([0, 1])]
        with pytest.raises((TypeError, RuntimeError)):
            x.numpy()


def test_a_card_that_is_too_small_is_refused(checkpoint: Checkpoint):
    with fake_card(), pytest.raises(ConfigError, match=r"The weights need .* GiB in float32"):
        load_model(checkpoint("tiny-8"), Numerics(), platform=FakePlatform(2**20))


@pytest.mark.parametrize(
    ("mebibytes", "dtype", "keep_stored", "advice"),
    [
        (15, "float32", False, "set engine.dtype to bfloat16, or"),
        (8, "float32", False, "set engine.weights to stored, or"),
        (8, "bfloat16", False, "set engine.weights to stored, or"),
        (1, "float32", False, "take a card that has as much, or"),
        (1, "bfloat16", True, "take a card that has as much, or"),
    ],
)
def test_the_refusal_says_what_would_fit(
    checkpoint: Checkpoint, mebibytes: int, dtype: str, keep_stored: bool, advice: str
):
    card = FakePlatform(mebibytes * 2**20)
    with fake_card(), pytest.raises(ConfigError, match=advice):
        folder = checkpoint("tiny-8")
        load_model(folder, Numerics(dtype), platform=card, keep_stored=keep_stored)


def test_without_a_card_the_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UnsupportedError, match=r"cuda:3 cannot be used: .* built without CUDA"):
        load.load_engine(embedded_model(), EngineConfig(device="cuda:3"))


def _given(platform: Platform, *_: object, **__: object) -> Platform:
    return platform


def test_a_card_computes_in_bf16_with_weights_as_they_are_stored(monkeypatch: pytest.MonkeyPatch):
    """And a CPU in fp32 with numbers, where the config leaves it open."""
    found = {}

    def loading(*args: object, **kwargs: object) -> None:
        found.update(numerics=args[1], keep_stored=kwargs["keep_stored"])
        raise UnsupportedError("enough")

    monkeypatch.setattr(load, "load_model", loading)
    monkeypatch.setattr(triton, "missing", lambda: None)
    for platform, expected in (
        (FakePlatform(), ("bfloat16", True)),
        (CpuPlatform(), ("float32", False)),
    ):
        chosen = partial(_given, platform)
        monkeypatch.setattr(load, "choose_platform", chosen)
        for config, wanted in (
            (EngineConfig(), expected),
            (EngineConfig(dtype="float32"), ("float32", False)),
            (EngineConfig(dtype="bfloat16", weights="converted"), ("bfloat16", False)),
            (EngineConfig(weights="stored"), (expected[0], True)),
        ):
            with pytest.raises(UnsupportedError, match="enough"):
                load.load_engine(embedded_model(), config)
            assert (found["numerics"].dtype, found["keep_stored"]) == wanted
    monkeypatch.setattr(triton, "missing", lambda: "needs Triton")
    monkeypatch.setattr(load, "choose_platform", partial(_given, FakePlatform()))
    with pytest.raises(UnsupportedError, match="enough"):
        load.load_engine(embedded_model(), EngineConfig())
    assert not found["keep_stored"]
