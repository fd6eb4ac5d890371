"""What the engine side feeds into a stream: one value per chunk.

Contract: any number of `Ready`, `Text` and `Tokens` in order, then at most one `Finish` or
`Stopped`. Text and ids may be mixed. Read by `parser/` through `stream.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from headrace.core.output import TokenLogprobs


class EngineFinish(StrEnum):
    """Why the engine stopped."""

    STOP = "stop"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Drafts of an answer: those that are part of it, and those that were verified in vain."""

    accepted: int = 0
    rejected: int = 0


NO_DRAFTS = DraftCounts()


@dataclass(frozen=True, slots=True)
class Ready:
    """The prompt was taken: its tokens, how many of them came from the cache, a fingerprint."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    system_fingerprint: str | None = None


# Structs: one is made per stream and step, and they cost a ninth of a frozen dataclass.
class Text(msgspec.Struct, frozen=True, gc=False):
    """Generated text and the number of tokens it stands for."""

    text: str
    token_count: int = 0


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """Generated ids; `logprobs` has one entry per id, or is None."""

    ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class Stopped:
    """The last ids of an answer that a stop string ended, as the engine found it.

    cut: characters at the end that are no text: the string, and what follows it in its token.
    drafts: as in `Finish`.
    """

    ids: Sequence[int]
    stop: str
    cut: int
    logprobs: Sequence[TokenLogprobs] | None = None
    drafts: DraftCounts = NO_DRAFTS


@dataclass(frozen=True, slots=True)
class Finish:
    """The engine's end of the answer. tokens: those that ended it and are no text (EOS)."""

    reason: EngineFinish = EngineFinish.STOP
    tokens: int = 0
    drafts: DraftCounts = NO_DRAFTS


Chunk = Ready | Text | Tokens | Stopped | Finish
