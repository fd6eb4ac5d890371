"""headrace: an inference system for DeepSeek-V4.1-Flash and the V4 family.

Importing the package loads nothing else; each public name is imported when it is first used, so
`headrace.recipe` and the policies work without torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "headrace.engine.llm",
    "EngineConfig": "headrace.config",
    "RequestOutput": "headrace.core.output",
    "SamplingParams": "headrace.core.sampling",
    "HeadraceError": "headrace.errors",
}

__all__ = ["LLM", "EngineConfig", "HeadraceError", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
