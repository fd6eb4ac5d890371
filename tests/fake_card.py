"""A card that is none: finds host tensors among device tensors on a machine without a GPU.

Inside `fake_card()` tensors of device "card:0" are wrappers around host tensors. Every operator
call runs on what they hold, and raises MixedDevices where a card would: a host tensor with elements
beside device tensors (an index too: torch sends it, and waits). NumPy over device memory is refused
by torch itself. `reads` lists what made the host wait for the card. Only the calling thread can
make such tensors. torch names the device for the whole process, and nothing else uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree, backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.platforms import CpuPlatform, Memory

CARD = "card:0"
# Copies between devices are meant, whichever side they come from.
_COPIES = {"aten::copy_", "aten::_to_copy", "aten::to"}
_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::equal"}


class MixedDevices(AssertionError):
    """An operator got tensors of the host and of the card."""


class CardTensor(Tensor):
    """A tensor of the card; `held` is where its numbers are."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> CardTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(CARD),
        )
        made.held = held
        return made

    def tolist(self) -> Any:
        """torch refuses it to subclasses."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {}, None)


class FakeCard(TorchDispatchMode):
    """reads: operators after which the host knew something that only the card had known.

    sizes: of each, how many numbers of the card it was given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {}, self)


def run(func: Any, args: Any, kwargs: dict[str, Any], card: FakeCard | None) -> Any:
    """Call `func` on what the tensors hold; results lie where the card would put them."""
    name = func._schema.name
    given = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    ours = [x for x in given if isinstance(x, CardTensor)]
    strangers = [x for x in given if not isinstance(x, CardTensor) and x.dim() > 0]
    if ours and strangers and name not in _COPIES:
        shapes = [tuple(x.shape) for x in strangers]
        raise MixedDevices(f"{name}: host tensors {shapes} beside {len(ours)} of the card")
    targets = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.device)]
    on_card = any(x.type == "card" for x in targets) if targets else bool(ours)
    if name == "aten::copy_":
        on_card = isinstance(args[0], CardTensor)
    if card is not None and ours and (name in _READS or not on_card):
        card.reads.append(name)
        card.sizes.append(sum(x.numel() for x in ours))
    places = {id(x.held): x for x in ours}
    host = torch.device("cpu")
    args, kwargs = _pytree.tree_map_only(torch.device, lambda x: host, (args, kwargs))
    args, kwargs = _pytree.tree_map_only(CardTensor, lambda x: x.held, (args, kwargs))
    result = func(*args, **kwargs)
    if not on_card:
        return result

    def placed(x: Tensor) -> Tensor:
        return places[id(x)] if id(x) in places else CardTensor(x)

    return _pytree.tree_map_only(Tensor, placed, result)


class FakePlatform(CpuPlatform):
    """The platform of the fake card: operators are chosen for "cuda"."""

    def __init__(self, available_bytes: int = 8 * 2**30) -> None:
        super().__init__()
        self._available_bytes = available_bytes

    @property
    def name(self) -> str:
        return "cuda"

    @property
    def device(self) -> str:
        return CARD

    def devices(self) -> tuple[str, ...]:
        return (CARD,)

    def memory(self, device: str = CARD) -> Memory:
        assert device == CARD
        return Memory(self._available_bytes, self._available_bytes)


@cache
def _register() -> None:
    backend_registration._setup_privateuseone_for_python_backend("card")


@contextmanager
def fake_card() -> Iterator[FakeCard]:
    """The card can be used inside; `FakePlatform` computes on it."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no Python backends")
    _register()
    made = torch.tensor

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        return made(data, **kwargs).to(device)

    with pytest.MonkeyPatch.context() as patch, FakeCard() as card:
        patch.setattr(torch, "tensor", tensor)  # the real one asks no mode
        patch.setattr(torch, "inference_mode", torch.no_grad)  # which wrappers do not know
        yield card
