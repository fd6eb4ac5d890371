"""What the engine says about a request: chunks while it runs, one `RequestOutput` at its end.

Contract for whoever makes chunks: per request and choice, `index` is gapless and exactly one chunk
has `finish`; text, ids, log probabilities and usage of a choice end at the same token, whatever
ended it (a stop string included: the token in which it completes is the last one).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # the caller asked for it
    ERROR = "error"  # `TokenChunk.error` says what


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities at one token: its own, and those of the best ids.

    top_ids are ordered by (log probability descending, id ascending); a token that was dropped from
    a processed distribution has -inf, and those come last in the order of their logits.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New tokens of one choice of one request from one engine step.

    `index` is the position of tokens[0] in the output, gapless over the chunks of a choice. The
    last chunk of a choice has `finish`; it may carry no tokens. EOS and stop tokens are included in
    `tokens`: `text_tokens` leaves them out. `choice`: 0 .. n-1; a request has ended when all its
    choices have (an abort or error gives each unfinished choice its last chunk).

    stop: what ended the choice at finish STOP: a stop string, a stop token id, or None for EOS.
    stop_cut: characters to take off the end of the text when `stop` is a string: the string itself
    and what follows it in the same token. logprobs: one entry per token if the request asked for
    them. prompt_logprobs: with the first chunk of choice 0, one entry per prompt token, None for
    the first one. cached_tokens: with the first chunk of a choice, tokens of the prompt that were
    found in the prefix cache. accepted_drafts, rejected_drafts: with the last chunk of a choice,
    drafts of the whole answer that are in it, and those that were verified in vain.
    """

    request_id: str
    index: int
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    error: str | None = None
    error_code: str | None = None  # code of errors.HeadraceError when finish is ERROR
    choice: int = 0
    stop: str | int | None = None
    stop_cut: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached_tokens: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """The tokens that are text: all but the EOS or stop token that ended the choice."""
        if self.finish is FinishReason.STOP and not isinstance(self.stop, str):
            return self.tokens[:-1]
        return self.tokens


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The whole answer of one choice of a request; fields as in `TokenChunk`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason
    error: str | None = None
    choice: int = 0
    stop: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    accepted_drafts: int = 0
    rejected_drafts: int = 0
