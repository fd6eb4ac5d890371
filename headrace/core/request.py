"""One request as the engine takes it: token ids and how to sample; text never reaches it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of token ids with its sampling parameters; `request_id` is unique per engine.

    priority: a lower number runs sooner.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0

    @property
    def needs_all_rows(self) -> bool:
        """Whether every row of the prompt must be computed and give logits (prompt_logprobs): then
        without prefix hit and without truncation.
        """
        return self.sampling.prompt_logprobs is not None
