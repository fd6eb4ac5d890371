"""What quantisers and cache rows are held to beyond `ops/cases`: extremes, every byte, any place.

Each check compares an implementation of a device with the reference on the host, bit for bit, but
that a NaN is a NaN. Used in Triton's interpreter and on a card.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace.ops import cases
from headrace.ops.records import RecordView
from headrace.ops.reference import quant
from tests.conformance.test_operators import as_bytes, tensors

Calls = Mapping[str, Callable[..., Any]]
RECORDS = list(cases.CASES["round_rows"])
QUANTISED = [name for name in RECORDS if name != "plain"]


def extreme_rows(width: int, dtype: torch.dtype, *, tame: bool = False, seed: int = 3) -> Tensor:
    """Rows [40, width] of what quantisers may meet: ties and steps at every scale, zeros of both
    signs, subnormal and huge numbers, infinity and NaN of both signs.

    tame: no number is subnormal or near it, nor becomes so.
    """
    i = cases.Inputs(seed, torch.float64)
    low, high = (-40, 40) if tame else (-140, 127)
    smooth = i.normal(10, width) * 2.0 ** i.integers(low, high, 10, 1).double()
    ties = i.edges(10, width) * 2.0 ** i.integers(low // 2, high // 2, 10, 1).double()
    tiny = i.normal(5, width) * 2.0 ** (-50 if tame else -130)
    huge = i.normal(5, width).clamp(-1, 1) * torch.finfo(torch.float32).max
    x = torch.cat((smooth, ties, tiny, huge, i.edges(10, width))).to(dtype)
    # One group in two holds none: the others show what it does to them.
    x[20, : width // 2 : 32] = torch.inf
    x[21, 3::32] = -torch.inf
    x[32, 5::32] = torch.nan
    x[33, 9::32] = -torch.tensor(torch.nan)
    x[34, 2::40] = torch.nan
    x[34, 1::24] = torch.inf
    return x


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Equal bits on any device, but that a NaN is a NaN."""
    a, b = a.cpu(), b.cpu()
    assert a.dtype == b.dtype and a.shape == b.shape
    numbers = ~b.isnan()
    return a.isnan().equal(b.isnan()) and as_bytes(a[numbers]).equal(as_bytes(b[numbers]))


def memory(x: Tensor) -> Tensor:
    """All numbers of the memory that the tensor is a part of."""
    return x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)


def moved(x: Tensor, device: str) -> Tensor:
    """A copy there with the same strides, and all that lies between its numbers."""
    return memory(x).to(device, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())


def view_on(view: RecordView, device: str) -> RecordView:
    """A copy of the view in an arena there."""
    scales = None if view.scales is None else moved(view.scales, device)
    return replace(view, data=moved(view.data, device), scales=scales)


def check_fakes(calls: Calls, device: str, group: int, x: Tensor) -> None:
    """fake_fp8 per `group`, and fake_fp4_ue8m0 where it fits."""
    found = calls["fake_fp8"](x.to(device), group)
    assert same_numbers(found, quant.fake_fp8(x, group))
    if x.shape[-1] % 32 == 0:
        found = calls["fake_fp4_ue8m0"](x.to(device))
        assert same_numbers(found, quant.fake_fp4_ue8m0(x))


def check_records(calls: Calls, device: str, name: str, x: Tensor) -> None:
    """Bytes that are written, numbers that they are read as, and `round_rows`, which is both."""
    view = cases.record_view(cases.Inputs(1, x.dtype), name, 5, 9)
    there = view_on(view, device)
    place = torch.randperm(45, generator=torch.Generator().manual_seed(2))[: len(x)]
    major, minor = place // 9, place % 9
    quant.write_records(view, major, minor, x)
    calls["write_records"](there, major.to(device), minor.to(device), x.to(device))
    # Which NaN of bf16 becomes of one in fp32 depends on the instructions of torch.
    whole = not (x.isnan().any() and name.startswith("fp8_nope") and x.dtype != torch.bfloat16)
    rows = slice(None) if whole else ~x.isnan().any(-1)
    major, minor = major[rows], minor[rows]
    for a, b in zip(tensors(there), tensors(view), strict=True):
        assert a.cpu()[major, minor].equal(b[major, minor])
        assert not whole or a.cpu().equal(b)
    view, there = view_on(view, "cpu"), view_on(view, device)
    check_read(calls, device, view, there, torch.arange(5).unsqueeze(1), torch.arange(9), x.dtype)
    assert same_numbers(calls["round_rows"](x.to(device), there), quant.round_rows(x, view))


