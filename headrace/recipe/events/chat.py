"""Chat Completions responses: streamed chunks and the complete object, as JSON bytes.

Contract: one `ChatEvents` per answer; the fields that are the same in every chunk are fixed when it
is made. The shapes are those the official SDKs parse: per choice the first delta has the role and
`finish_reason` comes once; usage rides on a last chunk with empty `choices` when it was asked for.
Called by `serve/chat_answer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.core.output import FinishReason, TokenLogprobs
from headrace.recipe.events.logprobs import TokenBytes, logprob_entries
from headrace.recipe.parser import OutputDelta

DONE = b"[DONE]"

# An answer that ends otherwise ends with an error, not with a finish reason.
_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. completion_tokens holds everything the model generated, EOS included.

    reasoning_tokens is None outside thinking mode.
    """

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None = None

    def to_wire(self) -> dict[str, Any]:
        """The `usage` object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What one engine chunk adds to a choice.

    delta: its text. token_ids: the pushed ids, which `delta` counts. logprobs: one per id, or None
    when the request did not ask for them.
    """

    delta: OutputDelta
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(slots=True)
class WholeChoice:
    """A choice of a complete answer, put together from its `NewTokens`."""

    parts: list[NewTokens] = field(default_factory=list)
    finish: FinishReason | None = None


class ChatEvents:
    """Builds the JSON of one answer.

    thinking: whether the answer has reasoning. include_usage: add the usage chunk at the end.
    token_bytes: of an id, for log probabilities.
    """

    def __init__(
        self,
        response_id: str,
        model: str,
        created: int,
        *,
        thinking: bool,
        token_bytes: TokenBytes,
        include_usage: bool = False,
    ) -> None:
        self._id = response_id
        self._model = model
        self._created = created
        self._thinking = thinking
        self._token_bytes = token_bytes
        self._include_usage = include_usage

    def start(self, choice: int = 0) -> bytes:
        """The first chunk of a choice: only the role."""
        delta: dict[str, Any] = {"role": "assistant", "content": ""}
        if self._thinking:
            delta["reasoning_content"] = ""
        return self._chunk(choice, delta)

    def delta(self, new: NewTokens, choice: int = 0) -> list[bytes]:
        """Chunks of new text and log probabilities; none when there is neither.

        Text may come later than the log probabilities of its tokens (it is held back while it may
        become a stop string); both end at the same token.
        """
        chunks: list[bytes] = []
        for name, text, places in (
            ("reasoning_content", new.delta.reasoning, new.delta.reasoning_ids),
            ("content", new.delta.content, new.delta.content_ids),
        ):
            entries = self._entries(new, places)
            if text or entries:
                logprobs = {name: entries} if entries else None
                chunks.append(self._chunk(choice, {name: text}, logprobs=logprobs))
        return chunks

    def finish(self, reason: FinishReason, choice: int = 0) -> bytes:
        """The last chunk of a choice: why it ended."""
        return self._chunk(choice, {"content": ""}, _FINISH[reason])

    def usage(self, usage: Usage) -> list[bytes]:
        """The usage, if it was asked for, in a chunk without choices."""
        if not self._include_usage:
            return []
        return [msgspec.json.encode(self._envelope([], usage.to_wire()))]

    def complete(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """The whole answer as one object; every choice has its `finish`."""
        return msgspec.json.encode(
            {
                "id": self._id,
                "object": "chat.completion",
                "created": self._created,
                "model": self._model,
                "choices": [self._whole(index, choice) for index, choice in enumerate(choices)],
                "usage": usage.to_wire(),
            }
        )

    def _whole(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        content = "".join(part.delta.content for part in choice.parts)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._thinking:
            message["reasoning_content"] = "".join(part.delta.reasoning for part in choice.parts)
        logprobs: dict[str, Any] | None = None
        if any(part.logprobs is not None for part in choice.parts):
            logprobs = {"content": [], **({"reasoning_content": []} if self._thinking else {})}
            for part in choice.parts:
                logprobs["content"] += self._entries(part, part.delta.content_ids)
                if self._thinking:
                    logprobs["reasoning_content"] += self._entries(part, part.delta.reasoning_ids)
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": None if choice.finish is None else _FINISH[choice.finish],
        }

    def _entries(self, new: NewTokens, places: Sequence[int]) -> list[dict[str, Any]]:
        """Log probabilities of the pushed ids at `places`; none when they were not asked for."""
        if new.logprobs is None:
            return []
        return logprob_entries(
            [new.token_ids[place] for place in places],
            [new.logprobs[place] for place in places],
            self._token_bytes,
        )

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        content = {
            "index": choice,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return msgspec.json.encode(self._envelope([content], None))

    def _envelope(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if self._include_usage:
            chunk["usage"] = usage
        return chunk
