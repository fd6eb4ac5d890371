"""Chunks of one answer -> its items, at the level of the request.

Contract: outside JSON mode at level `official`, the joined items depend on neither the splits of
the text nor the grouping of the ids. After `AnswerFinish` or an error nothing more may be pushed.
Called by `recipe/stream.py`, which may bypass the parser for pieces that `quiet` and `risks`
show to be plain text, and tells it so with `skip`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from headrace.errors import StreamError
from headrace.recipe.chunks import NO_DRAFTS, Chunk, EngineFinish, Finish, Stopped, Text, Tokens
from headrace.recipe.constants import SpecialTokens
from headrace.recipe.converted import ParsingOptions
from headrace.recipe.options import Level
from headrace.recipe.parser.items import (
    AnswerEnd,
    AnswerFinish,
    Content,
    Item,
    Start,
    TextKind,
)
from headrace.recipe.parser.lenient import LenientMachine
from headrace.recipe.parser.machine import OfficialMachine
from headrace.recipe.parser.matcher import Kind, Risks
from headrace.recipe.parser.pieces import PieceMaker, TokenTexts
from headrace.recipe.parser.scanner import Piece
from headrace.recipe.parts import Part, joined

ENDS = {
    EngineFinish.STOP: AnswerEnd.STOP,
    EngineFinish.LENGTH: AnswerEnd.LENGTH,
    EngineFinish.CONTENT_FILTER: AnswerEnd.CONTENT_FILTER,
}


class Tokenizer(TokenTexts, Protocol):
    """What the parser needs of a tokenizer."""

    @property
    def added(self) -> Mapping[str, int]:
        """Spelling -> id of the added vocabulary."""

    def encode_full(self, text: str) -> list[int]:
        """Ids of text; spellings of the added vocabulary become its ids."""


class OutputParser:
    """The parser of one answer.

    finished: an `AnswerFinish` was given. tokenizer: needed for chunks of ids, and to count the
    reasoning tokens of text.
    """

    def __init__(
        self,
        parsing: ParsingOptions,
        special: SpecialTokens,
        level: Level,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.finished = False
        self._thinking = parsing.thinking_stage is not None
        self._official = level is Level.OFFICIAL
        self._tokenizer = tokenizer
        self._maker = PieceMaker(tokenizer) if tokenizer is not None else None
        self._machine: OfficialMachine | LenientMachine = (
            OfficialMachine(parsing, special)
            if self._official
            else LenientMachine(parsing, special)
        )
        # clients: markers-by-spelling. Of a tokenizer in which they are no control tokens.
        self._by_spelling = (
            not self._official
            and tokenizer is not None
            and not (special.dsml in tokenizer.added and special.thinking_end in tokenizer.added)
        )
        self._started = False
        self._closed = False
        self._completion_tokens = 0
        # clients: reasoning-tokens. None when they have to be counted by encoding the text.
        self._reasoning_ids: int | None = None if self._official or self._by_spelling else 0
        self._last_id = -1
        self._drafts = NO_DRAFTS
        self._dsml = special.dsml

    @property
    def quiet(self) -> TextKind | None:
        """What a piece without any of `risks` would become, unchanged; None: push it.

        Arguments would become its text as it stands inside of a JSON string.
        """
        waits = self._maker is not None and not self._maker.empty
        return None if waits or self.finished or not self._started else self._machine.quiet

    @property
    def risks(self) -> Risks:
        """What in plain tokens may begin a marker in this stage."""
        return self._machine.scanner.stage.matcher.risks[self._by_spelling]

    def skip(self, tokens: int, text: Part) -> None:
        """Account for text of so many ids that became items without being pushed."""
        self._completion_tokens += tokens
        if self._machine.in_reasoning:
            self._machine.reasoning.append(text)
            self._count_reasoning(tokens)

    def push(self, chunk: Chunk) -> list[Item]:
        """The items that became certain. Raises StreamError."""
        if self.finished:
            raise StreamError("stream processor has finished")
        if self._closed:
            raise StreamError("stream processor is closed")
        items: list[Item] = []
        self._machine.items = items
        if isinstance(chunk, Tokens):
            self._push_ids(chunk)
        elif isinstance(chunk, Text):
            self._feed(Piece(chunk.text, Kind.TEXT, chunk.token_count))
        elif isinstance(chunk, Finish):
            self._drafts = chunk.drafts
            self._end(ENDS[chunk.reason], chunk.tokens)
        elif isinstance(chunk, Stopped):
            self._drafts = chunk.drafts
            self._stopped(chunk)
        else:
            self._start(Start(chunk.prompt_tokens, chunk.cached_tokens, chunk.system_fingerprint))
        return items

    def finish(self) -> list[Item]:
        """The end of the input: the rest, unless the answer has ended already."""
        items: list[Item] = []
        if not self.finished and not self._closed:
            self._machine.items = items
            self._end(AnswerEnd.END_OF_STREAM)
        return items

    def _start(self, start: Start) -> None:
        if not self._started:
            self._started = True
            self._machine.items.append(start)

    def _push_ids(self, chunk: Tokens) -> None:
        ids, logprobs = chunk.ids, chunk.logprobs
        if self._maker is None:
            self._fail("token chunk received without a tokenizer")
        elif logprobs is not None and len(logprobs) != len(ids):
            self._fail(
                f"invalid log probabilities: {len(logprobs)} log probabilities for "
                f"{len(ids)} token IDs"
            )
        else:
            for piece in self._maker.push(ids, logprobs):
                if self._by_spelling:
                    piece.kind = Kind.TEXT
                self._feed(piece)
                if self.finished:
                    return

    def _fail(self, message: str) -> None:
        self._closed = True
        raise StreamError(message)

    def _feed(self, piece: Piece) -> None:
        if not self._started:
            self._start(Start())
        self._completion_tokens += piece.tokens
        machine = self._machine
        before = self._reasoning_ids is not None and machine.in_reasoning
        goes_on = machine.feed(piece)
        if before:
            self._count_piece(piece)
        if piece.ids:
            self._last_id = piece.ids[-1]
        if not goes_on:
            self._append_finish(AnswerEnd.STOP_SEQUENCE)

    # --- reasoning tokens --------------------------------------------------------------------

    def _count_piece(self, piece: Piece) -> None:
        """Count a piece that came while the answer was in its reasoning."""
        if self._machine.in_reasoning:
            self._count_reasoning(piece.tokens if piece.ids or not piece.text else None)
        elif piece.kind is Kind.TEXT:
            self._count_reasoning(None)
        elif self._tokenizer is not None and piece.text == self._dsml:
            # Of the opening tag, `<` was counted when it came, unless it shares a token with text.
            alone = self._tokenizer.token_bytes(self._last_id).strip() == b"<"
            self._count_reasoning(-1 if alone else 0)

    def _count_reasoning(self, tokens: int | None) -> None:
        if tokens is None or self._reasoning_ids is None:
            self._reasoning_ids = None
        else:
            self._reasoning_ids += tokens

    def _reasoning_tokens(self) -> int | None:
        if not self._thinking or self._tokenizer is None:
            return None
        # How many ids of a piece are reasoning is not known when it goes on in the middle of one.
        resumed = isinstance(self._machine, LenientMachine) and self._machine.resumed
        if self._reasoning_ids is not None and not resumed:
            # clients: reasoning-tokens
            return self._reasoning_ids
        return len(self._tokenizer.encode_full(joined(self._machine.reasoning)))

    # --- the end -----------------------------------------------------------------------------

    def _stopped(self, chunk: Stopped) -> None:
        """clients: engine-stop. The engine found a stop string; the answer ends as it says."""
        machine, maker = self._machine, self._maker
        if maker is None or not isinstance(machine, LenientMachine):
            self._fail("stop strings are found by the parser here")
            return
        pieces = [*maker.push(chunk.ids, chunk.logprobs), *maker.rest()]
        left = chunk.cut
        for piece in reversed(pieces):
            kept = max(0, len(piece.text) - left)
            left -= len(piece.text) - kept
            piece.text = piece.text[:kept]
        if left:
            machine.stop_before(left)
        for piece in pieces:
            self._feed(piece)
        machine.stop_with(chunk.stop, [piece for piece in pieces if not piece.text])
        self._append_finish(AnswerEnd.STOP_SEQUENCE)

    def _end(self, end: AnswerEnd, tokens: int = 0) -> None:
        self._start(Start())
        self._completion_tokens += tokens
        machine = self._machine
        if isinstance(machine, OfficialMachine):
            machine.finish()
        else:
            if self._maker is not None:
                # clients: incomplete-character
                for piece in self._maker.flush():
                    self._feed(piece)
                if self.finished:
                    return
                self._completion_tokens += self._maker.waiting
            machine.finish(end is AnswerEnd.STOP)
            if end is AnswerEnd.STOP and machine.never_answered:
                # clients: unended-reasoning
                self._show_reasoning(machine)
        if end is AnswerEnd.STOP and machine.calls:
            end = AnswerEnd.TOOL_CALLS
        self._append_finish(end)

    def _show_reasoning(self, machine: LenientMachine) -> None:
        text = joined(machine.reasoning)
        if text and not machine.content:
            machine.items.append(Content(text))

    def _append_finish(self, end: AnswerEnd) -> None:
        self.finished = True
        machine = self._machine
        finish = AnswerFinish(
            end,
            machine.stop,
            self._completion_tokens,
            self._reasoning_tokens(),
            drafts=self._drafts,
        )
        if isinstance(machine, LenientMachine):
            no_answer = bool(machine.reasoning) and not machine.content and not machine.calls
            finish = replace(finish, empty_after_reasoning=no_answer, open_call=machine.open_call)
        machine.items.append(finish)
