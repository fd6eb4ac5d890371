"""One request as the engine takes it: token ids and how to sample; text never reaches it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of token ids with its sampling parameters; `request_id` is unique per engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
