"""How operators are resolved: requirements, priority, overrides, and the reasons that are kept."""

from __future__ import annotations

from dataclasses import fields

import pytest

from headrace.errors import ConfigError, UnsupportedError
from headrace.ops.catalogue import IMPLEMENTATIONS
from headrace.ops.numerics import DTYPES, Numerics
from headrace.ops.registry import Implementation, Resolution, explain, resolve
from headrace.ops.signatures import OPS, OpTable

DEFAULT = Numerics()
INVARIANT = Numerics(batch_invariant=True)


def fast(x: object) -> object:
    return x


def kernel(**changes: object) -> Implementation:
    """A further implementation of `linear`, better than the others unless changed."""
    values = {"op": "linear", "name": "fast", "function": fast, "priority": 10} | changes
    return Implementation(**values)


def with_kernel(**changes: object) -> tuple[Implementation, ...]:
    return (*IMPLEMENTATIONS, kernel(**changes))


def linear(resolutions: list[Resolution]) -> Resolution:
    return next(r for r in resolutions if r.op == "linear")


def reason(resolution: Resolution, name: str) -> str:
    return next(why for impl, why in resolution.rejected if impl.name == name)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_catalogue_resolves_completely(dtype, batch_invariant):
    """Every numeric mode has every operator on a CPU, and each choice keeps what was asked for."""
    numerics = Numerics(dtype, batch_invariant=batch_invariant)
    table = resolve(IMPLEMENTATIONS, "cpu", numerics)
    resolutions = explain(IMPLEMENTATIONS, "cpu", numerics)
    assert [r.op for r in resolutions] == list(OPS) == [f.name for f in fields(OpTable)]
    for r in resolutions:
        assert getattr(table, r.op) is r.chosen.function
        assert r.chosen.batch_invariant or not batch_invariant
        names = {r.chosen.name, *(impl.name for impl, _ in r.rejected)}
        assert names == {impl.name for impl in IMPLEMENTATIONS if impl.op == r.op}


def test_no_device_is_batch_invariant_by_itself():
    """How a device's libraries add up is not known: what was promised elsewhere does not count."""
    with pytest.raises(UnsupportedError) as raised:
        resolve(IMPLEMENTATIONS, "other-device", INVARIANT)
    message = raised.value.message
    assert "reference is not known to be batch-invariant on other-device" in message
    assert "set engine.device to cpu" in message
    promised = kernel(
        batch_invariant=True, platforms=("other-device",), invariant_on=("other-device",)
    )
    others = [impl for impl in IMPLEMENTATIONS if impl.op != "linear"]
    numerics = Numerics()
    assert linear(explain([*others, promised], "other-device", numerics)).chosen is promised
    alone = [promised if impl.op == "linear" else impl for impl in IMPLEMENTATIONS]
    with pytest.raises(UnsupportedError, match="operator 'rms_norm'"):
        explain(alone, "other-device", INVARIANT)


def test_a_card_has_batch_invariant_operators():
    for dtype in DTYPES:
        for r in explain(IMPLEMENTATIONS, "cuda", Numerics(dtype, batch_invariant=True)):
            assert r.chosen.batch_invariant
            assert {"*", "cuda"}.intersection(r.chosen.invariant_on)


def test_references_run_everywhere():
    """A new platform starts with the reference of every operator."""
    for r in explain(IMPLEMENTATIONS, "other-device", DEFAULT):
        assert r.chosen.name == "reference"


def test_names_are_unique_per_operator():
    keys = [(impl.op, impl.name) for impl in IMPLEMENTATIONS]
    assert len(keys) == len(set(keys))
    assert {impl.op for impl in IMPLEMENTATIONS} == set(OPS)


def test_matrix_products_are_chosen_by_batch_invariance():
    assert linear(explain(IMPLEMENTATIONS, "cpu", DEFAULT)).chosen.name == "decode"
    resolution = linear(explain(IMPLEMENTATIONS, "cpu", INVARIANT))
    assert resolution.chosen.name == "fixed_tile"
    assert reason(resolution, "reference") == "is not batch-invariant"


