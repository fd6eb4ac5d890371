"""Compile the Triton operators for NVIDIA GPUs on a machine without one.

`python scripts/compile_kernels.py [--arch sm_80,sm_90] [--ops OP,..] [--rows N,..]` calls every
Triton implementation of the catalogue on its cases in bf16 and fp32, and what else has kernels
(`OTHERS`), with a driver that says what card is there and launches nothing. Prints one line an
operator and architecture; exit code 1 if a kernel does not compile, needs more shared memory than
the card has, or an operator launches none. Without the package triton it says so and exits with 0.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headrace.ops import cases, triton
from headrace.ops.catalogue import IMPLEMENTATIONS
from headrace.ops.numerics import DTYPES
from headrace.ops.registry import Implementation
from headrace.ops.triton import tiles

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "compile_kernels"
ARCHITECTURES = {f"sm_{major}{minor}": (major, minor) for major, minor in tiles.CARDS}
# One row, and counts on both sides of what tables of tiles tell apart.
ROWS = (1, 33, 300)


def search_arguments(rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What `noisy_best` gets: logits, their maxima, temperatures, random words."""
    logits = torch.zeros((rows, 5000), dtype=dtype)
    ones = torch.ones(rows, dtype=torch.float64)
    return logits, logits[:, 0], ones, ones.to(torch.int64)


# Kernels that are no operators of a model: arguments for (rows, dtype), and the dtypes.
OTHERS = {"noisy_best": (search_arguments, ("float32", "float64"))}
OPERATORS = (
    *(i for i in IMPLEMENTATIONS if i.name.startswith("triton")),
    *(Implementation(op, "triton", triton.function(op), dtypes=OTHERS[op][1]) for op in OTHERS),
)
MISSING = "Nothing was compiled: triton is not installed. `pip install -e '.[triton]'` (Linux)."


@dataclass
class Compiled:
    """The kernels that one operator launched on one architecture, and what went wrong where."""

    kernels: dict[int, Any] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=dict)

    def add_fault(self, what: str, where: str) -> None:
        """Most faults show in many cases."""
        self.faults.setdefault(what, []).append(where)


class Driver:
    """What Triton asks while it compiles. Devices are numbered by architecture: caches differ."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.architecture = 10 * capability[0] + capability[1]

    def get_current_device(self) -> int:
        """The number of the only card."""
        return self.architecture

    def get_current_stream(self, device: int | None = None) -> int:
        """Nothing is launched on it."""
        return 0

    def get_current_target(self) -> Any:
        """The card that is compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)


class ZeroFilled(TorchFunctionMode):
    """Memory that no kernel fills is 0: what wrappers read of it are places that exist."""

    _FILLED = {  # noqa: RUF012
        torch.empty: torch.zeros,
        torch.empty_like: torch.zeros_like,
        Tensor.new_empty: Tensor.new_zeros,
    }

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._FILLED.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def compiling_for(capability: tuple[int, int], compiled: Compiled) -> Iterator[None]:
    """Launches inside compile for a card and are kept in `compiled`; nothing runs."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.kernels[id(kernel)] = kernel
        return kernel

    driver.set_active(Driver(capability))
    chosen = tiles.for_capability(capability)
    try:
        with (
            ZeroFilled(),
            patch.object(JITFunction, "run", compile_only),
            patch.object(tiles, "of", lambda device: chosen),
        ):
            yield
    finally:
        driver.set_active(None)  # the next one to ask gets the machine's own


def arguments_of(
    op: str, variant: str, rows: int, dtype: torch.dtype
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Positional and named arguments of one case."""
    if op in OTHERS:
        return OTHERS[op][0](rows, dtype), {}
    case = cases.build(op, variant, rows, dtype)
    return case.args, case.kwargs


