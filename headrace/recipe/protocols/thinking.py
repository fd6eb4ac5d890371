"""Thinking mode of a request, and the reasoning in its history (spec recipe 6.1, 6.5).

Contract: `resolve_thinking` decides mode and effort, `settle_reasoning` makes the history fit the
mode. Level `clients` knows two more switches: the template argument that other servers have, and
an effort as a number 1..100. Called by every protocol module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.errors import InvalidBody, InvalidRequest
from headrace.recipe.constants import EFFORT_BY_NAME, ReasoningEffort
from headrace.recipe.conversation import AssistantMessage, Message, UserMessage
from headrace.recipe.options import ConvertOptions, MissingReasoning

_THINKING_TYPES = {"enabled": True, "adaptive": True, "disabled": False}
_EFFORT_NAMES = ("none", *EFFORT_BY_NAME)


def resolve_thinking(
    *,
    type_: str | None,
    template: bool | None,
    effort: str | int | None,
    options: ConvertOptions,
    type_param: str = "thinking.type",
    effort_param: str = "reasoning_effort",
) -> tuple[bool, ReasoningEffort | int | None]:
    """Mode and effort. Precedence: `type_` > `template` > effort > the default of the options."""
    known = check_effort(effort, options, effort_param) if effort is not None else None
    if type_ is not None:
        thinking = check_thinking_type(type_, type_param)
    elif template is not None and not options.official:
        thinking = template  # clients: thinking-switches
    elif effort is not None:
        thinking = effort != "none"
    else:
        thinking = options.default_thinking_mode
    if not thinking:
        return False, None
    return True, ReasoningEffort.HIGH if known is None else known


def check_thinking_type(type_: str, param: str = "thinking.type") -> bool:
    """Whether a `thinking.type` switches thinking on; InvalidBody for unknown ones."""
    thinking = _THINKING_TYPES.get(type_)
    if thinking is None:
        raise InvalidBody(
            f"invalid request body: unknown variant `{type_}`, expected one of `adaptive`, "
            "`enabled`, `disabled`",
            param=param,
        )
    return thinking


def check_effort(
    effort: str | int, options: ConvertOptions, param: str = "reasoning_effort"
) -> ReasoningEffort | int | None:
    """The effort as prompts know it (None for `none`); InvalidBody for unknown ones."""
    if isinstance(effort, str):
        if effort == "none":
            return None
        known = EFFORT_BY_NAME.get(effort)
        if known is None:
            names = ", ".join(f"`{name}`" for name in _EFFORT_NAMES)
            raise InvalidBody(
                f"invalid request body: unknown variant `{effort}`, expected one of {names}",
                param=param,
            )
        return known
    if options.official:
        raise InvalidBody(
            f"invalid request body: invalid type: integer `{effort}`, expected string or map",
            param=param,
        )
    # clients: effort-number. The scale of the prompt itself, as the reference encoder takes it.
    if not 1 <= effort <= 100:
        raise InvalidBody(
            f"invalid request body: {param} as a number must be in [1, 100], got {effort}",
            param=param,
        )
    return effort


def settle_reasoning(
    messages: Sequence[Message],
    *,
    thinking: bool,
    tools_declared: bool,
    options: ConvertOptions,
    message: str,
) -> tuple[Message, ...]:
    """History whose reasoning fits the mode: removed outside thinking, "" where it is missing.

    message: the text when the options reject history without its reasoning.
    """
    if thinking and options.missing_reasoning is MissingReasoning.REJECT:
        _reject_missing(messages, tools_declared, message)
    settled: list[Message] = []
    for entry in messages:
        if isinstance(entry, AssistantMessage):
            if thinking:
                if entry.reasoning_content is None:
                    entry = replace(entry, reasoning_content="")
            elif entry.reasoning_content is not None:
                entry = replace(entry, reasoning_content=None)
        settled.append(entry)
    return tuple(settled)


def _reject_missing(messages: Sequence[Message], tools_declared: bool, message: str) -> None:
    for number in range(len(messages) - 1, -1, -1):
        entry = messages[number]
        if isinstance(entry, UserMessage):
            return
        if not isinstance(entry, AssistantMessage) or entry.reasoning_content is not None:
            continue
        calls = entry.tool_calls or ()
        if (calls or tools_declared) and not any(_without_reasoning(call.id) for call in calls):
            raise InvalidRequest(message, param=f"messages[{number}]")


def _without_reasoning(call_id: str) -> bool:
    """Whether the id of a call says that no reasoning came before it."""
    return call_id.isascii() and (call_id[8:11] == "ET_" or call_id[6:8] == "ET")
