"""Output ids -> reasoning and content, incrementally.

Contract: fed with the ids of one answer in any grouping, the concatenated result is the same.
`</think>` ends the reasoning only as the control token, never as ordinary text. Newlines at the
beginning of reasoning and content, and before `</think>`, are no part of the text. Content that may
become a stop string is held back; where one ends the answer is decided by the engine, which
searches what `stop_scope` says. Used by the protocol events; tool calls and JSON mode will become
further stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.sampling import StopScope
from headrace.core.stops import HeldText
from headrace.recipe.conversation import OutputStage
from headrace.recipe.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New text; both parts may be empty. Reasoning always comes before content.

    reasoning_ids, content_ids: which of the pushed ids belong to each, as places in them; a
    `</think>` belongs to neither. Text may lag behind its ids.
    """

    reasoning: str = ""
    content: str = ""
    reasoning_ids: Sequence[int] = ()
    content_ids: Sequence[int] = ()


class OutputParser:
    """State machine of one answer.

    thinking_end: spelling of the control token that ends the reasoning. stops: stop strings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stage: OutputStage,
        thinking_end: str,
        stops: Sequence[str] = (),
    ) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._thinking_end_id = tokenizer.added[thinking_end]
        self._in_reasoning = stage in (OutputStage.REASONING, OutputStage.REASONING_CONTINUATION)
        # While true, newlines are dropped: nothing but newlines came so far in this stage.
        self._at_start = stage in (OutputStage.REASONING, OutputStage.CONTENT)
        # Newlines at the end of the reasoning so far: dropped if `</think>` follows.
        self._held_newlines = ""
        self._held_content = HeldText(stops)
        self.reasoning_tokens = 0

    @staticmethod
    def stop_scope(tokenizer: Tokenizer, stage: OutputStage, thinking_end: str) -> StopScope:
        """Where stop strings count: in the content alone, as this parser sees it."""
        reasons = stage in (OutputStage.REASONING, OutputStage.REASONING_CONTINUATION)
        return StopScope(
            border_token=tokenizer.added[thinking_end],
            after_border=reasons,
            skip_newlines=stage is not OutputStage.CONTENT_CONTINUATION,
        )

    def push(self, token_ids: Sequence[int]) -> OutputDelta:
        """Text that became certain with these ids."""
        reasoning, content, counted = self._split(token_ids)
        return OutputDelta(reasoning, self._held_content.push(content), *counted)

    def finish(self, token_ids: Sequence[int] = (), stop_cut: int | None = None) -> OutputDelta:
        """The rest of the answer, with its last ids.

        stop_cut: characters that a stop string takes off the end of the content; None: no stop
        string ended the answer.
        """
        reasoning, content, counted = self._split(token_ids)
        if stop_cut is not None:
            return OutputDelta(reasoning, self._held_content.finish(content, stop_cut), *counted)
        late_reasoning: list[str] = []
        late_content: list[str] = []
        self._text(self._detokenizer.flush(), late_reasoning, late_content)
        rest = "".join([reasoning, *late_reasoning, self._held_newlines])
        self._held_newlines = ""
        content = self._held_content.finish("".join([content, *late_content]))
        return OutputDelta(rest, content, *counted)

    def flush(self) -> OutputDelta:
        """What is left at the end of the answer."""
        return self.finish()

    def _split(self, token_ids: Sequence[int]) -> tuple[str, str, tuple[list[int], list[int]]]:
        """New reasoning, new content (nothing held back), and the places of the ids of each."""
        reasoning: list[str] = []
        content: list[str] = []
        places: tuple[list[int], list[int]] = ([], [])
        start = 0
        for end, token_id in enumerate(token_ids):
            if token_id == self._thinking_end_id:
                self._text(self._detokenizer.push(token_ids[start:end]), reasoning, content)
                self._count(start, end, places)
                self._text(self._detokenizer.flush(), reasoning, content)
                self._on_thinking_end()
                start = end + 1
        self._text(self._detokenizer.push(token_ids[start:]), reasoning, content)
        self._count(start, len(token_ids), places)
        return "".join(reasoning), "".join(content), places

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

    def _count(self, start: int, end: int, places: tuple[list[int], list[int]]) -> None:
        places[0 if self._in_reasoning else 1].extend(range(start, end))
        if self._in_reasoning:
            self.reasoning_tokens += end - start
