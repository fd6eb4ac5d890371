"""The CPU platform: cores, memory and torch of this host, as this process may use them.

Limits of a container (cgroup v2, then v1) count: a process in a 4 GB container has 4 GB. Where a
system has no /proc (macOS) the totals come from sysconf.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.errors import InternalError, UnsupportedError
from headrace.platforms.base import (
    Capabilities,
    Fingerprint,
    Graph,
    Memory,
    Probe,
    Recorder,
    Stopwatch,
)

# (limit, usage) of the process' own cgroup as a container sees it.
_CGROUP_MEMORY = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


class CpuPlatform:
    """Implements `Platform`; `root` is where proc and sys are mounted."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    @property
    def name(self) -> str:
        """Always "cpu"."""
        return "cpu"

    @property
    def device(self) -> str:
        """Always "cpu"."""
        return "cpu"

    def probe(self) -> Probe:
        """Every host has a CPU."""
        return Probe(available=True)

    def prepare(self) -> None:
        """Nothing: torch takes no shortcuts here."""

    def fingerprint(self) -> Fingerprint:
        """CPU model, architecture, Python, torch and NumPy."""
        info = self._pairs("proc/cpuinfo")
        device = info.get("model name") or info.get("CPU part") or platform.processor()
        return Fingerprint(
            vendor=info.get("vendor_id") or info.get("CPU implementer") or platform.system(),
            device=device or "unknown",
            arch=platform.machine(),
            runtime=f"{platform.python_implementation()} {platform.python_version()}",
            libraries=(("numpy", np.__version__), ("torch", str(torch.__version__))),
        )

    def devices(self) -> tuple[str, ...]:
        """One device, whatever the number of sockets."""
        return ("cpu",)

    def cores(self) -> int:
        """Cores by affinity, cut to the container's quota, at least 1."""
        return self._within_quota(len(self._usable()))

    def physical_cores(self) -> int:
        """As `cores`; two hardware threads of a core share its arithmetic units."""
        siblings = {
            self._text(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").strip()
            or str(cpu)
            for cpu in self._usable()
        }
        return self._within_quota(len(siblings))

    def _usable(self) -> set[int]:
        try:
            return os.sched_getaffinity(0)
        except AttributeError:  # not Linux
            return set(range(os.cpu_count() or 1))

    def _within_quota(self, cores: int) -> int:
        quota = self._text("sys/fs/cgroup/cpu.max").split()
        if len(quota) == 2 and quota[0].isdigit():
            cores = min(cores, int(quota[0]) // int(quota[1]))
        return max(1, cores)

    def memory(self, device: str = "cpu") -> Memory:
        """Main memory, cut to the container's limit."""
        if device not in self.devices():
            raise UnsupportedError(f"The cpu platform has no device {device!r}, use 'cpu'.")
        info = self._pairs("proc/meminfo")
        if "MemTotal" in info:
            total = _kibibytes(info["MemTotal"])
            available = _kibibytes(info.get("MemAvailable", info["MemTotal"]))
        else:
            total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        for limit_path, usage_path in _CGROUP_MEMORY:
            limit, usage = self._text(limit_path).strip(), self._text(usage_path).strip()
            if limit.isdigit() and usage.isdigit() and int(limit) < total:
                total = int(limit)
                available = min(available, max(0, total - int(usage)))
        return Memory(total, available)

    def capabilities(self) -> Capabilities:
        """All dtypes; the instruction set torch picked its kernels for."""
        return Capabilities(
            dtypes=frozenset({"float64", "float32", "bfloat16"}),
            instruction_set=torch.backends.cpu.get_cpu_capability(),
        )

    @contextmanager
    def threads(self, count: int) -> Iterator[None]:
        """Set torch's intra-operator threads; call it on the thread that runs the operators.

        Batch-invariant mode needs one fixed number: how a reduction is split depends on it.
        """
        if count < 1:
            raise InternalError(f"threads({count}): at least one thread is needed.")
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def stopwatch(self) -> Stopwatch:
        """One that reads the clock."""
        return _ClockStopwatch()

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Plain memory."""
        return torch.zeros(tuple(shape), dtype=dtype)

    def recorder(self) -> Recorder:
        """One that records nothing: work is called each time."""
        return _Caller()

    def forbid_waits(self) -> AbstractContextManager[None]:
        """Nothing waits here."""
        return nullcontext()

    def _text(self, path: str) -> str:
        """Content of a file below the root, empty where there is none."""
        try:
            return (self._root / path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def _pairs(self, path: str) -> dict[str, str]:
        """First value of each `key: value` line."""
        pairs: dict[str, str] = {}
        for line in self._text(path).splitlines():
            key, colon, value = line.partition(":")
            if colon:
                pairs.setdefault(key.strip(), value.strip())
        return pairs


class _Caller:
    """Implements `Recorder`."""

    def record(self, work: Callable[[], Tensor]) -> Graph:
        """Work that is called for every replay."""
        return _Calls(work)


class _Calls:
    """Implements `Graph`."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self.replay = work


class _ClockStopwatch:
    """Implements `Stopwatch`."""

    def __init__(self) -> None:
        self._start_s = self._end_s = time.perf_counter()

    def stop(self) -> None:
        """Mark the end."""
        self._end_s = time.perf_counter()

    def seconds(self) -> float:
        """Between start and end."""
        return self._end_s - self._start_s


def _kibibytes(text: str) -> int:
    """Bytes of a /proc/meminfo value such as "16384 kB"."""
    return int(text.split()[0]) * 1024
