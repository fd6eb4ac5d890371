"""The memory plan of the released models, and of what cannot be planned."""

from __future__ import annotations

import pytest

from headrace.engine.memory_plan import GIB, parse_gpus, plan_memory
from headrace.errors import ConfigError
from headrace.kv.pool import slots_for
from headrace.model.spec import ModelSpec
from tests.unit.model.released_configs import v4_flash, v41_flash

H200 = 143771 * 2**20
V41 = ModelSpec.from_config(v41_flash())


def test_v41_flash_on_eight_h200():
    """The figures of the model card: 543.6 B experts in 4.25 bits, 890 bytes of cache a token."""
    plan = plan_memory(V41, gpus=8, gpu_bytes=H200, with_draft=False)
    assert [row.gpus for row in plan.rows] == [1, 2, 4, 8]
    assert plan.rows[0].experts_bytes == pytest.approx(288.8e9, rel=1e-3)
    assert plan.rows[3].experts_bytes == pytest.approx(288.8e9 / 8, rel=1e-3)
    # 6.8 and 2.65 GB in the files; what is computed in fp32 is kept so.
    assert plan.rows[0].dense_bytes == pytest.approx(6.8e9 + 2.65e9, rel=0.07)
    assert plan.engram_bytes == pytest.approx(202.8e9, rel=1e-3)
    assert plan.block_bytes == pytest.approx(890 * 128, rel=2e-3)
    # Two cards are too small, four are not.
    assert [row.short_bytes > 0 for row in plan.rows] == [True, True, False, False]
    assert [row.requests > 0 for row in plan.rows] == [False, False, True, True]


@pytest.mark.parametrize("context", [1, 128, 129, 8192, 100_000])
@pytest.mark.parametrize("spec", [V41, ModelSpec.from_config(v4_flash())], ids=["v41", "v4"])
def test_what_fits_fits_and_no_more(spec: ModelSpec, context: int):
    """Requests of all lengths fill the cache but for less than one of them."""
    plan = plan_memory(spec, gpus=8, gpu_bytes=H200, context=context)
    row = plan.rows[-1]
    each, blocks = row.requests // row.gpus, -(-context // 128)

    def used(requests: int) -> int:
        slots = slots_for(requests)
        return (requests * blocks + 1) * plan.block_bytes + slots * plan.request_bytes

    assert used(each) <= row.kv_bytes < used(each + 1)
    assert row.blocks >= each * blocks + 1
    assert row.tokens == (row.blocks - 1) * 128
    assert row.experts_bytes + row.dense_bytes + row.kv_bytes < H200


def test_what_is_short_would_do():
    """With as much more memory one request fits; with a hundredth less it does not."""
    plan = plan_memory(V41, gpus=2, gpu_bytes=H200)
    short = plan.rows[1].short_bytes
    assert short > 0
    enough = plan_memory(V41, gpus=2, gpu_bytes=H200 + short + 2**20).rows[1]
    assert (enough.short_bytes, enough.requests) == (0, 2)
    less = plan_memory(V41, gpus=2, gpu_bytes=H200 + short - 2**20).rows[1]
    assert less.short_bytes > 0


def test_odd_numbers_of_gpus_hold_the_larger_share():
    rows = plan_memory(V41, gpus=5, gpu_bytes=H200, with_draft=False).rows
    assert [row.gpus for row in rows] == [1, 2, 4, 5]
    assert rows[3].experts_bytes == pytest.approx(rows[0].experts_bytes * 77 / 384, rel=1e-6)


def test_other_weights_and_no_draft():
    stored = plan_memory(V41, gpus=1, gpu_bytes=H200).rows[0]
    wide = plan_memory(V41, gpus=1, gpu_bytes=H200, weights="bfloat16").rows[0]
    assert wide.experts_bytes / stored.experts_bytes == pytest.approx(16 / 4.25, rel=1e-3)
    without = plan_memory(V41, gpus=1, gpu_bytes=H200, with_draft=False).rows[0]
    assert without.experts_bytes < stored.experts_bytes
    assert without.dense_bytes < stored.dense_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8xH200", (8, H200)),
        ("1xh200", (1, H200)),
        ("2x80GB", (2, 80 * GIB)),
        ("2x94.5GiB", (2, int(94.5 * GIB))),
    ],
)
def test_gpus(text: str, expected: tuple[int, int]):
    assert parse_gpus(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "8", "H200", "0xH200", "8xH300", "8x", "-1xH200", "9999xH200", "2x0.5GB", "2x1e9GB"],
)
def test_gpus_that_do_not_exist(text: str):
    with pytest.raises(ConfigError, match="--gpus"):
        parse_gpus(text)


@pytest.mark.parametrize("context", [0, -1, 2**31])
def test_a_context_that_the_model_does_not_have(context: int):
    with pytest.raises(ConfigError, match="--context must be in"):
        plan_memory(V41, gpus=1, gpu_bytes=H200, context=context)
