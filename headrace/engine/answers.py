"""Chunks of a request put together: ids, text, log probabilities, per choice.

Contract: text shows whole characters only, is held back while it may turn out to be the beginning
of a stop string, and is cut where the engine says; ids and log probabilities are those of the
chunks. Used by `LLM`; the server's parsers do the same for reasoning and content.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from headrace.core.output import FinishReason, RequestOutput, TokenChunk, TokenLogprobs
from headrace.core.protocols import Tokenizer
from headrace.core.request import Request
from headrace.core.stops import HeldText


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of a streamed answer: new text and the ids of the step, EOS included.

    Text may lag behind its ids: an incomplete character, or what may become a stop string, is held
    back. The last chunk of a choice has `finish`; `error` says what went wrong when that is ERROR;
    `stop` is what ended it, see `core.output.TokenChunk`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    error: str | None = None
    choice: int = 0
    stop: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


class ChoiceAnswer:
    """One choice of a request as far as it has come."""

    def __init__(self, request: Request, choice: int, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer the text stays empty."""
        self._request = request
        self._choice = choice
        self._detokenizer = tokenizer.detokenizer() if tokenizer is not None else None
        self._held = HeldText(request.sampling.stop)
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._last: TokenChunk | None = None

    @property
    def finished(self) -> bool:
        """Whether its last chunk has come."""
        return self._last is not None

    def take(self, chunk: TokenChunk) -> TextChunk:
        """Add a chunk."""
        self._token_ids += chunk.tokens
        self._logprobs += chunk.logprobs or ()
        if chunk.finish is not None:
            self._last = chunk
        text = self._new_text(chunk)
        self._text.append(text)
        return TextChunk(
            text,
            chunk.tokens,
            chunk.finish,
            chunk.error,
            chunk.choice,
            chunk.stop,
            chunk.logprobs,
        )

    def output(
        self, prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    ) -> RequestOutput:
        """The answer; one without a last chunk counts as aborted."""
        last = self._last
        return RequestOutput(
            request_id=self._request.request_id,
            prompt_token_ids=self._request.prompt_token_ids,
            token_ids=tuple(self._token_ids),
            text="".join(self._text),
            finish=FinishReason.ABORT if last is None else last.finish or FinishReason.ABORT,
            error=None if last is None else last.error,
            choice=self._choice,
            stop=None if last is None else last.stop,
            logprobs=None if self._request.sampling.logprobs is None else tuple(self._logprobs),
            prompt_logprobs=prompt_logprobs,
            accepted_drafts=0 if last is None else last.accepted_drafts,
            rejected_drafts=0 if last is None else last.rejected_drafts,
        )

    def _new_text(self, chunk: TokenChunk) -> str:
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push(chunk.text_tokens)
        if chunk.finish is None:
            return self._held.push(text)
        if isinstance(chunk.stop, str):
            return self._held.finish(text, chunk.stop_cut)
        return self._held.finish(text + self._detokenizer.flush())


@dataclass(slots=True)
class Answer:
    """A request with all its choices."""

    request: Request
    choices: list[ChoiceAnswer]
    inbox: deque[TokenChunk] = field(default_factory=deque)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @classmethod
    def of(cls, request: Request, tokenizer: Tokenizer | None) -> Answer:
        """An answer of which nothing has come yet."""
        choices = range(request.sampling.n)
        return cls(request, [ChoiceAnswer(request, choice, tokenizer) for choice in choices])

    @property
    def finished(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.finished for choice in self.choices)

    def take_next(self) -> TextChunk:
        """Add the oldest chunk of the inbox, which must not be empty."""
        chunk = self.inbox.popleft()
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = chunk.prompt_logprobs
        return self.choices[chunk.choice].take(chunk)

    def outputs(self) -> list[RequestOutput]:
        """One output per choice, in order."""
        return [choice.output(self.prompt_logprobs) for choice in self.choices]
