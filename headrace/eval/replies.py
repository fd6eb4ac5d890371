"""Answer ids -> Reply, by the output parser of the codec.

Level `official`, which repairs nothing: what counts is what the model wrote.
Used by `run`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from headrace.errors import StreamError
from headrace.eval.items import Reply
from headrace.recipe.chunks import Finish, Tokens
from headrace.recipe.constants import SpecialTokens
from headrace.recipe.conversation import Conversation
from headrace.recipe.converted import ParsingOptions, ThinkingStage
from headrace.recipe.options import Level
from headrace.recipe.parser.items import CallArguments, CallNamed, Content
from headrace.recipe.parser.parser import OutputParser
from headrace.recipe.tokenizer import Tokenizer


def read_reply(
    ids: Sequence[int], conversation: Conversation, tokenizer: Tokenizer, special: SpecialTokens
) -> Reply:
    """What the ids (without the end-of-sentence token) say."""
    parsing = ParsingOptions(
        parse_tool_calls=conversation.renders_tools,
        thinking_stage=ThinkingStage.REASONING_START if conversation.thinking else None,
    )
    parser = OutputParser(parsing, special, Level.OFFICIAL, tokenizer)
    content: list[str] = []
    names: list[str] = []
    arguments: list[str] = []
    try:
        items = [*parser.push(Tokens(tuple(ids))), *parser.push(Finish())]
    except StreamError:
        items = []
    for item in items:
        if isinstance(item, Content):
            content.append(item.text)
        elif isinstance(item, CallNamed):
            names.append(item.name)
            arguments.append("")
        elif isinstance(item, CallArguments) and names:
            arguments[-1] += item.text
    calls = tuple((name, _parsed(text)) for name, text in zip(names, arguments, strict=True))
    return Reply("".join(content), calls)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
