"""What the server tells about its checkpoint.

Contract: `make_card` combines what the engine knows with the note that `headrace tiny` leaves
beside a checkpoint (headrace.json), so that nobody takes the text of random weights for an answer.
Reads one small file; imports no torch.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from headrace.core.files import read_regular
from headrace.errors import CheckpointError
from headrace.serve.engine_client import EngineFacts
from headrace.serve.state import ModelCard

NOTE_FILE = "headrace.json"
RANDOM_WEIGHTS = "Random weights: every answer is random text. For trying out the server only."
_MAX_NOTE_BYTES = 65_536


def read_note(checkpoint: Path) -> dict[str, object]:
    """The note of a checkpoint; empty for a checkpoint of anybody else.

    Raises CheckpointError for a file of that name that is no note.
    """
    path = checkpoint / NOTE_FILE
    if not path.exists():
        return {}
    data = read_regular(path, _MAX_NOTE_BYTES)
    try:
        note = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a note of `headrace tiny`: {error}.") from error
    if not isinstance(note, dict):
        raise CheckpointError(f"{path} is not a note of `headrace tiny`: not a JSON object.")
    return note


def make_card(note: dict[str, object], facts: EngineFacts) -> ModelCard:
    """The card of the loaded model."""
    return ModelCard(
        id=facts.model_name,
        created=int(time.time()),
        max_model_len=facts.max_model_len,
        description=RANDOM_WEIGHTS if note.get("random") is True else None,
        details=note,
    )