def compile_operator(
    impl: Implementation, capability: tuple[int, int], rows: Sequence[int]
) -> Compiled:
    """Compile what one operator launches in its cases."""
    compiled = Compiled()
    for variant in ("all",) if impl.op in OTHERS else cases.CASES[impl.op]:
        for dtype in impl.dtypes:
            for count in rows:
                args, kwargs = arguments_of(impl.op, variant, count, DTYPES[dtype])
                try:
                    with compiling_for(capability, compiled):
                        impl.function(*args, **kwargs)
                except Exception as e:  # whatever a compiler raises is a line of the report
                    what = f"{type(e).__name__}: {str(e).strip() or 'no message'}"
                    compiled.add_fault(what, f"{variant}, {dtype}, {count} rows")
    limit = tiles.for_capability(capability).shared_bytes
    for kernel in compiled.kernels.values():
        if kernel.metadata.shared > limit:
            what = f"takes {kernel.metadata.shared} bytes of shared memory, a block has {limit}"
            compiled.add_fault(what, kernel.name)
    if not compiled.kernels and not compiled.faults:
        compiled.add_fault("launches no kernel", "all cases")
    return compiled


def registers_and_stack(kernels: Sequence[Any]) -> tuple[int, int] | None:
    """The most registers and bytes of stack (spills) a thread takes; None without cuobjdump."""
    import triton as package

    try:
        tool = package.knobs.nvidia.cuobjdump.path
    except RuntimeError:
        return None
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number, kernel in enumerate(kernels):
            path = Path(folder) / f"{number}.cubin"
            path.write_bytes(kernel.asm["cubin"])
            told = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True)
            found += re.findall(r"REG:(\d+) STACK:(\d+)", told.stdout)
    if not found:
        return None
    return max(int(r) for r, _ in found), max(int(s) for _, s in found)


def line(architecture: str, impl: Implementation, compiled: Compiled) -> str:
    """What is printed of an operator."""
    name = impl.op if impl.name == "triton" else f"{impl.op} ({impl.name})"
    start = f"{architecture:7}{name:40}{'FAILED' if compiled.faults else 'ok':8}"
    kernels = list(compiled.kernels.values())
    if not kernels:
        return start + "0 kernels"
    limit = tiles.for_capability(ARCHITECTURES[architecture]).shared_bytes // tiles.KIB
    shared = max(kernel.metadata.shared for kernel in kernels) / tiles.KIB
    used = registers_and_stack(kernels)
    more = "" if used is None else f", registers <= {used[0]}, stack <= {used[1]} bytes"
    return f"{start}{len(kernels)} kernels, shared <= {shared:.1f} of {limit} KiB{more}"


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """arch: names of ARCHITECTURES; ops: operators; rows: row counts. Exits with 2 on others."""
    operators = list(dict.fromkeys(impl.op for impl in OPERATORS))

    def names(known: Sequence[str]) -> Any:
        def parse(text: str) -> list[str]:
            chosen = [name.strip() for name in text.split(",")]
            for name in chosen:
                if name not in known:
                    raise argparse.ArgumentTypeError(f"{name!r}, known: {', '.join(known)}")
            return chosen

        return parse

    def counts(text: str) -> list[int]:
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
            raise argparse.ArgumentTypeError(f"{text!r}, expected counts such as 1,33")
        return [int(count) for count in text.split(",")]

    parser = argparse.ArgumentParser(
        description="Compile the Triton operators without a GPU.", allow_abbrev=False
    )
    parser.add_argument("--arch", type=names(list(ARCHITECTURES)), default=list(ARCHITECTURES))
    parser.add_argument("--ops", type=names(operators), default=operators)
    parser.add_argument("--rows", type=counts, default=list(ROWS))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    chosen = options(arguments)
    if triton.missing():
        print(MISSING)
        return 0
    import triton as package

    if package.knobs.runtime.interpret:
        print("error: TRITON_INTERPRET is set, and nothing would be compiled: unset it.")
        return 2
    package.knobs.cache.dir = str(CACHE)
    failed = 0
    for architecture in chosen.arch:
        for impl in OPERATORS:
            if impl.op not in chosen.ops:
                continue
            compiled = compile_operator(impl, ARCHITECTURES[architecture], chosen.rows)
            print(line(architecture, impl, compiled), flush=True)
            for what, where in compiled.faults.items():
                more = f" and {len(where) - 1} more" if where[1:] else ""
                print(f"{where[0]}{more}: {what}".replace("\n", "\n    "), flush=True)
            failed += bool(compiled.faults)
    print(f"{failed} failed" if failed else "all compiled")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
