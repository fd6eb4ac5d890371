"""Chat Completions responses: streamed chunks and the complete object, as JSON bytes.

Contract: one `ChatEvents` per answer; the fields that are the same in every chunk are fixed when it
is made. The shapes are those the official SDKs parse: the first delta has the role, `finish_reason`
comes once, usage rides on a last chunk with empty `choices` when it was asked for. Called by
`serve/routes/chat.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.core.output import FinishReason
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


class ChatEvents:
    """Builds the JSON of one answer.

    thinking: whether the answer has reasoning. include_usage: add the usage chunk at the end.
    """

    def __init__(
        self,
        response_id: str,
        model: str,
        created: int,
        *,
        thinking: bool,
        include_usage: bool = False,
    ) -> None:
        self._id = response_id
        self._model = model
        self._created = created
        self._thinking = thinking
        self._include_usage = include_usage

    def start(self) -> bytes:
        """The first chunk: only the role."""
        delta: dict[str, Any] = {"role": "assistant", "content": ""}
        if self._thinking:
            delta["reasoning_content"] = ""
        return self._chunk(delta)

    def delta(self, delta: OutputDelta) -> list[bytes]:
        """Chunks of new text; none for an empty delta."""
        chunks: list[bytes] = []
        if delta.reasoning:
            chunks.append(self._chunk({"reasoning_content": delta.reasoning}))
        if delta.content:
            chunks.append(self._chunk({"content": delta.content}))
        return chunks

    def finish(self, reason: FinishReason, usage: Usage) -> list[bytes]:
        """The last chunks: why the answer ended, then the usage if it was asked for."""
        chunks = [self._chunk({"content": ""}, _FINISH[reason])]
        if self._include_usage:
            chunks.append(msgspec.json.encode(self._envelope([], usage.to_wire())))
        return chunks

    def complete(self, reasoning: str, content: str, reason: FinishReason, usage: Usage) -> bytes:
        """The whole answer as one object."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._thinking:
            message["reasoning_content"] = reasoning
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": _FINISH[reason],
        }
        return msgspec.json.encode(
            {
                "id": self._id,
                "object": "chat.completion",
                "created": self._created,
                "model": self._model,
                "choices": [choice],
                "usage": usage.to_wire(),
            }
        )

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return msgspec.json.encode(self._envelope([choice], None))

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
