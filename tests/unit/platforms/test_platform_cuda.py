"""The CUDA platform says why a card cannot be used, and how a device is chosen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from headrace.errors import ConfigError, UnsupportedError
from headrace.platforms import CudaPlatform, Memory, Platform, choose_platform, platform_for

GIB = 1 << 30


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch shows two H200s of which the first is partly used."""
    card = SimpleNamespace(name="NVIDIA H200")
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda index: card,
        "get_device_capability": lambda index: (9, 0),
        "mem_get_info": lambda device: (100 * GIB, 140 * GIB),
        "memory_reserved": lambda device: 5 * GIB,
        "memory_allocated": lambda device: 3 * GIB,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def without_cards(monkeypatch: pytest.MonkeyPatch, build: str | None) -> None:
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_card(two_cards: None):
    platform: Platform = CudaPlatform(1)
    assert (platform.name, platform.device) == ("cuda", "cuda:1")
    assert platform.probe().available
    assert platform.devices() == ("cuda:0", "cuda:1")
    assert platform.memory("cuda:0") == Memory(140 * GIB, 102 * GIB)
    assert platform.capabilities().instruction_set == "sm_90"
    found = platform.fingerprint()
    assert (found.vendor, found.device, found.arch, found.runtime) == (
        "NVIDIA",
        "NVIDIA H200",
        "sm_90",
        "CUDA 13.0",
    )
    assert dict(found.libraries)["torch"] == torch.__version__
    assert platform.cores() >= platform.physical_cores() >= 1
    with platform.threads(1):
        assert torch.get_num_threads() == 1
    with pytest.raises(UnsupportedError, match=r"no device 'cpu', known: cuda:0, cuda:1"):
        platform.memory("cpu")


def test_prepare_forbids_shortcuts(monkeypatch: pytest.MonkeyPatch):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction
    try:
        matmul.fp32_precision = "tf32"
        matmul.allow_bf16_reduced_precision_reduction = True
        CudaPlatform().prepare()
        assert matmul.fp32_precision == "ieee"
        assert not matmul.allow_bf16_reduced_precision_reduction
    finally:
        matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = before


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (None, r"built without CUDA: install a CUDA build, .*make install TORCH=cuda"),
        ("13.0", r"finds no NVIDIA GPU: look whether `nvidia-smi` .* CUDA 13.0"),
    ],
)
def test_why_there_is_no_card(monkeypatch: pytest.MonkeyPatch, build: str | None, words: str):
    without_cards(monkeypatch, build)
    assert not CudaPlatform().probe().available
    with pytest.raises(UnsupportedError, match=words) as raised:
        platform_for("cuda")
    assert raised.value.param == "engine.device"


def test_a_card_that_is_not_there(two_cards: None):
    with pytest.raises(UnsupportedError, match=r"no cuda:2, this machine has cuda:0, cuda:1"):
        platform_for("cuda:2")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "", "cpu:0", "auto"])
def test_unknown_devices(device: str):
    with pytest.raises(ConfigError, match=r"allowed: cpu, cuda, cuda:N"):
        platform_for(device)


def test_auto_is_the_first_card(two_cards: None):
    assert choose_platform("auto").device == "cuda:0"
    assert choose_platform("cuda").device == "cuda:0"
    assert choose_platform("cuda:1").device == "cuda:1"
    assert choose_platform("cpu").device == "cpu"


def test_auto_is_the_cpu_where_no_card_will_do(monkeypatch: pytest.MonkeyPatch, two_cards: None):
    assert choose_platform("auto", rather_cpu=True).device == "cpu"
    assert choose_platform("cuda", rather_cpu=True).device == "cuda:0"
    without_cards(monkeypatch, "13.0")
    assert choose_platform("auto").device == "cpu"
