"""Token counts of an answer in the shapes of the three protocols.

Contract: `reasoning_tokens` is None when it is unknown or there is no thinking mode. Written by the
modules of the protocols beside this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.recipe.chunks import NO_DRAFTS, DraftCounts


@dataclass(slots=True)
class Counts:
    """Counts of one answer, over all its choices; they grow while the choices end."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int | None = None
    drafts: DraftCounts = NO_DRAFTS

    def add(self, completion_tokens: int, reasoning_tokens: int | None) -> None:
        """Count a choice that ended."""
        self.completion_tokens += completion_tokens
        if reasoning_tokens is not None:
            self.reasoning_tokens = (self.reasoning_tokens or 0) + reasoning_tokens

    def add_drafts(self, drafts: DraftCounts) -> None:
        """Count the drafts of a choice that ended."""
        own = self.drafts
        self.drafts = DraftCounts(own.accepted + drafts.accepted, own.rejected + drafts.rejected)


def chat_usage(counts: Counts) -> dict[str, Any]:
    """The `usage` object of Chat Completions, with DeepSeek's cache counts."""
    prompt, cached = counts.prompt_tokens, counts.cached_tokens
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": prompt + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    details = {}
    if counts.reasoning_tokens is not None:
        details["reasoning_tokens"] = counts.reasoning_tokens
    if counts.drafts != NO_DRAFTS:
        details["accepted_prediction_tokens"] = counts.drafts.accepted
        details["rejected_prediction_tokens"] = counts.drafts.rejected
    if details:
        usage["completion_tokens_details"] = details
    usage["prompt_cache_hit_tokens"] = cached
    usage["prompt_cache_miss_tokens"] = max(0, prompt - cached)
    return usage


def responses_usage(counts: Counts, *, official: bool) -> dict[str, Any]:
    """The `usage` object of Responses."""
    details = {"cached_tokens": counts.cached_tokens}
    if not official:
        details["cache_write_tokens"] = 0  # clients: sdk-fields
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": details,
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens or 0},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }


def messages_usage(counts: Counts) -> dict[str, Any]:
    """The `usage` object of Messages; cached tokens are no input tokens there."""
    return {
        "input_tokens": max(0, counts.prompt_tokens - counts.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached_tokens,
        "output_tokens": counts.completion_tokens,
        "service_tier": "standard",
    }
