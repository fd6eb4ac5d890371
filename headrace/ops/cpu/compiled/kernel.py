"""How the kernels of this package are compiled, and the form in which arrays reach them.

`kernel` compiles a function for the dtypes it is called with and keeps the machine code on disk, so
that only the first start after an installation compiles (every start where no folder can be
written). A kernel is compiled once more for every memory layout it meets: arrays go through `dense`
first.
"""

from __future__ import annotations

import numba
import numpy as np
from torch import Tensor

from headrace.ops.cpu.decode.arrays import Array, array


def _has_cache_folder() -> bool:
    """Numba keeps machine code beside the source or below the home folder, where it may write."""
    try:
        numba.njit(cache=True)(_has_cache_folder)
    except RuntimeError:
        return False
    return True


_CACHE = _has_cache_folder()

# Sums may be reordered (vector instructions); NaN and infinity keep their meaning. Products and
# sums of single numbers round as in the reference, so that what is rounded to codes stays equal.
kernel = numba.njit(cache=_CACHE, nogil=True, error_model="numpy", fastmath={"reassoc", "nsz"})

# For kernels that are matrix products: these round differently in every library.
product_kernel = numba.njit(
    cache=_CACHE, nogil=True, error_model="numpy", fastmath={"reassoc", "nsz", "contract"}
)


def dense(t: Tensor) -> Array:
    """The array over the memory of `t`, or a copy where its numbers do not lie side by side."""
    a = array(t)
    return a if a.flags.c_contiguous else np.ascontiguousarray(a)
