"""From a device name of the settings to a platform."""

from __future__ import annotations

from headrace.errors import ConfigError, UnsupportedError
from headrace.platforms.base import Platform
from headrace.platforms.cpu import CpuPlatform
from headrace.platforms.cuda import CudaPlatform

AUTO = "auto"


def platform_for(device: str) -> Platform:
    """The platform of a torch device: "cpu", "cuda" (the first card) or "cuda:N".

    Raises ConfigError for another name, UnsupportedError where the device cannot be used here, with
    the reason and what to do.
    """
    kind, _, number = device.partition(":")
    if device == "cpu":
        return CpuPlatform()
    if kind != "cuda" or not (number.isdecimal() or device == "cuda"):
        raise ConfigError(
            f"device {device!r} is unknown, allowed: cpu, cuda, cuda:N.", param="engine.device"
        )
    platform = CudaPlatform(int(number or 0))
    probe = platform.probe()
    if not probe.available:
        raise UnsupportedError(f"{device} cannot be used: {probe.reason}.", param="engine.device")
    return platform


def choose_platform(device: str, *, rather_cpu: bool = False) -> Platform:
    """As `platform_for`; "auto" is the first card where there is one, else the CPU.

    rather_cpu: "auto" is the CPU anyway: for small models, which it answers faster.
    """
    if device != AUTO:
        return platform_for(device)
    card = CudaPlatform()
    return CpuPlatform() if rather_cpu or not card.probe().available else card