def check_read(
    calls: Calls,
    device: str,
    view: RecordView,
    there: RecordView,
    major: Tensor,
    minor: Tensor,
    dtype: torch.dtype,
) -> None:
    """`read_records` at places that broadcast, and all rows of these majors."""
    found = calls["read_records"](there, major.to(device), minor.to(device), dtype)
    assert same_numbers(found, quant.read_records(view, major, minor, dtype))
    found = calls["read_majors"](there, major.to(device), dtype)
    assert same_numbers(found, quant.read_majors(view, major, dtype))


def check_every_byte(calls: Calls, device: str, name: str, dtype: torch.dtype) -> None:
    """Records of any bytes are read: all codes, and all scales with some of them."""
    view = cases.record_view(cases.Inputs(1, torch.float32), name, 4, 50)
    for part in tensors(view):
        generator = torch.Generator().manual_seed(4)
        part.copy_(torch.randint(0, 256, part.shape, generator=generator).to(part.dtype))
    there = view_on(view, device)
    major = torch.tensor([[3, 0], [1, 1]])
    check_read(calls, device, view, there, major, major + 7, dtype)


def check_places(calls: Calls, device: str, name: str) -> None:
    """Places that broadcast, are strided, have three dims, count from the end or come twice."""
    i = cases.Inputs(2, torch.float32)
    written = cases.written_view(i, name, 5, 6)
    there = view_on(written, device)
    grid = torch.arange(24).view(2, 3, 4) // 6, torch.arange(24).view(2, 3, 4) % 6
    shapes = [
        (torch.tensor(3), torch.tensor(2)),
        (torch.tensor([-2, -3]), torch.tensor([-1, 5])),
        (torch.arange(4).unsqueeze(-1), torch.arange(6)),
        (torch.arange(4).unsqueeze(-1).expand(4, 3), torch.arange(24).view(6, 4).T[:, :3] % 6),
        (torch.arange(20)[::5] // 5, torch.arange(12)[::3] % 6),
        (grid[0].transpose(0, 2), grid[1].transpose(0, 2)),
        (torch.arange(6).to(torch.int32) % 4, torch.arange(6).to(torch.int32)),
    ]
    for major, minor in shapes:
        check_read(calls, device, written, there, major.long(), minor.long(), torch.float32)
        shape = torch.broadcast_shapes(major.shape, minor.shape)
        x = i.normal(*shape, 2 * written.width)[..., : written.width]
        view = cases.record_view(i, name, 5, 6)
        target = view_on(view, device)
        quant.write_records(view, major.long(), minor.long(), x)
        places = (p.to(device) for p in (major, minor))
        calls["write_records"](target, *places, moved(x, device))
        for a, b in zip(tensors(target), tensors(view), strict=True):
            # Also what lies between and beside the rows.
            assert as_bytes(a.cpu()).equal(as_bytes(b))
            outside = memory(a).cpu()
            outside.as_strided(b.shape, b.stride(), b.storage_offset()).fill_(1)
            untouched = memory(cases.record_view(i, name, 5, 6).data).clone()
            untouched.as_strided(b.shape, b.stride(), b.storage_offset()).fill_(1)
            assert as_bytes(outside).equal(as_bytes(untouched))
    view = cases.record_view(i, name, 5, 6)
    target = view_on(view, device)
    row = i.normal(1, view.width).expand(9, -1)
    twice = torch.full((9,), 2, device=device)
    calls["write_records"](target, twice, twice, row.to(device))
    found = calls["read_records"](target, twice, twice, torch.float32)
    assert found.cpu().equal(quant.round_rows(row, view))


def check_outside(calls: Calls, device: str, name: str) -> None:
    """Places outside a view are not written, and read as NaN."""
    i = cases.Inputs(2, torch.float32)
    view = view_on(cases.written_view(i, name, 5, 6), device)
    before = [as_bytes(part) for part in tensors(view)]
    major = torch.tensor([5, -6, 0, 0, 1 << 40], device=device)
    minor = torch.tensor([0, 0, 6, -7, 0], device=device)
    calls["write_records"](view, major, minor, i.normal(5, view.width).to(device))
    for part, then in zip(tensors(view), before, strict=True):
        assert as_bytes(part).equal(then)
    assert calls["read_records"](view, major, minor, torch.float32).isnan().all()
