"""Typed settings and where they come from; the only package that reads the environment."""

from headrace.config.engine import EngineConfig
from headrace.config.load import build_section, check_sections, read_settings

__all__ = ["EngineConfig", "build_section", "check_sections", "read_settings"]
