"""Output ids -> reasoning and content, incrementally.

Contract: fed with the ids of one answer in any grouping, the concatenated result is the same.
`</think>` ends the reasoning only as the control token, never as ordinary text. Newlines at the
beginning of reasoning and content, and before `</think>`, are no part of the text. Used by the
protocol events; tool calls, stop strings and JSON mode will become further stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.recipe.conversation import OutputStage
from headrace.recipe.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New text; both parts may be empty. Reasoning always comes before content."""

    reasoning: str = ""
    content: str = ""


class OutputParser:
    """State machine of one answer.

    thinking_end: spelling of the control token that ends the reasoning.
    """

    def __init__(self, tokenizer: Tokenizer, stage: OutputStage, thinking_end: str) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._thinking_end_id = tokenizer.added[thinking_end]
        self._in_reasoning = stage in (OutputStage.REASONING, OutputStage.REASONING_CONTINUATION)
        # While true, newlines are dropped: nothing but newlines came so far in this stage.
        self._at_start = stage in (OutputStage.REASONING, OutputStage.CONTENT)
        # Newlines at the end of the reasoning so far: dropped if `</think>` follows.
        self._held_newlines = ""
        self.reasoning_tokens = 0

    def push(self, token_ids: Sequence[int]) -> OutputDelta:
        """Text that became certain with these ids."""
        reasoning: list[str] = []
        content: list[str] = []
        start = 0
        for end, token_id in enumerate(token_ids):
            if token_id == self._thinking_end_id:
                self._text(self._detokenizer.push(token_ids[start:end]), reasoning, content)
                self._count(end - start)
                self._text(self._detokenizer.flush(), reasoning, content)
                self._on_thinking_end()
                start = end + 1
        self._text(self._detokenizer.push(token_ids[start:]), reasoning, content)
        self._count(len(token_ids) - start)
        return OutputDelta("".join(reasoning), "".join(content))

    def flush(self) -> OutputDelta:
        """What is left at the end of the answer."""
        reasoning: list[str] = []
        content: list[str] = []
        self._text(self._detokenizer.flush(), reasoning, content)
        reasoning.append(self._held_newlines)
        self._held_newlines = ""
        return OutputDelta("".join(reasoning), "".join(content))

    def _on_thinking_end(self) -> None:
        # A second `</think>` is dropped too, but newlines after it stay.
        self._at_start = self._in_reasoning
        self._in_reasoning = False
        self._held_newlines = ""

    def _text(self, text: str, reasoning: list[str], content: list[str]) -> None:
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        if not text:
            return
        if not self._in_reasoning:
            content.append(text)
            return
        stripped = text.rstrip("\n")
        if stripped:
            reasoning.append(self._held_newlines)
            reasoning.append(stripped)
            self._held_newlines = ""
        self._held_newlines += text[len(stripped) :]

    def _count(self, tokens: int) -> None:
        if self._in_reasoning:
            self.reasoning_tokens += tokens
