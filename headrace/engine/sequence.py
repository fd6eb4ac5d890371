"""One choice of a request while the engine works on it: what is rare or not a number.

Contract: a `NewRequest` is what the engine hands to the scheduler; the scheduler makes a `Sequence`
of each choice. While a sequence runs, its numbers and tokens are in a row of the `RequestTable`;
while it waits, `tokens` holds them. Only the scheduler changes it. Plain data: no torch, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.hashing import BlockKeys

NOT_AGED = 2**62
TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A request that passed validation.

    prompt: int32 [prompt_length]. length_limit: tokens of prompt and output at most. stop_ids:
    tokens that end it, once it has min_tokens output tokens. priority: lower is sooner. choices:
    answers wanted. cache_keys: whether its blocks may be found in and put into the prefix cache.
    all_logits: wants logits of all prompt rows, so it is computed without a prefix hit and without
    truncation. drafts: how many a step verifies of it, as `core.speculation.Policy` has it.
    waits_for: external events (grammar, image) that must be `ready` first. payload: whatever the
    row hooks need (sampling parameters), not looked at here.
    """

    request_id: str
    prompt: TokenIds
    length_limit: int
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    priority: int = 0
    choices: int = 1
    cache_keys: bool = True
    all_logits: bool = False
    drafts: int = 0
    waits_for: tuple[str, ...] = ()
    payload: Any = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request.

    number: unique, and the order of arrival. row: of the table while it runs, 0 while it waits.
    tokens: int32 [length], all known tokens while it waits. keys: of its full blocks, as far as
    they were needed; None: its blocks are not cached. resumed_at: tokens that its first admission
    found in the cache, -1 before it. age_rank: its place among those who have waited so long that
    they go before everybody who has not, NOT_AGED among the latter. waited: steps in queues before
    the present one. siblings: choices to fork once the prompt is computed. The times are those of
    the stage it is in, in seconds. verified_drafts: all that were checked; accepted_drafts: those
    of them that are in the answer; of a running one as in the table.
    """

    request: NewRequest
    number: int
    choice: int
    tokens: TokenIds
    row: int = 0
    keys: BlockKeys | None = None
    resumed_at: int = -1
    age_rank: int = NOT_AGED
    waited: int = 0
    queued_step: int = 0
    waits_for: set[str] = field(default_factory=set)
    siblings: list[Sequence] = field(default_factory=list)
    arrival_s: float = 0.0
    queued_s: float = 0.0
    admitted_s: float = 0.0
    first_token_s: float = -1.0
    verified_drafts: int = 0
    accepted_drafts: int = 0

    @property
    def name(self) -> tuple[str, int]:
        """Request id and choice."""
        return self.request.request_id, self.choice

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def aged(self) -> bool:
        """Whether it goes before everybody who has not waited as long."""
        return self.age_rank != NOT_AGED
