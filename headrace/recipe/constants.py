"""Literal spellings and numbers of the DeepSeek prompt format, in one place.

The control tokens are known by their *spelling* only: ids differ between tokenizers and are looked
up in the added vocabulary of the checkpoint (`recipe/tokenizer.py`). Used by the renderers, the
binding check and the output parser.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ReasoningEffort(StrEnum):
    """How thorough the reasoning should be; the prompt carries a number for it."""

    LOW = "low"
    HIGH = "high"
    XHIGH = "xhigh"
    MAX = "max"


# What clients write -> what the prompt knows. `none` switches thinking off and is not an effort.
EFFORT_BY_NAME = {
    "minimal": ReasoningEffort.LOW,
    "low": ReasoningEffort.LOW,
    "medium": ReasoningEffort.HIGH,
    "high": ReasoningEffort.HIGH,
    "xhigh": ReasoningEffort.XHIGH,
    "ultra": ReasoningEffort.MAX,
    "max": ReasoningEffort.MAX,
}

# Numbers written by V4.1 prompts. No effort renders as `high`.
EFFORT_NUMBER = {
    ReasoningEffort.LOW: 50,
    ReasoningEffort.HIGH: 75,
    ReasoningEffort.XHIGH: 75,
    ReasoningEffort.MAX: 100,
}

EFFORT_LINE = (
    "Reasoning Effort: {number} (range 1-100, the higher the value, the more thorough the "
    "reasoning)\n\n"
)

# Answer length when the request names none: lowered to the room that is left in the context.
DEFAULT_MAX_TOKENS = 8_192
DEFAULT_MAX_TOKENS_THINKING = 65_536
DEFAULT_MAX_TOKENS_MAX_EFFORT = 131_072

# The only control tokens that assistant text may contain: marks on places of an image.
GROUNDING_SPELLINGS = (
    "<｜ref｜>",
    "<｜/ref｜>",
    "<｜box｜>",
    "<｜/box｜>",
    "<｜point｜>",
    "<｜/point｜>",
    "<｜polygon｜>",
    "<｜/polygon｜>",
)

# Spelling of the image token: the codec's own default, and the one in V4.1 checkpoints.
IMAGE_SPELLING = "<｜image｜>"
CHECKPOINT_IMAGE_SPELLING = "<｜deepseek_image｜>"


# Tasks that a prompt can end with instead of asking for an answer; `action` follows the marks that
# ask for one. The names are those of the released reference encoder.
TASK_SPELLINGS = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Spellings of the control tokens; every one can be overridden for another tokenizer.

    `grounding` holds those spellings that assistant text may carry as control tokens. `dsml` stands
    inside the tags of tool calls. A token with an empty spelling is left out of prompts.
    """

    bos: str = "<｜begin▁of▁sentence｜>"
    eos: str = "<｜end▁of▁sentence｜>"
    thinking_start: str = "<think>"
    thinking_end: str = "</think>"
    system: str = "<｜System｜>"
    user: str = "<｜User｜>"
    assistant: str = "<｜Assistant｜>"
    latest_reminder: str = "<｜latest_reminder｜>"
    dsml: str = "｜DSML｜"
    image: str = IMAGE_SPELLING
    grounding: tuple[str, ...] = GROUNDING_SPELLINGS
