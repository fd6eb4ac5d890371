"""Which checkpoint a command means.

Contract: a directory is always itself; the word `tiny` is the embedded model as long as no
directory of that name stands where the command runs, so that `headrace tiny --out tiny` and a path
after it mean the same place. Used by `serve`, `generate`, `chat` and `eval`.
"""

from __future__ import annotations

from pathlib import Path

from headrace.assets import embedded_model

EMBEDDED_NAME = "tiny"


def checkpoint_path(given: Path | None) -> Path:
    """The directory that `given` names; None: the embedded model."""
    if given is None or (str(given) == EMBEDDED_NAME and not given.is_dir()):
        return embedded_model()
    return given
