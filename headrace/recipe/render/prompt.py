"""A rendered prompt: segments that are either one control token or plain text.

The split is what makes prompts safe against injection: only the template creates control
segments, and plain segments are encoded without the added vocabulary. Built by the renderers,
read by `recipe/tokenizer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt; `special` marks the spelling of exactly one control token."""

    text: str
    special: bool = False


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Segments in order; adjacent control tokens stay segments of their own."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """The prompt as one string, for people and for comparison; never encode this."""
        return "".join(segment.text for segment in self.segments)

    def special_ranges(self) -> list[tuple[int, int]]:
        """[start, end) of every control token in `text`, in code points."""
        ranges: list[tuple[int, int]] = []
        start = 0
        for segment in self.segments:
            end = start + len(segment.text)
            if segment.special:
                ranges.append((start, end))
            start = end
        return ranges


class PromptBuilder:
    """Collects segments; neighbouring plain text becomes one segment."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._plain: list[str] = []

    def plain(self, text: str) -> None:
        """Append text that is encoded without the added vocabulary."""
        if text:
            self._plain.append(text)

    def special(self, spelling: str) -> None:
        """Append one control token."""
        self._close_plain()
        self._segments.append(Segment(spelling, special=True))

    def build(self) -> RenderedPrompt:
        """The finished prompt."""
        self._close_plain()
        return RenderedPrompt(tuple(self._segments))

    def _close_plain(self) -> None:
        if self._plain:
            self._segments.append(Segment("".join(self._plain)))
            self._plain.clear()
