"""Machines that headrace runs on: the `Platform` protocol and its implementations."""

from headrace.platforms.base import (
    Capabilities,
    Fingerprint,
    Graph,
    Memory,
    Platform,
    Probe,
    Recorder,
    Stopwatch,
)
from headrace.platforms.choose import choose_platform, platform_for
from headrace.platforms.cpu import CpuPlatform
from headrace.platforms.cuda import CudaPlatform

__all__ = [
    "Capabilities",
    "CpuPlatform",
    "CudaPlatform",
    "Fingerprint",
    "Graph",
    "Memory",
    "Platform",
    "Probe",
    "Recorder",
    "Stopwatch",
    "choose_platform",
    "platform_for",
]
