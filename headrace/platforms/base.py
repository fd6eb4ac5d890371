"""What the engine may ask of a machine: the protocol that every platform implements.

Contract: reading a platform has no side effects and reads no environment variables; `threads`
changes something and undoes it, `prepare` is called once, before weights are loaded. Grows with its
callers: collectives come with the first operators that use them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a platform can be used here, and if not, why."""

    available: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What results and timings depend on: part of every benchmark record and cache key.

    libraries: (name, version) pairs, sorted by name.
    """

    vendor: str
    device: str
    arch: str
    runtime: str
    libraries: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """dtypes: names that `Numerics.dtype` may have here. instruction_set: widest one used."""

    dtypes: frozenset[str]
    instruction_set: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that this process may use at all, and that it could allocate now."""

    total_bytes: int
    available_bytes: int


class Stopwatch(Protocol):
    """Measures what is asked of a device between two points; runs from when it is made."""

    def stop(self) -> None:
        """Mark the end."""
        ...

    def seconds(self) -> float:
        """Seconds between the points; on an asynchronous device it waits for the end."""
        ...


class Graph(Protocol):
    """Work of a device that was recorded once."""

    def replay(self) -> Tensor:
        """Ask for it again, on what its inputs hold now; the result is overwritten next time."""
        ...


class Recorder(Protocol):
    """Makes graphs that share memory; keep all of them as long as one is used."""

    def record(self, work: Callable[[], Tensor]) -> Graph:
        """Run `work` and make it a graph: it must do the same whatever its inputs hold.

        The result of a replay holds until the next replay of any of them.
        """
        ...


class Platform(Protocol):
    """One kind of device: where tensors live and what it can do."""

    @property
    def name(self) -> str:
        """Short name, as in the declarations of operator implementations: "cpu"."""
        ...

    @property
    def device(self) -> str:
        """torch device that an engine of this platform computes on: "cpu", "cuda:0"."""
        ...

    def probe(self) -> Probe:
        """Whether this platform works here."""
        ...

    def prepare(self) -> None:
        """Set what the arithmetic of this process needs."""
        ...

    def fingerprint(self) -> Fingerprint:
        """Identity of hardware and libraries."""
        ...

    def devices(self) -> tuple[str, ...]:
        """torch devices of this kind on this machine."""
        ...

    def cores(self) -> int:
        """CPU cores that this process may use."""
        ...

    def physical_cores(self) -> int:
        """As `cores`, with the hardware threads of one core counted once."""
        ...

    def memory(self, device: str) -> Memory:
        """Memory of one of `devices()`. Raises UnsupportedError for another one."""
        ...

    def capabilities(self) -> Capabilities:
        """What operators may rely on."""
        ...

    def threads(self, count: int) -> AbstractContextManager[None]:
        """Run operators of the calling thread on `count` threads, and restore the old number."""
        ...

    def stopwatch(self) -> Stopwatch:
        """A running one for `device`."""
        ...

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros on the host that can be sent to the device without waiting for it."""
        ...

    def recorder(self) -> Recorder:
        """One for graphs that share memory and are never replayed at the same time."""
        ...

    def forbid_waits(self) -> AbstractContextManager[None]:
        """An error where the host waits for the device within; a device that is the host has none.

        Also in other threads: it is for tests and measurements. Waiting for an event is allowed.
        """
        ...
