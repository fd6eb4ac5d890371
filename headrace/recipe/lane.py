"""One choice of an answer: its parser, its writer, and the short cut past both of them.

Contract: `push` and `finish` go through the parser. `push_frames` gives the same events as bytes
and prepares the short cut: while `get` is set, a chunk whose ids it all has text of is sent by
`StreamBatch` or `hold` alone, and `settle` tells parser and writer afterwards. The bytes are the
same either way. Used by `stream.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.errors import HeadraceError, StreamError
from headrace.recipe.chunks import Chunk, Tokens
from headrace.recipe.events.event import Delta, Event, Writer, sse_frame
from headrace.recipe.events.piece_table import End, PieceTable, piece_table
from headrace.recipe.json_text import escaped
from headrace.recipe.parser.items import CallArguments, Content, TextKind
from headrace.recipe.parser.matcher import Risks
from headrace.recipe.parser.parser import OutputParser
from headrace.recipe.tokenizer import Tokenizer

# A piece whose end may begin a marker: its ids, escaped text that was not sent yet, and that end.
_Held = tuple[Sequence[int], bytes, str]


class Lane:
    """One choice of an answer; `lane` is itself, so that a step may name a lane or a stream.

    get: escaped text of an id that needs no parser now, None when all do. An event is head + text +
    tail, unless `numbered` (its number and "}" follow) or `silent`. run: ids that went out without
    the parser. ends: ids that a piece may not end with. held: pieces that stay back until it is
    clear that no marker follows.
    """

    __slots__ = (
        "_delta",
        "_holds_lines",
        "_kind",
        "_parser",
        "_risks",
        "_splits",
        "_table",
        "_tokenizer",
        "ends",
        "failed",
        "get",
        "head",
        "held",
        "lane",
        "numbered",
        "run",
        "silent",
        "tail",
        "writer",
    )

    def __init__(
        self,
        parser: OutputParser,
        writer: Writer,
        tokenizer: Tokenizer | None,
        *,
        splits: bool,
        silent: bool,
    ) -> None:
        """splits: of a piece only what may begin a marker stays back, not all of it."""
        self.lane = self
        self.failed = False
        self.writer = writer
        self.get: Callable[[int], bytes | None] | None = None
        self.ends: dict[int, End | None] = {}
        self.head = self.tail = b""
        self.numbered = False
        self.silent = silent
        self.run: list[int] = []
        self.held: list[_Held] = []
        self._parser = parser
        self._tokenizer = tokenizer
        self._splits = splits
        self._holds_lines = False  # what is held back is nothing but newlines
        # What the prepared parts were made of.
        self._kind: TextKind = Content
        self._delta: Delta | None = None
        self._risks: Risks | None = None
        self._table: PieceTable | None = None

    @property
    def finished(self) -> bool:
        """Whether this choice has ended, well or not."""
        return self.failed or self._parser.finished

    def push(self, chunk: Chunk) -> list[Event]:
        """Events that follow from a chunk, by way of the parser."""
        if self.failed:
            raise StreamError("stream processor is closed")
        events = self.settle()
        self.get = None
        events += self.writer.write(self._parser.push(chunk))
        return events

    def finish(self) -> list[Event]:
        """Events of the end of input."""
        if self.finished:
            return []
        events = self.settle()
        self.get = None
        events += self.writer.write(self._parser.finish())
        return events

    def fail(self, error: HeadraceError) -> list[Event]:
        """The events of an error."""
        events = self.settle()
        self.get = None
        self.failed = True
        events += self.writer.fail(error)
        return events

    def push_frames(self, chunk: Chunk) -> bytes:
        """`push` as bytes to be sent; an error becomes an event. Prepares the short cut."""
        ended = self.finished
        try:
            events = self.push(chunk)
        except HeadraceError as error:
            if ended:
                raise
            events = self.fail(error)
        self._prepare()
        return b"".join(map(sse_frame, events))

    def settle(self) -> list[Event]:
        """Tell the parser and the writer what went out without them."""
        table = self._table
        events: list[Event] = []
        if self.get is None or table is None:
            return events
        parser, writer = self._parser, self.writer
        if self.run:
            text = table.part(self.run)
            parser.skip(len(self.run), text)
            writer.add_text(self._kind, text)
            self.run = []
        if self.held:
            self.get = None
            held, self.held = self.held, []
            for ids, _, end in held:
                items = parser.push(Tokens(ids))
                sent = table.text(ids)[: -len(end)] if self._splits else ""
                if sent:
                    value = self._kind is CallArguments
                    writer.add_text(self._kind, escaped(sent) if value else sent)
                    del items[0]
                events += writer.write(items)
        return events

    # --- the short cut -------------------------------------------------------------------------

    def hold(self, ids: Sequence[int]) -> bytes | None:
        """A piece that follows a held one, or may have to be held: what is decided now.

        None when only the parser can tell. All of the ids have text.
        """
        ends = self.ends
        held = self.held
        get: Callable[[int], bytes] = self.get  # type: ignore[assignment]
        if ids[-1] not in ends:
            frames = self._release()
            self.run += ids
            if self.numbered or self.silent:
                return frames + self.frame(b"".join(map(get, ids)))
            return b"".join((frames, self.head, *map(get, ids), self.tail))
        end = ends[ids[-1]]
        inside = end is not None and (end.before or (len(ids) > 1 and ids[-2] not in ends))
        if end is None or not (inside or (len(ids) == 1 and not held)):
            return self._hold_slowly(ids)
        frames = self._release() if held else b""
        text = end.escaped
        if not self._splits:
            text = b"".join(map(get, ids))
        elif inside:
            frames += self.frame(b"".join(map(get, ids[:-1])) + end.before)
        held.append((ids, text, end.text))
        self._holds_lines = end.text[-1] == "\n"
        return frames

    def _hold_slowly(self, ids: Sequence[int]) -> bytes | None:
        table = self._table
        if table is None:
            return None
        text = table.text(ids)
        frames, before = b"", ""
        if self.held:
            if self._holds_lines and not text.strip("\n"):
                # The same as below; runs of newlines may be long.
                self.held.append((ids, table.escape(text), text))
                return b""
            before = "".join([end for _, _, end in self.held])
        size = table.risky_end(before + text)
        if size < 0 or len(text) < size < len(before) + len(text):
            return None
        if size > len(text):
            self.held.append((ids, table.escape(text), text))
            self._holds_lines = False
            return b""
        if self.held:
            frames = self._release()
        if not size:
            self.run += ids
            return frames + self.frame(table.escape(text))
        if self._splits and size < len(text):
            frames += self.frame(table.escape(text[:-size]))
        rest = text[-size:] if self._splits else text
        self.held.append((ids, table.escape(rest), text[-size:]))
        self._holds_lines = not text[-size:].strip("\n")
        return frames

    def frame(self, text: bytes) -> bytes:
        """One event of escaped text."""
        if not self.numbered:
            return b"" if self.silent else self.head + text + self.tail
        writer = self.writer
        number = writer.number
        writer.number = number + 1
        return b"" if self.silent else b"%b%b%b%d}\n\n" % (self.head, text, self.tail, number)

    def _release(self) -> bytes:
        """Events of the pieces that were held back."""
        held = self.held
        if len(held) == 1:
            ids, text, _ = held.pop()
            self.run += ids
            return self.frame(text)
        frames: list[bytes] = []
        for ids, text, _ in held:
            self.run += ids
            frames.append(self.frame(text))
        held.clear()
        return b"".join(frames)

    def _prepare(self) -> None:
        """Open the short cut, if the parser would let plain text through unchanged."""
        parser, tokenizer = self._parser, self._tokenizer
        kind = parser.quiet
        delta = None if kind is None or self.failed else self.writer.delta(kind)
        if kind is None or delta is None or tokenizer is None:
            return
        if delta is not self._delta:
            self._delta = delta
            self.head = sse_frame(Event(delta.name, delta.prefix))[:-2]
            self.tail = delta.suffix if delta.numbered else delta.suffix + b"\n\n"
            self.numbered = delta.numbered
        risks = parser.risks
        table = self._table
        if table is None or risks is not self._risks or kind is not self._kind:
            self._risks, self._kind = risks, kind
            table = self._table = piece_table(tokenizer, risks, kind is CallArguments)
        self.get = table.__getitem__
        self.ends = table.ends
