"""`select_top_k` by a plain rule, for every implementation that can run here.

Triton's takes part where TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ops.catalogue import IMPLEMENTATIONS
from headrace.ops.registry import Implementation

KNOWN = (-math.inf, math.inf, 0.0, -0.0, 1.0, -1.0, 1.5, 2.0**-126, -(2.0**-130), 3e38, math.nan)


def _runs_here(impl: Implementation) -> bool:
    if impl.name != "triton":
        return True
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)


CHOICES = [
    pytest.param(impl, id=impl.name)
    for impl in IMPLEMENTATIONS
    if impl.op == "select_top_k" and _runs_here(impl)
]
# These say what becomes of NaN as well: it counts as largest, and leaves a place empty.
WITH_NAN = ("reference", "triton")


def rule(row: list[float], top_k: int) -> list[int]:
    """Best first, ties to the lowest position, then in order of position."""
    nan = [j for j in range(len(row)) if math.isnan(row[j])]
    numbers = sorted((j for j in range(len(row)) if j not in nan), key=lambda j: (-row[j], j))
    order = (nan + numbers)[:top_k]
    taken = sorted(j for j in order if row[j] > -math.inf)
    return taken + [-1] * (min(top_k, len(row)) - len(taken))


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("impl", CHOICES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_best_of_each_row(impl: Implementation, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    top_k = data.draw(st.integers(1, 45))
    kinds = KNOWN if impl.name in WITH_NAN else KNOWN[:-1]
    number = st.one_of(st.sampled_from(kinds), st.floats(-4, 4, width=16))
    rows = data.draw(st.lists(st.lists(number, min_size=n, max_size=n), min_size=1, max_size=3))
    dtype = torch.bfloat16 if impl.name in WITH_NAN and data.draw(st.booleans()) else torch.float32
    scores = torch.tensor(rows, dtype=torch.float32).to(dtype)
    found = impl.function(scores, top_k)
    assert found.tolist() == [rule(row, top_k) for row in scores.tolist()]
