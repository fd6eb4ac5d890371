"""The engine of `headrace serve`, built inside the engine process.

Contract: an `EngineFactory` (engine/host.py) that gives the engine the checkpoint's tokenizer, so
that stop strings end an answer in the step that completes them. It is named by its import path:
the engine never imports `recipe`. Called in the engine process only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.config import EngineConfig
from headrace.core.protocols import Detokenizer
from headrace.engine import host
from headrace.engine.wire import EngineInfo
from headrace.recipe.tokenizer import Tokenizer


class ShownTokenizer:
    """A tokenizer whose texts show control tokens, as the server's parser of answers sees them.

    Without them the engine would find stop strings across control tokens, and cut elsewhere.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of ids."""
        return self._tokenizer.decode(token_ids, skip_special=skip_special)

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental detokenizer that shows control tokens."""
        return self._tokenizer.detokenizer(skip_special=False)

    @property
    def vocab_size(self) -> int:
        """Highest known id + 1."""
        return self._tokenizer.vocab_size

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token."""
        return self._tokenizer.token_bytes(token_id)

    def is_added(self, token_id: int) -> bool:
        """Whether the id is a control token."""
        return self._tokenizer.is_added(token_id)


def load_engine(
    checkpoint: Path, config: EngineConfig, progress: host.ProgressCallback
) -> tuple[host.EngineLike, EngineInfo]:
    """The checkpoint's model and tokenizer in an engine; raises what `host.load_engine` raises."""
    tokenizer = ShownTokenizer(Tokenizer.from_directory(checkpoint))
    return host.load_engine(checkpoint, config, progress, tokenizer)
