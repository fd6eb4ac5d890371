"""What a drawn task is: a conversation that asks for an answer, the answer, and its check.

Contract: plain data and pure functions; an item depends on its family and seed alone. A sample is
one drawn dialogue: its items in order, the last one holding the whole of it. Used by `families`,
`run` and by the training data.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.recipe.constants import ReasoningEffort
from headrace.recipe.conversation import (
    AssistantMessage,
    Conversation,
    Message,
    PromptText,
    SystemMessage,
    UserMessage,
)

# Seeds from here on are for tests: no training item is ever drawn from one.
FIRST_TEST_SEED = 10**9


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model answered. calls: (name, arguments as parsed) in order."""

    content: str
    calls: tuple[tuple[str, Any], ...] = ()


Check = Callable[[Reply], bool]


@dataclass(frozen=True, slots=True)
class Item:
    """conversation ends where the answer begins; answer: the expected one; check: any right one.

    part: which row of the table it counts in, within its family. valid: a weaker check (well-formed
    at all), where the family has one.
    """

    family: str
    part: str
    conversation: Conversation
    answer: AssistantMessage
    check: Check
    valid: Check | None = None


Sample = tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Draw:
    """How to draw: thinking on or off, and for long texts their length in tokens (about).

    far: what is asked about stands at the far end of the text, as in the evaluation by distance.
    """

    thinking: bool = False
    tokens: int = 1000
    far: bool = False


_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Answer in as few words as possible.",
    "You are headrace, a small test model.",
    "Be precise and short.",
    "You help people with everyday tasks.",
)
_EFFORTS = (None, None, ReasoningEffort.LOW, ReasoningEffort.MAX)


def seeded(family: str, seed: int) -> random.Random:
    """The generator of one sample: families draw independently from equal seeds."""
    return random.Random(f"{family}:{seed}")


def user(text: str) -> UserMessage:
    """A message of the user."""
    return UserMessage(PromptText.of(text))


def system(text: str) -> SystemMessage:
    """Instructions."""
    return SystemMessage(PromptText.of(text))


def framed(rng: random.Random, messages: tuple[Message, ...], **fields: Any) -> Conversation:
    """A conversation of these messages, now and then with instructions in front."""
    if rng.random() < 0.35:
        messages = (system(rng.choice(_SYSTEMS)), *messages)
    return Conversation(messages, reasoning_effort=rng.choice(_EFFORTS), **fields)


def answer_of(text: str, thought: str | None, draw: Draw) -> AssistantMessage:
    """The expected answer; the thought is left out where thinking is off."""
    return AssistantMessage(text, reasoning_content=(thought or "") if draw.thinking else None)


def says(text: str) -> Check:
    """Check: exactly this content (but for white space around it) and no calls."""
    return lambda reply: reply.content.strip() == text and not reply.calls


def single(
    rng: random.Random, family: str, part: str, question: str, text: str, thought: str, draw: Draw
) -> Sample:
    """A sample of one question with one right text."""
    conversation = framed(rng, (user(question),), thinking=draw.thinking)
    return (Item(family, part, conversation, answer_of(text, thought, draw), says(text)),)
