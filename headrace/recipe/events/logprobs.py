"""Log probabilities of tokens in OpenAI's shape.

Contract: an entry is `{"token", "logprob", "bytes", "top_logprobs"}`. `token` is the token's text,
or `\\xNN` per byte when its bytes alone are no UTF-8; control tokens stand for their spelling,
unknown ids are empty. Used by the writers of Chat Completions and Responses.
"""

from __future__ import annotations

from typing import Any

from headrace.recipe.events.event import AnswerContext
from headrace.recipe.parser.items import PieceLogprobs
from headrace.recipe.protocols.sampling import shortest_f32

# JSON has no infinity; this is what OpenAI sends for a token that cannot be drawn.
LOWEST_LOGPROB = -9999.0


def logprob_entries(piece: PieceLogprobs, context: AnswerContext) -> list[dict[str, Any]]:
    """One entry per token of the piece."""
    return [
        {
            **_entry(token_id, record.logprob, context),
            "top_logprobs": [
                _entry(top_id, logprob, context)
                for top_id, logprob in zip(record.top_ids, record.top_logprobs, strict=True)
            ],
        }
        for token_id, record in zip(piece.ids, piece.entries, strict=True)
    ]


def _entry(token_id: int, logprob: float, context: AnswerContext) -> dict[str, Any]:
    data = context.token_bytes(token_id)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = "".join(f"\\x{byte:02x}" for byte in data)
    # clients: logprob-precision
    shown = shortest_f32(logprob) if context.official else logprob
    return {"token": text, "logprob": max(shown, LOWEST_LOGPROB), "bytes": list(data)}
