"""The parser of level `clients`: the same answers for well-formed output, robust for all other.

Contract: arguments of a finished call are one valid JSON object with unique keys; no markup of
calls appears in content or arguments; text that is no markup is not lost. What it does beyond the
official parser is marked `# clients:` here and in `lenient_stages.py`, `calls.py`, and listed in
docs/recipe.md. Used by `parser.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.recipe.constants import SpecialTokens
from headrace.recipe.converted import ParsingOptions
from headrace.recipe.parser.calls import CallWriter
from headrace.recipe.parser.items import CallArguments, Content, Item, Reasoning, TextKind
from headrace.recipe.parser.lenient_stages import ASCII, OWN, Do, stages_of
from headrace.recipe.parser.machine import first_stage
from headrace.recipe.parser.scanner import Piece, Rule, Scanner, Stage
from headrace.recipe.parser.tags import (
    TagKind,
    is_beginning,
    is_complete,
    is_prose,
    kind_of,
    read_tag,
    split_close,
)
from headrace.recipe.parts import Part


class LenientMachine:
    """Pieces -> items of one answer. content: whether there was any; stop: the one that matched.

    resumed: whether the reasoning went on after markup that was none.
    """

    def __init__(self, parsing: ParsingOptions, special: SpecialTokens) -> None:
        stops = tuple(stop for stop in parsing.stops if stop)
        offered = parsing.parse_tool_calls or parsing.starts_in_tool_calls
        markup = offered or parsing.suppress_markup
        self._json = parsing.parse_json
        self._eos = special.eos
        self._openers = ("<" + special.dsml, "</" + special.dsml)
        self._stages = stages_of(special, stops, markup, parsing.parse_json, parsing.engine_stops)
        # clients: no-markup
        self._writer = CallWriter(special.dsml, muted=not offered)
        self._reasoning: list[Part] = []
        self.stop: str | None = None
        self.content = False
        self.resumed = False
        self._text = "content"  # the stage that follows calls, or a tag that is none
        self._unended = False  # the reasoning was left without its end
        self._in_block = False
        self._dialect = OWN
        self._bare = False  # the tag was opened without a marker
        self._lone = False  # the tag has no bracket
        self._orphan = False  # the value belongs to no call
        self._gap: list[str] = []
        self._tag: list[str] = []
        self.scanner = Scanner(self._first(parsing), self._take, self._follow)

    def _first(self, parsing: ParsingOptions) -> Stage[Do]:
        name = first_stage(parsing)
        if name == "tools":
            self._in_block = True
            name = "block_gap"
        elif name.startswith("reasoning"):
            self._text = "reasoning"
        return self._stages[name]

    @property
    def items(self) -> list[Item]:
        """Where items go."""
        return self._writer.items

    @items.setter
    def items(self, items: list[Item]) -> None:
        self._writer.items = items

    @property
    def reasoning(self) -> list[Part]:
        """The pieces of reasoning so far."""
        return self._reasoning

    @property
    def calls(self) -> int:
        """Calls with a complete name."""
        return self._writer.calls

    @property
    def open_call(self) -> bool:
        """Whether a call was begun and not completed."""
        return self._writer.in_call and self._writer.calls > 0

    @property
    def in_reasoning(self) -> bool:
        """Whether the reasoning was not left yet."""
        return self.scanner.stage.default is Do.REASONING

    @property
    def never_answered(self) -> bool:
        """Whether neither the end of the reasoning nor a call has come."""
        return self._text == "reasoning"

    @property
    def quiet(self) -> TextKind | None:
        """See `OutputParser.quiet`."""
        if not self.scanner.idle or self._gap:
            return None
        do = self.scanner.stage.default
        if do is Do.CONTENT:
            return Content if self.content else None
        if do is Do.VALUE:
            return CallArguments if self._writer.streams_string and not self._orphan else None
        return Reasoning if do is Do.REASONING and self._reasoning else None

    def feed(self, piece: Piece) -> bool:
        """Take one piece; False when a stop sequence completed."""
        # clients: empty-chunks
        return self.scanner.feed(piece) if piece.text else True

    def finish(self, complete: bool) -> None:
        """No more pieces come. complete: the model ended the answer, so that calls are closed."""
        scanner = self.scanner
        held = scanner.held_text
        if held and (held == self._eos or self._is_cut(held, complete)):
            scanner.drop(len(held))
        scanner.finish()
        name = scanner.stage.name.rstrip(ASCII)
        if name == "tag":
            text = "".join(self._tag)
            # A tag that only lacks its `>` counts; the beginning of one does not.
            whole = complete and '"' in text and is_complete(text)
            if whole or not (self._inside or is_beginning(text)):
                self._open(text, "")
        elif name == "close" and complete:
            self._close_tag()
        if complete:
            self._writer.close()

    def stop_before(self, characters: int) -> None:
        """Drop so many of the characters that are held back: a stop string began there."""
        self._show_logprobs(self.scanner.drop(characters))

    def stop_with(self, stop: str, cut_pieces: Sequence[Piece]) -> None:
        """The answer ended at a stop string, of which the last pieces are nothing but parts."""
        self.scanner.finish()
        self.stop = stop
        self._show_logprobs(cut_pieces)

    def _show_logprobs(self, pieces: Sequence[Piece]) -> None:
        """Log probabilities end where the ids do, also behind the last text."""
        self.items += [Content("", piece.take_logprobs()) for piece in pieces if piece.entries]

    def _is_cut(self, held: str, complete: bool) -> bool:
        """Whether what is held back is the beginning of a marker, cut off."""
        start = held.lstrip("\n")
        if not start or not any(opener.startswith(start) for opener in self._openers):
            return False
        if self._inside:
            # A lone `<` at the end of a value is text.
            return len(start) > 1 or not self._writer.in_value
        # clients: cut-markup
        return not complete and len(start) > 1 and self._openers[0].startswith(start)

    # --- characters --------------------------------------------------------------------------

    def _take(self, do: Do, piece: Piece, text: str, to_end: bool) -> None:
        if do >= Do.DROP:
            return
        if do is Do.REASONING:
            self._reasoning.append(text)
            # clients: logprob-entries. One per token, also when a piece is shown in parts.
            self.items.append(Reasoning(text, piece.take_logprobs()))
        elif do is Do.CONTENT:
            self._emit(text, piece)
        elif do is Do.VALUE:
            if self._orphan:
                self._emit_text(text, piece)
            else:
                self._writer.value(text)
        elif do is Do.TAG:
            self._tag.append(text)
        elif do is Do.GAP:
            self._gap.append(text)
        elif do is Do.BODY:
            self._writer.body(text)
        elif do is Do.BRACKET:
            self._emit(text, piece)

    def _emit(self, text: str, piece: Piece | None) -> None:
        if self._gap:
            # White space between calls and text counts only between two texts.
            if self.content:
                text = "".join(self._gap) + text
            self._gap.clear()
        self.content = True
        self.items.append(Content(text, piece.take_logprobs() if piece else None))

    def _emit_text(self, text: str, piece: Piece | None) -> None:
        """Text that turned out to be no markup, in the stage that the markup was found in."""
        if not text:
            return
        if self._text == "reasoning":
            self.resumed = True
            self._reasoning.append(text)
            self.items.append(Reasoning(text, piece.take_logprobs() if piece else None))
        elif not self._json or self._text == "json":
            self._emit(text, piece)

    # --- from stage to stage -----------------------------------------------------------------

    def _follow(self, rule: Rule[Do] | None, following: str) -> Stage[Do] | None:
        if rule is None:
            return self._stages[self._at_border(following)]
        if rule.action is Do.STOP:
            self.stop = rule.pattern.text
            return None
        return self._stages[self._after(rule)]

    def _at_border(self, following: str) -> str:
        name = self.scanner.stage.name
        if name == "gap":
            return self._text
        if name == "block_gap":
            return "block"
        return "close_end" + self._dialect if following == ">" else self._close_tag()

    def _after(self, rule: Rule[Do]) -> str:
        do = rule.action
        if do is Do.OPEN or do is Do.CLOSE or do is Do.LONE:
            if self.scanner.stage.name == "tag" + self._dialect:
                # A marker ends the tag before it, which has no `>`.
                self._open("".join(self._tag), "")
            self._bare = False
            self._lone = do is Do.LONE
            if not self._writer.in_call and not self._lone:
                self._dialect = OWN if rule.pattern.text in self._openers else ASCII
            return self._begin_tag("close" if do is Do.CLOSE else "tag")
        if do is Do.BARE:
            # clients: broken-tags. Inside of calls, tags are known without the marker.
            stage = self._begin_tag("tag")
            self._bare, self._lone = True, False
            self._tag.append(rule.pattern.text.lstrip("<"))
            return stage
        if do is Do.BARE_END:
            return self._close(TagKind.PARAMETER if self._writer.in_value else TagKind.INVOKE)
        if do is Do.END:
            return self._at_end(rule.pattern.text)
        if rule.then == "content" or rule.then == "content_lead":
            return self._after_thinking(rule.then)
        if rule.then == "json" or rule.then == "after_json":
            self._text = rule.then
        return rule.then

    def _after_thinking(self, stage: str) -> str:
        if self._text == "reasoning":
            self._text = "content"
        elif self._in_block:
            return "block_gap"
        elif self._unended:
            # clients: calls-while-thinking. What follows the end of thinking is the answer.
            self._gap.clear()
            stage = "content_lead"
        self._unended = False
        return stage

    def _begin_tag(self, stage: str) -> str:
        self._gap.clear()
        self._tag.clear()
        return stage + self._dialect

    def _at_end(self, end: str) -> str:
        if self.scanner.stage.name == "close_end" + self._dialect:
            return self._close_tag(ended=True)
        text = "".join(self._tag)
        if end == ">" and not is_complete(text):
            # It belongs to a name.
            self._tag[:] = [text, end]
            return self.scanner.stage.name
        if end not in (">", "\n\n"):
            # The reasoning ends inside of a tag.
            stage = self._open(text, "")
            return self._after_thinking("content_lead") if stage == "reasoning" else stage
        return self._open(text, end)

    @property
    def _inside(self) -> bool:
        """Whether a block of calls was begun."""
        return self._in_block or self._writer.in_call

    def _open(self, text: str, end: str) -> str:
        """An opening tag: the stage that follows it."""
        self._tag.clear()
        tag = read_tag(text)
        if not self._inside and is_prose(text, tag, end):
            # clients: marker-in-prose
            self.resumed |= self._text == "reasoning"
            self._emit_text(text + end, None)
            return self._text
        if self._text == "reasoning":
            self._text = "content"
            self._unended = True
        elif self._text == "json":
            self._text = "after_json"
        self._in_block = True
        if self._lone and tag.kind is TagKind.UNKNOWN:
            return self._resume(text + end)
        if tag.name is None and tag.kind in (TagKind.INVOKE, TagKind.PARAMETER):
            # Without a name it opens nothing; without a bracket it may be a closing tag.
            return self._close(tag.kind)
        if tag.kind is TagKind.INVOKE and tag.name is not None:
            self._writer.begin(tag.name)
            if tag.closes_itself:
                self._writer.close()
                return self._rest()
            return "call" + self._dialect
        if tag.kind is TagKind.PARAMETER and tag.name is not None:
            # clients: text-in-block. A value outside of a call is text.
            self._orphan = not self._writer.in_call
            if not self._orphan:
                self._writer.open_parameter(tag.name, tag.string)
                if tag.closes_itself:
                    self._writer.close_parameter()
                    return "call" + self._dialect
                if not end:
                    # clients: broken-tags. Without `>` the value begins after the last attribute.
                    self._writer.value(text.rpartition('"')[2].strip(" >"))
            return ("bare_value" if self._bare else "value") + self._dialect
        # clients: any-wrapper
        self._writer.close()
        return self._rest()

    def _resume(self, text: str) -> str:
        """A marker was none: go on where it stood."""
        if self._writer.in_value:
            self._writer.value(text)
            return ("bare_value" if self._bare else "value") + self._dialect
        if self._writer.in_call:
            self._writer.body(text)
            return "call" + self._dialect
        self._emit_text(text, None)
        return "block"

    def _close_tag(self, ended: bool = False) -> str:
        """A closing tag: the stage that follows it. ended: by its `>`."""
        text = "".join(self._tag)
        self._tag.clear()
        word, rest = split_close(text)
        kind = kind_of(word)
        inside = self._inside
        stage = self._close(kind)
        if not ended and not inside and kind is TagKind.UNKNOWN:
            self._emit_text(text, None)
        elif rest and not self._writer.in_call:
            self._emit_text(rest, None)
        return stage

    def _close(self, kind: TagKind) -> str:
        # clients: closing-tags. What is open inside of what a tag closes is closed too.
        writer = self._writer
        if self._orphan and kind is not TagKind.WRAPPER:
            self._orphan = False
        elif writer.in_value and kind in (TagKind.PARAMETER, TagKind.UNKNOWN):
            writer.close_parameter()
        elif writer.in_call and kind is TagKind.PARAMETER:
            pass
        elif writer.in_call and kind in (TagKind.INVOKE, TagKind.UNKNOWN):
            writer.close()
        elif kind in (TagKind.WRAPPER, TagKind.UNKNOWN):
            writer.close()
            self._orphan = False
            self._in_block = False
        return "call" + self._dialect if writer.in_call else self._rest()

    def _rest(self) -> str:
        """The stage outside of calls."""
        if self._text == "reasoning":
            self.resumed = True
            return "reasoning"
        if self._json and not self._in_block:
            return self._text
        return "block_gap" if self._in_block else "gap"
