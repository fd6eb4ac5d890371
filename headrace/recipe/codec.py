"""A tokenizer bound to a checkpoint: conversation -> ids, and a parser for the answer.

Contract: made once per checkpoint by `ChatCodec.from_directory` (or from parts in tests), immutable
and thread-safe afterwards. Used by `serve`, `generate` and `LLM`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.core.sampling import StopScope
from headrace.errors import ContextTooLong
from headrace.recipe.binding import ConfigTokenIds, bind
from headrace.recipe.constants import SpecialTokens
from headrace.recipe.conversation import Conversation
from headrace.recipe.parser import OutputParser
from headrace.recipe.render.v41 import render
from headrace.recipe.tokenizer import Tokenizer


def check_length(least_tokens: int, context_limit: int, param: str) -> None:
    """Raise ContextTooLong when a prompt of at least `least_tokens` leaves no room to answer."""
    if least_tokens >= context_limit:
        raise ContextTooLong(
            f"This model's maximum context length is {context_limit} tokens. However, your "
            f"request has at least {least_tokens} tokens. Please reduce the length of the {param}.",
            param=param,
        )


@dataclass(frozen=True, slots=True)
class ChatCodec:
    """The V4.1 prompt format with the tokenizer of one checkpoint."""

    tokenizer: Tokenizer
    special: SpecialTokens

    @classmethod
    def from_directory(cls, directory: Path, special: SpecialTokens | None = None) -> ChatCodec:
        """Load tokenizer.json and check it against config.json.

        Raises CheckpointError or ModelConfigError that names what is missing.
        """
        tokenizer = Tokenizer.from_directory(directory)
        ids = ConfigTokenIds.from_directory(directory)
        return cls(tokenizer, bind(tokenizer, ids, special))

    def encode(self, conversation: Conversation, *, context_limit: int | None = None) -> list[int]:
        """Prompt ids. Raises InvalidRequest for text or roles that this tokenizer cannot encode.

        context_limit: tokens; a prompt that cannot be shorter is refused with ContextTooLong before
        it is tokenized, which would take long for nothing. One that is refused by its true length
        is left to the caller.
        """
        prompt = render(conversation, self.special)
        if context_limit is not None:
            check_length(self.tokenizer.least_tokens(prompt), context_limit, "messages")
        return self.tokenizer.encode_prompt(prompt)

    def parser(self, conversation: Conversation, stops: Sequence[str] = ()) -> OutputParser:
        """A fresh parser for the answer to `conversation`, with the stop strings of the request."""
        return OutputParser(
            self.tokenizer, conversation.output_stage, self.special.thinking_end, stops
        )

    def stop_scope(self, conversation: Conversation) -> StopScope:
        """The part of the answer in which stop strings count: its content."""
        return OutputParser.stop_scope(
            self.tokenizer, conversation.output_stage, self.special.thinking_end
        )
