"""How the kernels of this package are compiled, and the form in which arrays reach them.

`kernel` compiles a function for the dtypes it is called with and keeps the machine code on disk, so
that only the first start after an installation compiles (every start where no folder can be
written). A kernel is compiled once more for every memory layout it meets: arrays go through `dense`
first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from torch import Tensor

from headrace.ops.cpu.decode.arrays import Array, array


class _ForgivingCache:
    """Numba's cache of one kernel, whose damaged or unwritable files only cost compiling again."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def load_overload(self, signature: object, context: object) -> object:
        """The machine code, or None where there is none that can be read."""
        try:
            return self._cache.load_overload(signature, context)
        except Exception:  # any: what a damaged pickle raises is not defined
            self._try(self._cache.flush)
            return None

    def save_overload(self, signature: object, data: object) -> None:
        """Keep the machine code if the disk takes it."""
        self._try(self._cache.save_overload, signature, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    @staticmethod
    def _try(call: Callable[..., object], *args: object) -> None:
        try:
            call(*args)
        except Exception:  # a full or read-only disk must not end a request
            return


def _compiled(function: Callable[..., Any], fastmath: set[str]) -> Any:
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy", fastmath=fastmath)(function)
    try:
        dispatcher.enable_caching()
    except RuntimeError:
        # Neither the folder of the source nor one below the home folder can be written.
        return dispatcher
    dispatcher._cache = _ForgivingCache(dispatcher._cache)
    return dispatcher


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a kernel whose numbers round as those of the reference.

    Sums may be reordered (vector instructions); NaN and infinity keep their meaning. There is no
    fused multiply-add, so that what is rounded to codes afterwards stays equal.
    """
    return _compiled(function, {"reassoc", "nsz"})


def product_kernel(function: Callable[..., Any]) -> Any:
    """Compile a kernel that is a matrix product: these round differently in every library."""
    return _compiled(function, {"reassoc", "nsz", "contract"})


def dense(t: Tensor) -> Array:
    """The array over the memory of `t`, or a copy where its numbers do not lie side by side."""
    a = array(t)
    return a if a.flags.c_contiguous else np.ascontiguousarray(a)
