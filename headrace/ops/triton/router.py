"""Router: scores in fp32, then the best experts of each row.

`_score` adds up products of a fixed number of parts of the columns, whatever the number of rows, so
that few rows fill a card and a row's bits depend on no other; `_choose` adds the parts in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.errors import InternalError

_ROUTER_EPS = 1e-20
ROWS = 16
EXPERTS = 32
DEPTH = 32
PARTS = 8


@triton.jit(do_not_specialize=["rows"])
def _score(
    x_ptr,
    gate_ptr,
    part_ptr,
    rows,
    experts,
    columns,
    x_row,
    gate_row,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Program (tile of rows, tile of experts, part): every PARTS-th tile of columns of x gate^T."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    part = tl.program_id(2)
    present, known = row < rows, expert < experts
    x_place = x_ptr + row.to(tl.int64)[:, None] * x_row
    gate_place = gate_ptr + expert.to(tl.int64)[None, :] * gate_row
    total = tl.zeros((ROWS, EXPERTS), tl.float32)
    for start in range(part * DEPTH, columns, PARTS * DEPTH):
        column = start + tl.arange(0, DEPTH)
        inside = column < columns
        x = tl.load(x_place + column[None, :], mask=present[:, None] & inside[None, :], other=0.0)
        gate = tl.load(
            gate_place + column[:, None], mask=inside[:, None] & known[None, :], other=0.0
        )
        x, gate = x.to(tl.float32), gate.to(tl.float32)
        total = tl.dot(x, gate, total, input_precision="ieee")
    place = (part.to(tl.int64) * rows + row)[:, None] * experts + expert[None, :]
    tl.store(part_ptr + place, total, mask=present[:, None] & known[None, :])


@triton.jit
def _softplus(x):
    """log(1 + e^x), x itself above 20, as torch has it; exact to a few bits for small results."""
    e = tl.exp(tl.minimum(x, 20.0))
    # What rounding 1 + e loses is made good by the quotient.
    u = 1.0 + e
    grown = tl.log(u) * tl.div_rn(e, tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(x <= 20.0, tl.where(u == 1.0, e, grown), x)  # NaN: x


@triton.jit(do_not_specialize=["rows"])
def _choose(
    part_ptr,
    bias_ptr,
    chosen_ptr,
    expert_ptr,
    weight_ptr,
    rows,
    experts,
    top_k,
    scaling,
    eps,
    HASHED: tl.constexpr,
    NORMALISE: tl.constexpr,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """Program row: its experts, best first (HASHED: those of chosen_ptr), and their weights.

    Experts are compared by one int64: the score's bits in ascending order, NaN above all, then the
    expert, lowest first; an expert that was taken has the lowest of all.
    """
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    known = expert < experts
    logit = tl.zeros((EXPERTS,), tl.float32)
    for part in range(PARTS):
        place = (part * rows + row) * experts + expert
        logit += tl.load(part_ptr + place, mask=known, other=0.0)
    score = tl.sqrt_rn(_softplus(logit))
    choice = tl.arange(0, CHOICES)
    picked = tl.zeros((CHOICES,), tl.int64)
    weight = tl.zeros((CHOICES,), tl.float32)
    if HASHED:
        picked = tl.load(chosen_ptr + row * top_k + choice, mask=choice < top_k, other=0)
        taken = expert[None, :] == picked[:, None]
        weight = tl.sum(tl.where(taken & (choice < top_k)[:, None], score[None, :], 0.0), 1)
    else:
        biased = score + tl.load(bias_ptr + expert, mask=known, other=0.0).to(tl.float32)
        # + 0.0: both zeros are equal.
        bits = (biased + 0.0).to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        order = tl.where(biased == biased, order, 0x7FFFFFFF)
        lowest = -0x7FFFFFFF - 1
        key = (order.to(tl.int64) << 32) | (EXPERTS - 1 - expert).to(tl.int64)
        gone = tl.full((EXPERTS,), lowest, tl.int64) << 32
        key = tl.where(known, key, gone)
        for number in range(top_k):
            best = tl.max(key, 0)
            found = EXPERTS - 1 - (best & 0xFFFFFFFF)
            here = expert == found
            picked = tl.where(choice == number, found, picked)
            taken = tl.sum(tl.where(here, score, 0.0), 0)
            weight = tl.where(choice == number, taken, weight)
            key = tl.where(here, gone, key)
    if NORMALISE:
        weight = tl.div_rn(weight, tl.sum(weight, 0) + eps)
    place = row * top_k + choice
    tl.store(expert_ptr + place, picked, mask=choice < top_k)
    tl.store(weight_ptr + place, weight * scaling, mask=choice < top_k)


def router(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    chosen: Tensor | None,
    top_k: int,
    normalise: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """`reference.router` for x in bf16 or fp32; bias [E]."""
    if chosen is None and bias is None:
        raise InternalError("router needs a bias or chosen experts.")
    rows, (experts, columns) = x.shape[0], gate.shape
    found = torch.empty((rows, top_k), dtype=torch.int64, device=x.device)
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=x.device)
    if rows == 0:
        return found, weights
    x, gate = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, gate))
    parts = torch.empty((PARTS, rows, experts), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _score[(triton.cdiv(rows, ROWS), triton.cdiv(experts, EXPERTS), PARTS)](
            x,
            gate,
            parts,
            rows,
            experts,
            columns,
            x.stride(0),
            gate.stride(0),
            PARTS=PARTS,
            ROWS=ROWS,
            EXPERTS=EXPERTS,
            DEPTH=DEPTH,
        )
        _choose[(rows,)](
            parts,
            None if bias is None else bias.contiguous(),
            None if chosen is None else chosen.contiguous(),
            found,
            weights,
            rows,
            experts,
            top_k,
            scaling,
            _ROUTER_EPS,
            HASHED=chosen is not None,
            NORMALISE=normalise,
            PARTS=PARTS,
            EXPERTS=triton.next_power_of_2(experts),
            CHOICES=triton.next_power_of_2(top_k),
        )
    return found, weights
