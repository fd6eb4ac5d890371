"""What comes with the package: the embedded model and the texts of its evaluation.

`tiny` is a checkpoint in the official layout (docs/tiny-model.md) with two files more that
`headrace eval tiny` reads. Imports nothing of headrace.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def embedded_model() -> Path:
    """Directory of the model that comes with the package."""
    return Path(str(files(__name__) / "tiny"))
