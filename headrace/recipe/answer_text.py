"""Output ids -> reasoning, content and tool calls as plain values, without any protocol.

Contract: fed with the ids of one answer in any grouping, the joined result is the same; text is
given as soon as it is certain, calls when the answer is complete. For `generate`, which writes
neither events nor responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.recipe.chunks import EngineFinish, Finish, Tokens
from headrace.recipe.codec import Codec
from headrace.recipe.converted import ParsingOptions
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


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text; both parts may be empty. Reasoning always comes before content."""

    reasoning: str = ""
    content: str = ""


@dataclass(slots=True)
class _Call:
    name: str
    arguments: list[str] = field(default_factory=list)


class AnswerText:
    """The text of one answer."""

    def __init__(self, codec: Codec, parsing: ParsingOptions) -> None:
        self._parser = OutputParser(parsing, codec.special, Level.CLIENTS, codec.tokenizer)
        self._calls: list[_Call] = []
        self._cut = False

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Name and arguments (JSON text) of each complete call; call it after `finish`."""
        calls = self._calls[:-1] if self._cut else self._calls
        return [(call.name, "".join(call.arguments)) for call in calls]

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Text that became certain with these ids."""
        return self._delta(self._parser.push(Tokens(token_ids)))

    def finish(self, *, stopped: bool) -> TextDelta:
        """What is left at the end. stopped: the model ended the answer, not its length."""
        if stopped and self._calls:
            return self._delta(self._parser.push(Finish(EngineFinish.STOP)))
        # A finish would show reasoning without an end as the answer, too: clients want that,
        # a file tells the two apart.
        return self._delta(self._parser.finish())

    def _delta(self, items: Sequence[Item]) -> TextDelta:
        reasoning: list[str] = []
        content: list[str] = []
        for item in items:
            if isinstance(item, Reasoning):
                reasoning.append(item.text)
            elif isinstance(item, Content):
                content.append(item.text)
            elif isinstance(item, CallNamed):
                self._calls.append(_Call(item.name))
            elif isinstance(item, CallArguments):
                self._calls[-1].arguments.append(item.text)
            elif isinstance(item, AnswerFinish):
                self._cut = item.open_call
        return TextDelta("".join(reasoning), "".join(content))
