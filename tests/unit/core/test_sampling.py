"""SamplingParams: what is refused, by which name, and numbers of other libraries."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from headrace.core.sampling import SamplingParams
from headrace.errors import InvalidRequest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("stop_token_ids", value) for value in (5, None, "ab", {1: 2}, [[1]], [5.0], [10**5000])),
        *(("temperature", value) for value in (10**400, 10**5000, None, "1", True, 2.1)),
        ("temperature", Fraction(10**400, 3)),
        ("temperature", np.array([1.0, 2.0])),
        *(("top_k", value) for value in (False, -2, 1.5)),
        *(("seed", value) for value in (10**5000, 2**64, -1, np.float64(3.0), True)),
        ("max_tokens", np.float64(3.0)),
        ("ignore_eos", 1),
        *(("coupling", value) for value in ("Gumbel", "", 1, True)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_refused_field_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_numbers_of_numpy_become_pythons() -> None:
    params = SamplingParams(
        temperature=np.float64(0.5),
        top_p=np.float32(0.5),
        seed=np.uint64(2**64 - 1),
        max_tokens=np.int16(3),
        stop_token_ids=np.array([1, 2]),
    )
    assert params == SamplingParams(0.5, 0.5, -1, 2**64 - 1, 3, (1, 2))
    values = [getattr(params, name) for name in ("temperature", "top_p", "seed", "max_tokens")]
    assert [type(value) for value in [*values, *params.stop_token_ids]] == [float] * 2 + [int] * 4
    assert hash(SamplingParams(stop_token_ids=[1])) == hash(SamplingParams(stop_token_ids=(1,)))


def test_top_k_0_is_off_as_everywhere() -> None:
    assert SamplingParams(top_k=0) == SamplingParams(top_k=-1)
