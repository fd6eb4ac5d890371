"""Reading the files of a checkpoint directory, which may come from anywhere.

Contract: only regular files are read (a pipe would block for ever, a device may never end) and
never more than a bound; every refusal is a CheckpointError that names the file. Called by whoever
reads such a file: `model`, `recipe`, `serve`; the command line asks `require_checkpoint` first.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from headrace.errors import CheckpointError

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 16 * 2**20
MAX_TOKENIZER_BYTES = 256 * 2**20


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Raises CheckpointError."""
    try:
        # Path.open has no opener, and the caller closes the file.
        file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise CheckpointError(f"{path} cannot be read ({reason}).") from error
    raise CheckpointError(f"{path} cannot be read (not a regular file).")


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Content of a regular file of at most `max_bytes`. Raises CheckpointError."""
    with open_regular(path) as file:
        try:
            data = file.read(max_bytes + 1)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise CheckpointError(f"{path} cannot be read ({reason}).") from error
    if len(data) > max_bytes:
        raise CheckpointError(f"{path} is larger than {max_bytes} bytes.")
    return data


def require_checkpoint(directory: Path) -> None:
    """Raise one CheckpointError that names the directory and every file it lacks."""
    layout = (
        f"A checkpoint is a directory with {CONFIG_FILE}, {TOKENIZER_FILE} and {SINGLE_FILE} (or "
        f"shards with {INDEX_FILE}); `headrace tiny --out DIR` writes one to try."
    )
    # os.path: unlike Path it says False, whatever is wrong with a path.
    if not os.path.isdir(directory):
        raise CheckpointError(f"{directory} is no directory. {layout}")
    lacking = [
        " or ".join(names)
        for names in ((CONFIG_FILE,), (TOKENIZER_FILE,), (SINGLE_FILE, INDEX_FILE))
        if not any(os.path.exists(directory / name) for name in names)
    ]
    if lacking:
        raise CheckpointError(
            f"{directory.resolve()} is no checkpoint: it lacks {', '.join(lacking)}. {layout}"
        )


def _open_at_once(path: str, flags: int) -> int:
    # A pipe without a writer would block; regular files ignore the flag.
    return os.open(path, flags | os.O_NONBLOCK)
