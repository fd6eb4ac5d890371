"""Prompt format of DeepSeek-V4.1 for text conversations.

Contract: `render` is a pure function Conversation -> RenderedPrompt, byte-identical to the official
codec for the messages that `recipe/conversation.py` knows. Control tokens come only from this
template, and grounding marks from assistant text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from headrace.recipe.constants import EFFORT_LINE, SpecialTokens
from headrace.recipe.conversation import (
    AssistantMessage,
    Conversation,
    LatestReminder,
    Message,
    SystemMessage,
    UserMessage,
)
from headrace.recipe.render.prompt import PromptBuilder, RenderedPrompt


def render(conversation: Conversation, special: SpecialTokens) -> RenderedPrompt:
    """The prompt that asks for the next answer (or goes on with a prefix message)."""
    messages = _normalise(conversation.messages)
    prompt = PromptBuilder()
    prompt.special(special.bos)
    if conversation.thinking:
        prompt.special(special.system)
        prompt.plain(EFFORT_LINE.format(number=conversation.effort_number))
    elif messages and isinstance(messages[0], SystemMessage):
        prompt.special(special.system)
    for index, message in enumerate(messages):
        match message:
            case SystemMessage():
                # In front of message 0 the token was written above.
                if index > 0:
                    prompt.special(special.system)
                prompt.plain(message.content)
            case UserMessage():
                prompt.special(special.user)
                prompt.plain(message.content)
            case LatestReminder():
                prompt.special(special.latest_reminder)
                prompt.plain(message.content)
            case AssistantMessage():
                # A message at the very start never shows its reasoning.
                shows_reasoning = conversation.thinking and index > 0 and message.prefix
                _assistant(prompt, message, special, shows_reasoning)
    if not (messages and isinstance(messages[-1], AssistantMessage) and messages[-1].prefix):
        prompt.special(special.assistant)
        prompt.special(special.thinking_start if conversation.thinking else special.thinking_end)
    return prompt.build()


def _normalise(messages: Iterable[Message]) -> list[Message]:
    """Join neighbouring user messages; of neighbouring reminders the first one stays."""
    result: list[Message] = []
    for message in messages:
        last = result[-1] if result else None
        if isinstance(message, UserMessage) and isinstance(last, UserMessage):
            result[-1] = UserMessage(f"{last.content}\n\n{message.content}")
        elif isinstance(message, LatestReminder) and isinstance(last, LatestReminder):
            continue
        else:
            result.append(message)
    return result


def _assistant(
    prompt: PromptBuilder, message: AssistantMessage, special: SpecialTokens, shows_reasoning: bool
) -> None:
    """One assistant message.

    Without tools the reasoning of earlier answers is dropped; only a prefix message keeps its own,
    and it keeps the reasoning open when there is no content yet.
    """
    prompt.special(special.assistant)
    if shows_reasoning:
        prompt.special(special.thinking_start)
        _grounded(prompt, message.reasoning_content or "", special)
        if message.content:
            prompt.special(special.thinking_end)
    else:
        prompt.special(special.thinking_end)
    _grounded(prompt, message.content, special)
    if not message.prefix:
        prompt.special(special.eos)


def _grounded(prompt: PromptBuilder, text: str, special: SpecialTokens) -> None:
    """Assistant text: grounding spellings are control tokens, all others stay plain."""
    if not special.grounding:
        prompt.plain(text)
        return
    pattern = "|".join(map(re.escape, special.grounding))
    end = 0
    for match in re.finditer(pattern, text):
        prompt.plain(text[end : match.start()])
        prompt.special(match.group())
        end = match.end()
    prompt.plain(text[end:])
