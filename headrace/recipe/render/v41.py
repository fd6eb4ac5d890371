"""Prompt format of DeepSeek-V4.1.

Contract: `render` is a pure function Conversation -> RenderedPrompt, byte-identical to the official
codec (spec/recipe.md 4). Control tokens come only from this template, from places of images and
from grounding marks in assistant text. Called by `render/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.recipe.constants import EFFORT_LINE, SpecialTokens
from headrace.recipe.conversation import (
    AssistantMessage,
    Conversation,
    FormatKind,
    LatestReminder,
    Message,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from headrace.recipe.json_text import python_json
from headrace.recipe.options import ModelVersion
from headrace.recipe.prompt_texts import prompt_texts
from headrace.recipe.render.common import CallFormat, ask, grounded, tool_texts, tools_before
from headrace.recipe.render.prompt import PromptBuilder, RenderedPrompt

CALLS = CallFormat(" calls", " invoke", " parameter", "\n", python_json)
_USER_SIDE = (UserMessage, ToolMessage)
_JSON_FORMATS = (FormatKind.JSON_OBJECT, FormatKind.JSON_SCHEMA)


def render(conversation: Conversation, special: SpecialTokens) -> RenderedPrompt:
    """The prompt that asks for the next answer (or goes on with a prefix message)."""
    messages = _in_order(conversation.messages)
    renders_tools = conversation.renders_tools
    has_extras = renders_tools or conversation.response_format.kind in _JSON_FORMATS
    system_first = bool(messages) and type(messages[0]) is SystemMessage
    thinking = conversation.thinking
    prompt = PromptBuilder(special.image)
    prompt.special(special.bos)
    begins = bool(messages) or has_extras
    if begins and (thinking or system_first or has_extras):
        prompt.special(special.system)
    if begins and thinking:  # clients: effort-number
        prompt.plain(EFFORT_LINE.format(number=conversation.effort_number))
    if has_extras and not system_first:
        _extras(prompt, conversation, special)
    turn_is_open = False
    for index, message in enumerate(messages):
        if isinstance(message, _USER_SIDE):
            # Neighbouring messages of the user's side share one token.
            if turn_is_open:
                prompt.plain("\n\n")
            else:
                prompt.special(special.user)
            _user_side(prompt, message)
            turn_is_open = True
            continue
        turn_is_open = False
        if isinstance(message, AssistantMessage):
            # A message at the very start of a prompt never shows its reasoning.
            shows_reasoning = (
                thinking and (index > 0 or has_extras) and (renders_tools or message.prefix)
            )
            _assistant(prompt, message, special, shows_reasoning)
        elif isinstance(message, LatestReminder):
            prompt.special(special.latest_reminder)
            prompt.plain(message.content)
        else:
            if index > 0:  # the token in front of message 0 is written above
                prompt.special(special.system)
            prompt.text(message.content)
            if index == 0 and has_extras:
                _extras(prompt, conversation, special)
            if message.tools:
                prompt.plain("\n\n### Updated Tool Schemas\n\n")
                prompt.plain(tool_texts(message.tools, ModelVersion.V41))
    last = messages[-1] if messages else None
    goes_on = isinstance(last, AssistantMessage) and last.prefix
    ask(prompt, conversation, special, CALLS, goes_on=goes_on)
    return prompt.build()


def _in_order(messages: Sequence[Message]) -> list[Message]:
    """Of neighbouring reminders the first one stays; results stand in the order of their calls."""
    result: list[Message] = []
    call_ids: tuple[str, ...] = ()
    answers: list[int] = []  # places of results with an id in the current turn of the user's side
    for message in messages:
        if isinstance(message, ToolMessage):
            if message.tool_call_id is not None:
                answers.append(len(result))
        elif not isinstance(message, UserMessage):
            if len(answers) > 1:
                _sort_results(result, answers, call_ids)
            answers = []
            if isinstance(message, AssistantMessage) and message.tool_calls:
                call_ids = tuple(call.id for call in message.tool_calls)
            elif isinstance(message, LatestReminder) and (
                result and isinstance(result[-1], LatestReminder)
            ):
                continue
        result.append(message)
    if len(answers) > 1:
        _sort_results(result, answers, call_ids)
    return result


def _sort_results(messages: list[Message], places: list[int], call_ids: Sequence[str]) -> None:
    """Put the results at `places` into the order of the calls; unknown ids count as the first."""
    rank: dict[str, int] = {}
    for index, call_id in enumerate(call_ids):
        rank.setdefault(call_id, index)
    results = [message for i in places if isinstance(message := messages[i], ToolMessage)]
    results.sort(key=lambda message: rank.get(message.tool_call_id or "", 0))
    for place, message in zip(places, results, strict=True):
        messages[place] = message


def _extras(prompt: PromptBuilder, conversation: Conversation, special: SpecialTokens) -> None:
    """What the first system message ends with: tools and the form of the answer."""
    texts = prompt_texts(ModelVersion.V41)
    if conversation.renders_tools:
        prompt.plain("\n\n")
        prompt.prepared(tools_before(ModelVersion.V41, special))
        shown = [tool for tool in conversation.tools if not tool.defer_loading]
        prompt.plain(tool_texts(shown, ModelVersion.V41))
        prompt.plain(texts.tools_after)
    answer = conversation.response_format
    if answer.kind is FormatKind.JSON_OBJECT:
        prompt.plain(f"\n\n{texts.json_object}")
    elif answer.kind is FormatKind.JSON_SCHEMA:
        prompt.plain(f"\n\n{texts.json_schema}{python_json(answer.value)}")


def _user_side(prompt: PromptBuilder, message: UserMessage | ToolMessage) -> None:
    if isinstance(message, UserMessage):
        prompt.text(message.content)
    else:
        prompt.plain("<tool_result>")
        prompt.text(message.content)
        prompt.plain("</tool_result>")


def _assistant(
    prompt: PromptBuilder, message: AssistantMessage, special: SpecialTokens, shows_reasoning: bool
) -> None:
    """An answer; one that is to be continued stays open at its end, also inside the reasoning."""
    prompt.special(special.assistant)
    if shows_reasoning:
        prompt.special(special.thinking_start)
        if message.reasoning_content:
            grounded(prompt, message.reasoning_content, special)
        if message.content or message.tool_calls or not message.prefix:
            prompt.special(special.thinking_end)
    else:
        prompt.special(special.thinking_end)
    grounded(prompt, message.content, special)
    if message.tool_calls:
        CALLS.write(prompt, message.tool_calls, special.dsml)
    if not message.prefix:
        prompt.special(special.eos)
