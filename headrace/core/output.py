"""What the engine says about a request: chunks while it runs, one `RequestOutput` at its end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # EOS or a stop token
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # the caller asked for it
    ERROR = "error"  # `TokenChunk.error` says what


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New tokens of one request from one engine step.

    `index` is the position of tokens[0] in the output, gapless over the chunks of a request.
    The last chunk has `finish`; it may carry no tokens. EOS and stop tokens are included in
    `tokens`: who turns ids into text leaves them out.
    """

    request_id: str
    index: int
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    error: str | None = None
    error_code: str | None = None  # code of errors.HeadraceError when finish is ERROR


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The whole answer of one request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason
    error: str | None = None
