"""How many drafts of a request each step verifies, as a setting: "off", "fixed:K" or "adaptive".

Contract: plain data, so that requests (`core/sampling.py`) and servers (`config/engine.py`) check
the text where they are built. What a step really verifies is `engine/speculation/policy.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.core.plain import shown
from headrace.errors import ConfigError, HeadraceError

ADAPTIVE = -1
MAX_DRAFT_LENGTH = 64  # of `engine.draft_length`: far above any block size
ALLOWED = '"off", "adaptive" or "fixed:K" with K from 1 to the block size of the draft module'
# That size is checked by `require_length`, which knows it.
_FIXED = re.compile(r"fixed:([1-9][0-9]{0,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Policy:
    """drafts: 0 (off), K >= 1 (every step verifies K), or ADAPTIVE (each step chooses)."""

    drafts: int

    @classmethod
    def parse(
        cls,
        text: object,
        *,
        param: str = "engine.speculation",
        error: type[HeadraceError] = ConfigError,
    ) -> Policy:
        """The policy that `text` names; `str` of a policy is its text. Raises `error`, naming
        `param` (requests pass theirs and InvalidRequest)."""
        if isinstance(text, str):
            if text in ("off", "adaptive"):
                return cls(0 if text == "off" else ADAPTIVE)
            found = _FIXED.fullmatch(text)
            if found:
                return cls(int(found[1]))
        raise error(f"{param} must be {ALLOWED}, got {shown(text)}.", param=param)

    def __str__(self) -> str:
        if self.drafts > 0:
            return f"fixed:{self.drafts}"
        return "adaptive" if self.adaptive else "off"

    @property
    def adaptive(self) -> bool:
        """Whether each step chooses how much to verify."""
        return self.drafts == ADAPTIVE

    def require_length(
        self,
        draft_length: int,
        *,
        param: str = "engine.speculation",
        error: type[HeadraceError] = ConfigError,
    ) -> None:
        """Raise `error` if more is asked than the drafter drafts.

        draft_length: the block size of the checkpoint, or what the server drafts; 0: no drafter.
        """
        if self.drafts == 0 or (draft_length > 0 and self.drafts <= draft_length):
            return
        if draft_length == 0:
            raise error(
                f'{param} "{self}" needs a draft module, and there is none; allowed: "off".',
                param=param,
            )
        raise error(
            f'{param} "{self}" asks for {self.drafts} drafts a step, but a draft block has '
            f'{draft_length} here; allowed: "off", "adaptive" or "fixed:K" with K in 1 .. '
            f"{draft_length}.",
            param=param,
        )
