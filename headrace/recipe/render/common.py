"""What the prompt formats have in common: texts with control tokens, call arguments, the ending.

Contract: pure functions that append to a PromptBuilder or return plain data; nothing here knows
the order of messages. Called by `render/v41.py` and `render/v4.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from os.path import commonprefix
from typing import Any

import msgspec

from headrace.recipe.constants import TASK_SPELLINGS, SpecialTokens
from headrace.recipe.conversation import Conversation, ToolCall, ToolChoice, ToolDefinition
from headrace.recipe.json_text import parse_arguments, python_json, spaced_json
from headrace.recipe.options import ModelVersion
from headrace.recipe.prompt_texts import prompt_texts
from headrace.recipe.render.prompt import PromptBuilder

_REMEMBERED_BYTES = 262_144  # longer lists of tools are written every time
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


def grounded(prompt: PromptBuilder, text: str, special: SpecialTokens) -> None:
    """Assistant text: grounding spellings are control tokens, all others stay plain."""
    prefix, pattern = _grounding(special.grounding)
    if pattern is None or prefix not in text:
        prompt.plain(text)
        return
    end = 0
    for match in pattern.finditer(text):
        prompt.plain(text[end : match.start()])
        prompt.special(match.group())
        end = match.end()
    prompt.plain(text[end:])


@lru_cache(maxsize=16)
def _grounding(spellings: tuple[str, ...]) -> tuple[str, re.Pattern[str] | None]:
    """What all spellings begin with, and the pattern that finds them.

    The official search takes the match that ends first. A spelling with another one inside can thus
    only win when the other one is its end; without the rest, leftmost is the same as first to end.
    """
    given = {spelling for spelling in spellings if spelling}
    found = [a for a in given if not any(b in a[:-1] for b in given)]
    if not found:
        return "", None
    prefix = commonprefix(found)  # noqa: RUF071 - characters are meant
    return prefix, re.compile("|".join(map(re.escape, found)))


@lru_cache(maxsize=16)
def tools_before(version: ModelVersion, special: SpecialTokens) -> tuple[str, ...]:
    """The text in front of the tool schemas, alternating with its control tokens."""
    default = SpecialTokens()
    spelling = {
        default.dsml: special.dsml,
        default.thinking_start: special.thinking_start,
        default.thinking_end: special.thinking_end,
    }
    pieces = re.split(f"({'|'.join(map(re.escape, spelling))})", prompt_texts(version).tools_before)
    prompt = PromptBuilder("")
    for number, piece in enumerate(pieces):
        if number % 2:
            prompt.special(spelling[piece])
        else:
            prompt.plain(piece)
    return prompt.build().parts


def tool_texts(tools: Iterable[ToolDefinition], version: ModelVersion) -> str:
    """The tool objects as prompts show them, one a line.

    Agents send the same long list with every turn, so its text is remembered by its bytes.
    """
    shown = [
        {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters}
        for tool in tools
    ]
    key = _encode(shown)
    if len(key) > _REMEMBERED_BYTES:
        return _tool_lines(shown, version)
    return _remembered_tool_lines(key, version)


@lru_cache(maxsize=32)
def _remembered_tool_lines(tools: bytes, version: ModelVersion) -> str:
    return _tool_lines(_decode(tools), version)


def _tool_lines(tools: Iterable[Any], version: ModelVersion) -> str:
    return "\n".join(map(python_json if version is ModelVersion.V41 else spaced_json, tools))


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a version writes calls: names of the tags, and what stands for no arguments at all."""

    block: str
    invoke: str
    parameter: str
    nothing: str
    to_json: Callable[[Any], str]

    def write(self, prompt: PromptBuilder, calls: Iterable[ToolCall], dsml: str) -> None:
        """The block of calls at the end of an answer.

        Each call of each turn comes by here, so the pieces are put together in place: every text
        between two control tokens is closed only when it is known what follows it.
        """
        parts = ["\n\n<"]
        pending = f"{self.block}>\n"
        for call in calls:
            parts += (dsml, f"{pending}<")
            pending = f'{self.invoke} name="{call.name}">\n'
            values = parse_arguments(call.arguments)
            if values is None:
                values = {"arguments": call.arguments}
            for name, value in values.items():
                if type(value) is str:
                    tag = f'{self.parameter} name="{name}" string="true">{value}</'
                else:
                    text = self.to_json(value)
                    tag = f'{self.parameter} name="{name}" string="false">{text}</'
                parts += (dsml, f"{pending}<", dsml, tag)
                pending = f"{self.parameter}>\n"
            parts += (dsml, f"{pending}</" if values else f"{pending}{self.nothing}</")
            pending = f"{self.invoke}>\n"
        parts += (dsml, f"{pending}</", dsml, f"{self.block}>")
        if dsml:
            prompt.prepared(parts)
        else:
            prompt.plain("".join(parts))


def ask(
    prompt: PromptBuilder,
    conversation: Conversation,
    special: SpecialTokens,
    calls: CallFormat,
    *,
    goes_on: bool,
) -> None:
    """The end of a prompt: the marks after which the answer begins, or a task.

    goes_on: the last message is the beginning of the answer, so that nothing is asked. When a call
    is required, the prompt opens its block. As in the released reference encoder a task token takes
    the place of the marks (it may also follow a finished answer: `title`), except for `action`,
    which stands behind them; a task never calls tools.
    """
    task = conversation.task  # clients: task
    if task == TASK_SPELLINGS["action"] or (task is None and not goes_on):
        prompt.special(special.assistant)
        prompt.special(special.thinking_start if conversation.thinking else special.thinking_end)
    if task is not None:
        prompt.special(task)
    elif conversation.tool_choice is ToolChoice.REQUIRED and conversation.renders_tools:
        prompt.plain("\n\n<")
        prompt.special(special.dsml)
        prompt.plain(f"{calls.block}>\n")
