"""The training forward against the product's: same weights, fp32, several packed documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headrace.check.case import Runner
from headrace.kv.cache import KVCache
from headrace.model import stored_formats
from headrace.model.batch import Batch, BatchRow
from headrace.model.deepseek.model import Model
from headrace.model.engram_tables import engram_tables
from headrace.model.loader import load_model
from headrace.model.tiny import write_tiny
from headrace.ops.numerics import Numerics
from headrace.ops.reference import quant
from train import parameters as parameter_module
from train import quantise
from train.attention import FlexCore
from train.forward import Forward, Mode
from train.geometry import Cuts, GeometryMaker

LENGTHS = ((96, 32), (24, 104), (128,))
LENGTH = 128


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    write_tiny(path, quantised=False, seed=3)
    return path


def packed() -> tuple[Tensor, Tensor]:
    """ids and positions [3, 128] of five documents."""
    ids = torch.randint(5, 500, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    return ids, positions


def maker(model: Model, directory: Path) -> GeometryMaker:
    tables = engram_tables(model.spec, directory / "tokenizer.json")
    return GeometryMaker(model.spec, tables, torch.device("cpu"), torch.float32)


def working(model: Model, directory: Path, quantised: bool = False) -> dict[str, Tensor]:
    masters = parameter_module.from_official(load_file(directory / "model.safetensors"), model.spec)
    return parameter_module.working(
        masters, parameter_module.kinds(model.spec), torch.float32, quantised
    )


@pytest.mark.parametrize("rounded", [False, True])
def test_logits_equal_the_products(directory: Path, rounded: bool) -> None:
    model = load_model(directory, Numerics("float32", kv_quant=rounded))
    ids, positions = packed()
    geometry = maker(model, directory).make(ids, positions)
    forward = Forward(model.spec)
    with torch.no_grad():
        ours = forward(
            working(model, directory),
            geometry,
            Mode(sparse=True, rounded=rounded),
            with_logits=True,
        ).logits
    assert ours is not None
    errors = []
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            document = ids[row, start : start + length].numpy().astype(np.int64)
            expected = Runner(model, length).run(document, [length])
            errors.append((ours[row, start : start + length] - expected).abs().flatten())
            start += length
    error = torch.cat(errors)
    # A last bit that falls on a rounding border moves a whole step of FP4: few rows, but far.
    assert float(error.median() if rounded else error.max()) < 1e-4


@pytest.mark.parametrize(
    ("ours", "reference"),
    [
        (quantise.fp8_groups, lambda x: quant.fake_fp8(x, 32)),
        (quantise.fp4_groups, quant.fake_fp4_ue8m0),
        (
            quantise.fp4_entries,
            lambda x: quant.dequantise_fp4_e4m3(*quant.quantise_fp4_e4m3(x)),
        ),
        (
            quantise.fp8_blocks,
            lambda x: stored_formats.decode_fp8(
                codes := stored_formats.encode_fp8(x, (32, 32))[0],
                stored_formats.encode_fp8(x, (32, 32))[1].repeat_interleave(32, 0)[: len(codes)],
                32,
                torch.float32,
            ),
        ),
    ],
)
def test_rounding_equals_the_stored_formats(
    ours: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor]
) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn((48, 64), generator=generator) * torch.logspace(-6, 3, 48).unsqueeze(-1)
    x[:, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])  # ties
    x[3] = 0.0
    assert torch.equal(ours(x), reference(x))


def test_dense_reads_more_than_sparse(directory: Path) -> None:
    model = load_model(directory, Numerics("float32", kv_quant=False))
    geometry = maker(model, directory).make(*packed())
    p = working(model, directory)
    with torch.no_grad():
        dense, sparse = (
            Forward(model.spec)(p, geometry, Mode(sparse=s), with_logits=True).logits
            for s in (False, True)
        )
    assert dense is not None and sparse is not None
    assert torch.allclose(dense[1, :8], sparse[1, :8], atol=1e-5)  # all visible ones are selected
    assert float((dense - sparse).abs().max()) > 1e-2


def test_truncation_cut_equals_the_products(directory: Path) -> None:
    model = load_model(directory, Numerics("float32", kv_quant=False))
    ids, positions = packed()
    ids, positions, border = ids[2:], positions[2:], 100
    place = torch.arange(LENGTH).unsqueeze(0)
    none = torch.full_like(place, LENGTH)
    cuts = Cuts(none, torch.where(place < border, border, LENGTH))
    geometry = maker(model, directory).make(ids, positions, cuts)
    with torch.no_grad():
        ours = Forward(model.spec)(
            working(model, directory), geometry, Mode(sparse=True), with_logits=True
        ).logits
    assert ours is not None
    cache = KVCache(model.kv_groups(), num_blocks=2, num_slots=2, dtype=torch.float32)
    row = BatchRow(ids[0].numpy(), 0, LENGTH, [1], 1, "last", keep_from=border)
    expected = model.forward(Batch.build([row], model.max_ngram), cache)
    assert float((ours[0, -1] - expected[0]).abs().max()) < 1e-4


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_fused_core_equals_dense(directory: Path) -> None:
    model = load_model(directory, Numerics("float32", kv_quant=False))
    geometry = maker(model, directory).make(*packed())
    p = working(model, directory)
    with torch.no_grad():
        dense, fused = (
            forward(p, geometry, Mode(sparse=True), with_logits=True).logits
            for forward in (Forward(model.spec), Forward(model.spec, core=FlexCore(False)))
        )
    assert dense is not None and fused is not None
    assert float((dense - fused).abs().max()) < 1e-4


def test_every_master_gets_a_gradient(directory: Path) -> None:
    model = load_model(directory, Numerics("float32", kv_quant=False))
    masters = parameter_module.from_official(load_file(directory / "model.safetensors"), model.spec)
    for name, master in masters.items():
        master.requires_grad_(parameter_module.trainable(name))
    kinds = parameter_module.kinds(model.spec)
    p = parameter_module.working(masters, kinds, torch.float32, quantised=True)
    geometry = maker(model, directory).make(*packed())
    sample = torch.arange(1, LENGTH, 4)
    outcome = Forward(model.spec)(
        p, geometry, Mode(sparse=True, rounded=True, index_rows=32), index_sample=sample
    )
    assert outcome.token_losses is not None
    assert set(outcome.index_losses) == {2, 4, 6}
    (outcome.token_losses.mean() + sum(outcome.index_losses.values())).backward()
    missing = [
        name
        for name, master in masters.items()
        if parameter_module.trainable(name)
        and (master.grad is None or not bool(master.grad.abs().sum() > 0))
    ]
    assert missing == []
