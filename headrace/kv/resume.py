"""Where a prompt is resumed after a prefix hit, and what has to be replayed before it.

Contract: `plan_resume` is pure. Cached blocks hold compressed rows only; windows are not kept, so
the last rows before the hit are computed again (replayed) unless a window record is at hand. Those
rows write windows, never shared blocks. Modes: `bounded` replays one window (an approximation),
`exact` as many rows as make the result equal to a cold run, `off` resumes at window records only.
Called by the scheduler at admission.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace.errors import ConfigError
from headrace.kv.layout import BLOCK_TOKENS

ReplayMode: TypeAlias = Literal["bounded", "exact", "off"]


@dataclass(frozen=True, slots=True)
class ResumeRules:
    """What a model and an engine's options say about hits, all in tokens.

    keep: last tokens of a prompt that are always computed (ModelSpec.keep). replay_rows: rows to
    replay before a hit in this mode (ModelSpec.replay_rows; unused in `off`). windows_suffice: a
    window record replaces the replay (true with decoder truncation, which refills the rest).
    """

    mode: ReplayMode
    keep: int
    replay_rows: int
    windows_suffice: bool
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        """Raise ConfigError for rules that contradict themselves."""
        if self.mode not in ("bounded", "exact", "off"):
            raise ConfigError(
                f"replay is bounded, exact or off, not {self.mode!r}.", param="replay"
            )
        if self.keep < 1 or self.block_tokens < 1 or self.replay_rows < 0:
            raise ConfigError("A prompt keeps at least its last token; lengths are not negative.")

    @property
    def minimum_hit(self) -> int:
        """Least hit that a replay is worth: more than what is replayed, two blocks if `bounded`."""
        blocks = self.replay_rows // self.block_tokens + 1
        return max(blocks, 2 if self.mode == "bounded" else 1) * self.block_tokens

    @property
    def first_chunk_tokens(self) -> int:
        """Least rows of the first step after a hit with a replay: all of it and one block."""
        return self.replay_rows + self.block_tokens

    @property
    def shortest_prompt(self) -> int:
        """Least prompt that can hit with a replay."""
        return self.keep + self.minimum_hit

    def longest_hit(self, prompt_tokens: int) -> int:
        """Most blocks that a prompt may take from the cache."""
        return max(0, (prompt_tokens - self.keep) // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Resume:
    """hit_tokens: a multiple of the block. Rows [start, hit_tokens) are replayed; both 0: cold."""

    hit_tokens: int
    replay_rows: int

    @property
    def start(self) -> int:
        """First position to compute; also the floor below which no window row may be read."""
        return self.hit_tokens - self.replay_rows


COLD = Resume(0, 0)


def plan_resume(
    rules: ResumeRules,
    prompt_tokens: int,
    available_blocks: int,
    *,
    has_window_record: Callable[[int], bool] | None = None,
    images: Sequence[tuple[int, int]] = (),
) -> Resume:
    """The best point to resume a prompt of `prompt_tokens` tokens at.

    available_blocks: blocks 0 .. available_blocks - 1 are at hand. has_window_record: whether the
    windows at a block border (given in blocks) are stored. images: (first, end) positions of runs
    whose embeddings would have to be made again; no hit ends inside one.
    """
    block = rules.block_tokens
    hit_blocks = min(available_blocks, rules.longest_hit(prompt_tokens))
    while hit_blocks > 0:
        hit = hit_blocks * block
        inside = next((first for first, end in images if first < hit < end), None)
        if inside is not None:
            hit_blocks = inside // block
            continue
        if rules.windows_suffice and has_window_record and has_window_record(hit_blocks):
            return Resume(hit, 0)
        if rules.mode != "off":
            return Resume(hit, rules.replay_rows) if hit >= rules.minimum_hit else COLD
        hit_blocks -= 1
    return COLD
