"""Log probabilities of tokens in OpenAI's shape.

Contract: an entry is `{"token", "logprob", "bytes", "top_logprobs"}`. `token` is the token's text,
or `\\xNN` per byte when its bytes alone are no UTF-8; control tokens stand for their spelling.
Called by `recipe/events/chat.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.core.output import TokenLogprobs

# JSON has no infinity; this is what OpenAI sends for a token that cannot be drawn.
LOWEST_LOGPROB = -9999.0

TokenBytes = Callable[[int], bytes]


def logprob_entries(
    token_ids: Sequence[int], records: Sequence[TokenLogprobs], token_bytes: TokenBytes
) -> list[dict[str, Any]]:
    """One entry per token; `records` belong to `token_ids`."""
    return [
        {
            **_entry(token_id, record.logprob, token_bytes),
            "top_logprobs": [
                _entry(top_id, logprob, token_bytes)
                for top_id, logprob in zip(record.top_ids, record.top_logprobs, strict=True)
            ],
        }
        for token_id, record in zip(token_ids, records, strict=True)
    ]


def _entry(token_id: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    data = token_bytes(token_id)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = "".join(f"\\x{byte:02x}" for byte in data)
    return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(data)}
