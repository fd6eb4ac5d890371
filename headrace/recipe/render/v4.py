"""Prompt format of DeepSeek-V4.

Contract: `render` is a pure function Conversation -> RenderedPrompt, byte-identical to the official
codec (spec/recipe.md 5). It differs from V4.1 in nearly every rule of order and joining, so the two
share no skeleton. Called by `render/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.recipe.constants import EFFORT_NUMBER, ReasoningEffort, SpecialTokens
from headrace.recipe.conversation import (
    AssistantMessage,
    Conversation,
    FormatKind,
    LatestReminder,
    Message,
    PromptText,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from headrace.recipe.json_text import spaced_json
from headrace.recipe.options import ModelVersion
from headrace.recipe.prompt_texts import prompt_texts
from headrace.recipe.render.common import CallFormat, ask, grounded, tool_texts, tools_before
from headrace.recipe.render.prompt import PromptBuilder, RenderedPrompt

CALLS = CallFormat("tool_calls", "invoke", "parameter", "", spaced_json)


def render(conversation: Conversation, special: SpecialTokens) -> RenderedPrompt:
    """The prompt that asks for the next answer (or goes on with a prefix message)."""
    messages = _in_order(conversation.messages)
    prompt = PromptBuilder(special.image)
    prompt.special(special.bos)
    if conversation.thinking:
        prompt.plain(prompt_texts(ModelVersion.V4).efforts[_effort(conversation.reasoning_effort)])
    _system(prompt, conversation, special)
    previous: Message | None = None
    last = len(messages) - 1
    for index, message in enumerate(messages):
        if isinstance(message, UserMessage):
            if isinstance(previous, (UserMessage, ToolMessage)):
                prompt.plain("\n\n")
            else:
                prompt.special(special.user)
            prompt.text(message.content)
        elif isinstance(message, ToolMessage):
            # A result behind text of the user begins a turn of its own.
            if isinstance(previous, ToolMessage):
                prompt.plain("\n\n")
            else:
                prompt.special(special.user)
            prompt.plain("<tool_result>")
            prompt.text(message.content)
            prompt.plain("</tool_result>")
        elif isinstance(message, AssistantMessage):
            _assistant(prompt, message, special, conversation)
            if not (message.prefix and index == last):
                prompt.special(special.eos)
        elif isinstance(message, LatestReminder):
            prompt.special(special.latest_reminder)
            prompt.plain(message.content)
        previous = message
    goes_on = isinstance(previous, AssistantMessage) and previous.prefix
    ask(prompt, conversation, special, CALLS, goes_on=goes_on)
    return prompt.build()


def _effort(effort: ReasoningEffort | int | None) -> ReasoningEffort:
    """The effort that V4 has a text for; numbers are those that V4.1 gives to the names."""
    if effort is None:
        return ReasoningEffort.HIGH
    if isinstance(effort, ReasoningEffort):
        return effort
    # clients: effort-number
    if effort <= EFFORT_NUMBER[ReasoningEffort.LOW]:
        return ReasoningEffort.LOW
    if effort <= EFFORT_NUMBER[ReasoningEffort.HIGH]:
        return ReasoningEffort.HIGH
    return ReasoningEffort.MAX


def _in_order(messages: Iterable[Message]) -> list[Message]:
    """Messages without the system's, users joined, results sorted by call id."""
    result: list[Message] = []
    run: list[PromptText] = []
    for message in messages:
        if isinstance(message, UserMessage):
            run.append(message.content)
        elif not isinstance(message, SystemMessage):
            if run:
                result.append(UserMessage(_joined(run)))
                run = []
            result.append(message)
    if run:
        result.append(UserMessage(_joined(run)))
    _sort_results(result)
    return result


def _joined(texts: Sequence[PromptText]) -> PromptText:
    """One text of several, with a blank line between those that are not empty."""
    if len(texts) == 1:
        return texts[0]
    parts: list[str] = []
    open_part: list[str] = []
    for text in texts:
        if _is_empty(text):
            continue
        if parts or open_part:
            open_part.append("\n\n")
        open_part.append(text.parts[0])
        for part in text.parts[1:]:
            parts.append("".join(open_part))
            open_part = [part]
    parts.append("".join(open_part))
    return PromptText(tuple(parts), tuple(image for text in texts for image in text.images))


def _is_empty(text: PromptText) -> bool:
    return len(text.parts) == 1 and not text.parts[0]


def _sort_results(messages: list[Message]) -> None:
    """Sort as many messages behind each answer as it has calls, if there are that many."""
    # The places are those before any sorting, also when an answer was moved by it.
    places = [
        (place, len(message.tool_calls))
        for place, message in enumerate(messages, start=1)
        if isinstance(message, AssistantMessage) and message.tool_calls
    ]
    for place, count in places:
        if place + count <= len(messages):
            messages[place : place + count] = sorted(
                messages[place : place + count], key=_result_rank
            )


def _result_rank(message: Message) -> tuple[int, str]:
    if not isinstance(message, ToolMessage):
        return 2, ""
    return (0, "") if message.tool_call_id is None else (1, message.tool_call_id)


def _system(prompt: PromptBuilder, conversation: Conversation, special: SpecialTokens) -> None:
    """All system texts in front: the conversation's, the tools, the form of the answer."""
    separator = ""
    for message in conversation.messages:
        if isinstance(message, SystemMessage) and not _is_empty(message.content):
            prompt.plain(separator)
            prompt.text(message.content)
            separator = "\n\n"
    texts = prompt_texts(ModelVersion.V4)
    if conversation.renders_tools:
        prompt.plain("\n\n")
        prompt.prepared(tools_before(ModelVersion.V4, special))
        shown = [tool for tool in conversation.tools if not tool.defer_loading]
        if shown:
            prompt.plain(tool_texts(shown, ModelVersion.V4))
            prompt.plain("\n")
        prompt.plain(texts.tools_after)
    answer = conversation.response_format
    if answer.kind is FormatKind.JSON_OBJECT:
        prompt.plain(f"\n\n{texts.json_object}")
    elif answer.kind is FormatKind.JSON_SCHEMA:
        prompt.plain(f"\n\n{texts.json_schema}{spaced_json(answer.value)}")


def _assistant(
    prompt: PromptBuilder,
    message: AssistantMessage,
    special: SpecialTokens,
    conversation: Conversation,
) -> None:
    """An answer without its end."""
    prompt.special(special.assistant)
    if message.reasoning_content is not None and (message.prefix or conversation.renders_tools):
        prompt.special(special.thinking_start)
        grounded(prompt, message.reasoning_content, special)
    if message.content or not (conversation.thinking and message.prefix):
        prompt.special(special.thinking_end)
    grounded(prompt, message.content, special)
    if message.tool_calls is not None:
        calls = sorted(message.tool_calls, key=lambda call: call.id)
        CALLS.write(prompt, calls, special.dsml)
