"""What the engine may ask of a machine: the protocol that every platform implements.

Contract: reading a platform has no side effects and reads no environment variables; `threads` is
the only call that changes something, and it undoes it. Grows with its callers: streams, graphs and
collectives come with the first platform that has them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


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


class Platform(Protocol):
    """One kind of device: where tensors live and what it can do."""

    @property
    def name(self) -> str:
        """Short name, as in the declarations of operator implementations: "cpu"."""
        ...

    def probe(self) -> Probe:
        """Whether this platform works here."""
        ...

    def fingerprint(self) -> Fingerprint:
        """Identity of hardware and libraries."""
        ...

    def devices(self) -> tuple[str, ...]:
        """torch device strings of this platform."""
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
