"""What the events of the Messages protocol need to know about a request.

Made by `protocols/messages.py` as `ConvertedRequest.settings`; read by `events/`. Frozen data.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MessagesSettings:
    """Settings of one Messages answer.

    thinking: the answer opens with a thinking block, even when no reasoning follows. signature:
    text of the signature delta of thinking blocks; None stands for the id of the response.
    Level `clients`: thinking_budget: `thinking.budget_tokens` as sent, noted only.
    parallel_tool_calls: False when the client wants at most one call in an answer.
    """

    thinking: bool = False
    signature: str | None = None
    thinking_budget: int | None = None
    parallel_tool_calls: bool = True