def test_highest_priority_wins():
    resolution = linear(explain(with_kernel(), "cpu", DEFAULT))
    assert resolution.chosen.name == "fast"
    assert reason(resolution, "reference") == "fast is preferred where both qualify"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"platforms": ("cuda", "npu")}, "runs on cuda, npu, not on cpu"),
        ({"dtypes": ("bfloat16",)}, "takes bfloat16, not float32"),
        ({"probe": lambda: "needs AVX-512"}, "needs AVX-512"),
    ],
)
def test_reasons_against_an_implementation(changes, why):
    resolution = linear(explain(with_kernel(**changes), "cpu", DEFAULT))
    assert resolution.chosen.name == "decode"
    assert reason(resolution, "fast") == why
    with pytest.raises(UnsupportedError, match=r"ops\.linear: 'fast'") as caught:
        resolve(with_kernel(**changes), "cpu", DEFAULT, {"linear": "fast"})
    assert why in str(caught.value)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_stored_weights_refuse_what_takes_numbers(dtype: str):
    for r in explain(IMPLEMENTATIONS, "cpu", Numerics(dtype), stored=True):
        assert not r.chosen.numbers_only
    resolution = linear(explain(with_kernel(numbers_only=True), "cpu", DEFAULT, stored=True))
    assert resolution.chosen.name == "reference"
    assert reason(resolution, "fast") == "takes weights as numbers, not as they are stored"
    with pytest.raises(UnsupportedError, match="not as they are stored"):
        explain(IMPLEMENTATIONS, "cpu", DEFAULT, {"moe": "decode"}, stored=True)


def test_passing_probe_is_no_objection():
    resolution = linear(explain(with_kernel(probe=lambda: None), "cpu", DEFAULT))
    assert resolution.chosen.name == "fast"


def test_invariance_refuses_the_faster_one():
    assert linear(explain(with_kernel(), "cpu", INVARIANT)).chosen.name == "fixed_tile"
    chosen = linear(explain(with_kernel(batch_invariant=True), "cpu", INVARIANT)).chosen
    assert chosen.name == "fast"


def test_invariance_refuses_what_is_not_deterministic():
    """Equal calls must give equal bits too; the refusal names the implementation and why."""
    unordered = with_kernel(batch_invariant=True, deterministic=False)
    assert linear(explain(unordered, "cpu", DEFAULT)).chosen.name == "fast"
    resolution = linear(explain(unordered, "cpu", INVARIANT))
    assert resolution.chosen.name == "fixed_tile"
    assert "is not deterministic" in reason(resolution, "fast")
    with pytest.raises(UnsupportedError, match=r"ops\.linear: 'fast' is not deterministic"):
        resolve(unordered, "cpu", INVARIANT, {"linear": "fast"})
    alone = [impl for impl in unordered if impl.op != "linear" or impl.name == "fast"]
    with pytest.raises(UnsupportedError, match="fast is not deterministic"):
        resolve(alone, "cpu", INVARIANT)


def test_override_names_an_implementation():
    resolution = linear(explain(IMPLEMENTATIONS, "cpu", DEFAULT, {"linear": "fixed_tile"}))
    assert resolution.chosen.name == "fixed_tile"
    rejected = [impl.name for impl, _ in resolution.rejected]
    assert rejected == ["reference", "triton", "triton_invariant", "decode"]
    assert resolve(with_kernel(), "cpu", DEFAULT, {"linear": "fast"}).linear is fast


def test_unknown_override_is_refused():
    with pytest.raises(ConfigError) as caught:
        explain(IMPLEMENTATIONS, "cpu", DEFAULT, {"linear": "fastest"})
    assert caught.value.param == "ops.linear"
    assert "fastest" in str(caught.value)
    assert "reference, fixed_tile" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        explain(IMPLEMENTATIONS, "cpu", DEFAULT, {"linaer": "reference"})
    assert caught.value.param == "ops.linaer"


def test_override_cannot_break_the_mode():
    with pytest.raises(UnsupportedError, match="is not batch-invariant"):
        resolve(IMPLEMENTATIONS, "cpu", INVARIANT, {"linear": "reference"})


def test_missing_operator_says_why():
    without = [impl for impl in IMPLEMENTATIONS if impl.op != "linear"]
    alone = [*without, kernel(platforms=("cuda",))]
    with pytest.raises(UnsupportedError) as caught:
        resolve(alone, "cpu", DEFAULT)
    assert "'linear'" in str(caught.value)
    assert "fast runs on cuda, not on cpu" in str(caught.value)


def test_unknown_dtype_is_refused():
    with pytest.raises(ConfigError) as caught:
        Numerics("float16")
    assert caught.value.param == "dtype"
