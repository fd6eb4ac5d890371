"""Decoders that the interpreter of Triton cannot run, on a model of the instructions they use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.ops.stored_weights import StoredWeight, WeightFormat, dense

pytest.importorskip("triton", reason="Triton is not installed")

from headrace.ops.triton import weights


def halves(register: Tensor) -> tuple[Tensor, Tensor]:
    """Two bf16 numbers [n] of int64 [n] below 2^32, low half first."""
    parts = (register & 0xFFFF, register >> 16)
    low, high = (part.to(torch.uint16).view(torch.bfloat16) for part in parts)
    return low, high


def register(low: Tensor, high: Tensor) -> Tensor:
    """Inverse of `halves`."""
    low, high = (part.view(torch.uint16).to(torch.int64) for part in (low, high))
    return low | (high << 16)


def product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """fma.rn.bf16x2 where c is -0.0 twice."""
    assert (c == 0x80008000).all()
    return register(*(x * y for x, y in zip(halves(a), halves(b), strict=True)))


def bytes_of(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    """prmt.b32: each nibble of the selector names a byte of b:a."""
    both = a | (b << 32)
    picks = [(selector >> (4 * place)) & 7 for place in range(4)]
    return sum(((both >> (8 * pick)) & 0xFF) << (8 * place) for place, pick in enumerate(picks))


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "prmt.b32": bytes_of,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "fma.rn.bf16x2": product,
}


def run(text: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """All registers after the assembly; inputs int64 [n] below 2^32."""
    values = dict(inputs)
    for line in text.strip()[1:-1].split(";"):
        name, _, operands = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        if operands.startswith("{"):
            low, high, source = operands.replace("{", "").replace("}", "").split(", ")
            values[low], values[high] = values[source] & 0xFFFF, values[source] >> 16
            continue
        target, *sources = (operand.strip() for operand in operands.split(","))
        numbers = [values[s] if s in values else torch.tensor([int(s, 0)]) for s in sources]
        values[target] = INSTRUCTIONS[name](*numbers) & 0xFFFFFFFF
    return values


@pytest.mark.parametrize("kind", list(WeightFormat))
def test_every_byte_at_every_place_with_every_scale(kind: WeightFormat):
    """A row has a scale of its own and all bytes, four of them a register."""
    order = torch.arange(256)
    codes = torch.stack([(order + shift) % 256 for shift in (0, 91, 182, 17)], dim=1)  # [256, 4]
    scale = torch.arange(256).to(torch.uint8)
    numbers = scale.view(torch.float8_e8m0fnu).to(torch.bfloat16)
    packed = sum(codes[:, place] << (8 * place) for place in range(4))
    for byte, number in zip(scale.tolist(), numbers, strict=True):
        pair = register(number[None], number[None]).expand(256)
        if kind is WeightFormat.FP8:
            values = run(weights.DECODE_FP8.value, {"$2": packed, "$3": pair, "$4": pair})
            found = torch.stack((*halves(values["$0"]), *halves(values["$1"])), dim=1)
        else:
            values = run(weights.DECODE_FP4.value, {"$4": packed, "$5": pair, "$6": pair})
            even = (*halves(values["$0"]), *halves(values["$1"]))
            odd = (*halves(values["$2"]), *halves(values["$3"]))
            found = torch.stack([x for both in zip(even, odd, strict=True) for x in both], dim=1)
        block = (1, found.shape[1])
        scales = torch.full((256, 1), byte, dtype=torch.uint8)
        stored = StoredWeight(codes.to(torch.uint8), scales, kind, block)
        expected = dense(stored, torch.bfloat16)
        assert found.isnan().equal(expected.isnan())
        known = ~expected.isnan()
        assert found[known].view(torch.int16).equal(expected[known].view(torch.int16))


@pytest.mark.parametrize("kind", list(WeightFormat))
def test_words_are_decoded_in_the_order_of_the_columns(kind: WeightFormat):
    """What `_ordered_tile` makes of a weight, and where `in_order` puts its columns."""
    generator = torch.Generator().manual_seed(3)
    rows, fp4 = 256, kind is WeightFormat.FP4
    codes = torch.randint(0, 256, (rows, 128 if fp4 else 256), generator=generator)
    codes[:, 0] = torch.arange(256)
    scales = torch.arange(256)[:, None].expand(-1, 8 if fp4 else 2)
    block = (1, 32 if fp4 else 128)
    stored = StoredWeight(codes.to(torch.uint8), scales.to(torch.uint8), kind, block)
    four = codes.view(rows, -1, 4)
    word = sum(four[..., place] << (8 * place) for place in range(4))
    bits = torch.where(scales == 255, 0x7FC0, torch.where(scales == 0, 0x40, scales << 7))
    pair = (bits | (bits << 16))[:, :1].expand_as(word)
    text = weights.WORD_FP4.value if fp4 else weights.WORD_FP8.value
    given = {"$8": word, "$9": pair} if fp4 else {"$4": word, "$5": pair}
    values = run(text, given)
    halves = [values[f"${n}"].to(torch.uint16).view(torch.bfloat16) for n in range(8 if fp4 else 4)]

    def join(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack((a, b), dim=-1)

    if fp4:
        a, e, b, f, c, g, d, h = halves
        number = join(join(join(a, c), join(b, d)), join(join(e, g), join(f, h)))
        number = number.view(rows, 2, 4, 4, 2, 2, 2).permute(0, 1, 3, 4, 5, 2, 6)
    else:
        a, c, b, d = halves
        number = join(join(a, b), join(c, d))
        number = number.view(rows, 2, 4, 8, 2, 2).permute(0, 1, 3, 4, 2, 5)
    found = number.reshape(rows, 256)
    place = weights.in_order(torch.arange(256)[None], stored, 2)[0]
    assert place.sort()[0].equal(torch.arange(256))
    expected = dense(stored, torch.bfloat16)[:, place]
    assert found.isnan().equal(expected.isnan())
    known = ~expected.isnan()
    assert found[known].view(torch.int16).equal(expected[known].view(torch.int16))
