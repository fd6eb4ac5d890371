"""scripts/compile_kernels.py: options, what it finds wrong, and one compilation where it can be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import compile_kernels
import pytest

from headrace.ops import triton
from headrace.ops.signatures import OPS
from headrace.ops.triton import tiles

HC_HEAD = next(i for i in compile_kernels.OPERATORS if i.op == "hc_head")


def test_all_operators_and_cards_by_default():
    chosen = compile_kernels.options([])
    assert chosen.arch == ["sm_80", "sm_90", "sm_100", "sm_120"]
    assert {"hc_enter", "sparse_attention", "noisy_best"} <= set(chosen.ops)
    assert set(chosen.ops) <= set(OPS) | set(triton.OTHERS)
    assert set(compile_kernels.OTHERS) == set(triton.OTHERS)
    assert chosen.rows == list(compile_kernels.ROWS)


def test_options():
    chosen = compile_kernels.options(
        ["--arch", "sm_90, sm_120", "--ops", "hc_merge", "--rows", "1,8"]
    )
    assert (chosen.arch, chosen.ops, chosen.rows) == (["sm_90", "sm_120"], ["hc_merge"], [1, 8])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arch", "sm_70"], "'sm_70', known: sm_80"),
        (["--arch", ""], "known: sm_80"),
        (["--ops", "hc"], "'hc', known: "),
        (["--rows", "0"], "counts such as 1,33"),
        (["--rows", "1,-3"], "counts such as 1,33"),
        (["--card", "h200"], "unrecognized arguments"),
    ],
)
def test_wrong_options_are_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stopped:
        compile_kernels.options(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_limits_are_those_of_the_cards():
    limits = {
        name: tiles.for_capability(capability).shared_bytes
        for name, capability in compile_kernels.ARCHITECTURES.items()
    }
    assert limits == {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376}


def test_without_triton_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(triton, "missing", lambda: "missing")
    assert compile_kernels.main([]) == 0
    assert "pip install" in capsys.readouterr().out


def kernel(name: str, shared: int) -> Any:
    return SimpleNamespace(name=name, metadata=SimpleNamespace(shared=shared))


@pytest.mark.parametrize(
    ("launched", "said"),
    [
        ([kernel("small", 101376)], None),
        ([kernel("small", 8), kernel("large", 101377)], "takes 101377 bytes"),
        ([], "launches no kernel"),
    ],
)
def test_what_is_wrong(monkeypatch: pytest.MonkeyPatch, launched: list[Any], said: str | None):
    @contextmanager
    def launches(capability: tuple[int, int], compiled: compile_kernels.Compiled) -> Iterator[None]:
        compiled.kernels.update({id(k): k for k in launched})
        yield

    monkeypatch.setattr(compile_kernels, "compiling_for", launches)
    monkeypatch.setattr(compile_kernels, "registers_and_stack", lambda kernels: None)
    impl = SimpleNamespace(
        op="hc_head", name="triton", dtypes=("float32",), function=lambda *args: None
    )
    compiled = compile_kernels.compile_operator(impl, (12, 0), [2])
    assert [said in fault for fault in compiled.faults] == ([] if said is None else [True])
    told = compile_kernels.line("sm_120", impl, compiled)
    assert ("FAILED" in told) == (said is not None)
    assert f"{len(launched)} kernels" in told


def test_what_a_case_raises_is_reported(monkeypatch: pytest.MonkeyPatch):
    @contextmanager
    def fails(capability: tuple[int, int], compiled: compile_kernels.Compiled) -> Iterator[None]:
        raise RuntimeError("no such instruction")
        yield

    monkeypatch.setattr(compile_kernels, "compiling_for", fails)
    faults = compile_kernels.compile_operator(HC_HEAD, (9, 0), [1, 2]).faults
    # Said once, with all the cases where it shows.
    assert list(faults) == ["RuntimeError: no such instruction"]
    assert "tiny, float32, 1 rows" in faults["RuntimeError: no such instruction"]


def test_compiles_without_a_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
):
    package = pytest.importorskip("triton", reason="Triton is not installed")
    if package.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set")
    monkeypatch.setattr(compile_kernels, "CACHE", tmp_path)
    arguments = ["--arch", "sm_80,sm_120", "--ops", "hc_merge", "--rows", "1"]
    assert compile_kernels.main(arguments) == 0
    told = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in told[:2]] == [
        ["sm_80", "hc_merge", "ok"],
        ["sm_120", "hc_merge", "ok"],
    ]
    assert told[2:] == ["all compiled"]
