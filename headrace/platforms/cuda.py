"""The CUDA platform: one NVIDIA GPU of this host, and the host's cores for what runs beside it.

One instance stands for one card, `cuda:N`; several cards are several engines for now. The number is
torch's: CUDA_VISIBLE_DEVICES decides which cards there are and how they are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from headrace.errors import UnsupportedError
from headrace.platforms.base import (
    Capabilities,
    Fingerprint,
    Graph,
    Memory,
    Probe,
    Recorder,
    Stopwatch,
)
from headrace.platforms.cpu import CpuPlatform

NO_CUDA_BUILD = (
    "this torch ({version}) was built without CUDA: install a CUDA build, for instance with "
    "`make install TORCH=cuda`, or set engine.device to cpu"
)
NO_CARD = (
    "torch finds no NVIDIA GPU: look whether `nvidia-smi` lists one, whether its driver is recent "
    "enough for CUDA {cuda} and whether CUDA_VISIBLE_DEVICES hides it, or set engine.device to cpu"
)
NO_SUCH_CARD = "there is no cuda:{index}, this machine has {cards}"


class CudaPlatform:
    """Implements `Platform` for the card `cuda:index`; `host`: the platform of its host."""

    def __init__(self, index: int = 0, host: CpuPlatform | None = None) -> None:
        self._index = index
        self._host = CpuPlatform() if host is None else host

    @property
    def name(self) -> str:
        """Always "cuda"."""
        return "cuda"

    @property
    def device(self) -> str:
        """The card: "cuda:N"."""
        return f"cuda:{self._index}"

    def probe(self) -> Probe:
        """Whether torch can compute on this card."""
        if torch.version.cuda is None:
            return Probe(False, NO_CUDA_BUILD.format(version=torch.__version__))
        if not torch.cuda.is_available():
            return Probe(False, NO_CARD.format(cuda=torch.version.cuda))
        if self._index >= torch.cuda.device_count():
            cards = ", ".join(self.devices())
            return Probe(False, NO_SUCH_CARD.format(index=self._index, cards=cards))
        return Probe(True)

    def prepare(self) -> None:
        """Products of fp32 in fp32, sums of bf16 in fp32: what torch may leave to shortcuts.

        They are settings of the process, so that another library could have set them otherwise.
        """
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def fingerprint(self) -> Fingerprint:
        """Card, its compute capability, CUDA and torch."""
        card = torch.cuda.get_device_properties(self._index)
        return Fingerprint(
            vendor="NVIDIA",
            device=card.name,
            arch=self.capabilities().instruction_set,
            runtime=f"CUDA {torch.version.cuda}",
            libraries=self._host.fingerprint().libraries,
        )

    def devices(self) -> tuple[str, ...]:
        """All cards that torch sees."""
        return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))

    def cores(self) -> int:
        """Of the host."""
        return self._host.cores()

    def physical_cores(self) -> int:
        """Of the host."""
        return self._host.physical_cores()

    def memory(self, device: str) -> Memory:
        """Memory of a card; what torch has reserved and does not use counts as available."""
        if device not in self.devices():
            known = ", ".join(self.devices()) or "none"
            raise UnsupportedError(f"There is no device {device!r}, known: {known}.")
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Memory(total, free + unused)

    def capabilities(self) -> Capabilities:
        """All dtypes; the compute capability as "sm_90"."""
        major, minor = torch.cuda.get_device_capability(self._index)
        return Capabilities(
            dtypes=frozenset({"float64", "float32", "bfloat16"}),
            instruction_set=f"sm_{major}{minor}",
        )

    def threads(self, count: int) -> AbstractContextManager[None]:
        """Of the operators that run on the host: hashes and rows of Engram tables."""
        return self._host.threads(count)

    def stopwatch(self) -> Stopwatch:
        """One that counts from when the card has done all that was asked of it before."""
        return _EventStopwatch(torch.device(self.device))

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pinned memory."""
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    def recorder(self) -> Recorder:
        """Of CUDA graphs."""
        return _CudaRecorder(torch.device(self.device))

    @contextmanager
    def forbid_waits(self) -> Iterator[None]:
        """torch's own guard; it is one of the process, and two at once would leave it on."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class _CudaRecorder:
    """Implements `Recorder`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One for all graphs: what torch keeps of a stream's memory, no other one can use.
        self._stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], Tensor]) -> Graph:
        """A CUDA graph; `work` runs once before, so that kernels are compiled and libraries ready.

        Other threads may use the card meanwhile.
        """
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            work()
            stream.synchronize()
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        return _CudaGraph(graph, result)


class _CudaGraph:
    """Implements `Graph`."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Tensor) -> None:
        self._graph = graph
        self._result = result

    def replay(self) -> Tensor:
        """Launch it on the current stream."""
        self._graph.replay()
        return self._result


class _EventStopwatch:
    """Implements `Stopwatch` with two events on the current stream of a card."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record(self._stream)

    def stop(self) -> None:
        """Mark the end; does not wait."""
        self._end.record(self._stream)

    def seconds(self) -> float:
        """Waits until the card is there."""
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3
