"""Tensors into safetensors files of at most 15 MiB each, so that they travel and go into git."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

# Below 16 MiB with the header that names a file's tensors.
PART_BYTES = 15 * 2**20


def size(tensor: Tensor) -> int:
    """Bytes of its numbers."""
    return tensor.numel() * tensor.element_size()


def parts(
    tensors: Iterable[tuple[str, Tensor]], limit: int = PART_BYTES
) -> Iterator[dict[str, Tensor]]:
    """Groups of at most `limit` bytes in the given order, each at least one tensor; none is empty.

    Raises ValueError for a tensor that is larger than that.
    """
    part: dict[str, Tensor] = {}
    used = 0
    for name, tensor in tensors:
        bytes_ = size(tensor)
        if bytes_ > limit:
            raise ValueError(
                f"{name} has {bytes_} bytes, a file holds {limit}: make the tensor smaller."
            )
        if used + bytes_ > limit:
            yield part
            part, used = {}, 0
        part[name] = tensor
        used += bytes_
    if part:
        yield part
