"""Machines that headrace runs on: the `Platform` protocol and its implementations."""

from headrace.platforms.base import Capabilities, Fingerprint, Memory, Platform, Probe
from headrace.platforms.cpu import CpuPlatform

__all__ = ["Capabilities", "CpuPlatform", "Fingerprint", "Memory", "Platform", "Probe"]
