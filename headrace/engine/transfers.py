"""Arrays of the host on their way to where the logits are.

Contract: a plain `Tensor.to` returns when the device has done all it was given before, which the
host needs only for what it reads. `sent` asks for no such wait; NumPy's memory may be changed
afterwards, since the driver has copied what is not pinned when it returns.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def sent(numbers: NDArray[Any], to: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`numbers` on the device of `to`, in their own dtype unless another is given."""
    # torch does not take memory that is read-only, such as a mask that is kept.
    found = torch.from_numpy(numbers if numbers.flags.writeable else numbers.copy())
    if dtype is not None:
        found = found.to(dtype)
    return found.to(to.device, non_blocking=True)
