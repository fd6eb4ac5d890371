"""Runs the output parser over chunks and joins the items, for its tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from headrace.recipe.chunks import Chunk, EngineFinish, Finish, Text, Tokens
from headrace.recipe.constants import SpecialTokens
from headrace.recipe.converted import ParsingOptions, ThinkingStage
from headrace.recipe.options import Level
from headrace.recipe.parser.items import (
    AnswerFinish,
    CallArguments,
    CallNamed,
    Content,
    Item,
    Reasoning,
)
from headrace.recipe.parser.parser import OutputParser
from tests.unit.recipe import golden

MARK = "｜DSML｜"
EOS = "<｜end▁of▁sentence｜>"
TOOLS = ParsingOptions(parse_tool_calls=True)
THINKING = ParsingOptions(parse_tool_calls=True, thinking_stage=ThinkingStage.REASONING_START)


@dataclass
class Answer:
    """The joined items of an answer; calls are [name, arguments]."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    end: AnswerFinish | None = None

    @property
    def arguments(self) -> list[Any]:
        """The arguments of all calls, parsed; an object with a key twice is an error."""
        return [json.loads(text, object_pairs_hook=_unique) for _, text in self.calls]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    assert len(value) == len(pairs), pairs
    return value


def joined(items: Iterable[Item]) -> Answer:
    """The items of one answer, joined."""
    answer = Answer()
    for item in items:
        if isinstance(item, Reasoning):
            answer.reasoning += item.text
        elif isinstance(item, Content):
            answer.content += item.text
        elif isinstance(item, CallNamed):
            answer.calls.append([item.name, ""])
        elif isinstance(item, CallArguments) and answer.calls:
            answer.calls[-1][1] += item.text
        elif isinstance(item, AnswerFinish):
            answer.end = item
    return answer


def parse(
    chunks: Iterable[Chunk],
    parsing: ParsingOptions = TOOLS,
    level: Level = Level.CLIENTS,
    *,
    tokenizer: bool = False,
    special: SpecialTokens | None = None,
) -> list[Item]:
    """All items of these chunks."""
    known = golden.real_tokenizer() if tokenizer else None
    parser = OutputParser(parsing, special or SpecialTokens(), level, known)
    items: list[Item] = []
    for chunk in chunks:
        if parser.finished:
            break
        items += parser.push(chunk)
    return items + parser.finish()


def read(
    text: str,
    parsing: ParsingOptions = TOOLS,
    level: Level = Level.CLIENTS,
    finish: EngineFinish = EngineFinish.STOP,
) -> Answer:
    """The answer of a text, which has to be the same in one chunk and in single characters."""
    whole = joined(parse([Text(text), Finish(finish)], parsing, level))
    single = joined(parse([*map(Text, text), Finish(finish)], parsing, level))
    assert whole == single
    return whole


def read_ids(
    ids: list[int], parsing: ParsingOptions = TOOLS, finish: EngineFinish = EngineFinish.STOP
) -> Answer:
    """The same for ids."""
    whole = joined(parse([Tokens(ids), Finish(finish)], parsing, tokenizer=True))
    single = joined(parse([*(Tokens([i]) for i in ids), Finish(finish)], parsing, tokenizer=True))
    assert whole == single
    return whole


def parameter(name: str, value: str, string: str = ' string="true"') -> str:
    """A well-formed parameter."""
    return f'<{MARK} parameter name="{name}"{string}>{value}</{MARK} parameter>\n'


def call(*parameters: str, name: str = "f") -> str:
    """A well-formed call."""
    return f'<{MARK} invoke name="{name}">\n{"".join(parameters)}</{MARK} invoke>\n'


def block(*calls: str) -> str:
    """A well-formed block of calls."""
    return f"\n\n<{MARK} calls>\n{''.join(calls)}</{MARK} calls>"
