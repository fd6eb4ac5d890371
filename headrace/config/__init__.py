"""Typed settings and where they come from; the only package that reads the environment."""

from headrace.config.engine import EngineConfig
from headrace.config.load import (
    build_section,
    check_sections,
    flags_of,
    naming_flags,
    read_settings,
    unknown_variables,
)

__all__ = [
    "EngineConfig",
    "build_section",
    "check_sections",
    "flags_of",
    "naming_flags",
    "read_settings",
    "unknown_variables",
]
