"""A rendered prompt: plain text and control tokens, strictly alternating.

The split is what makes prompts safe against injection: only the template creates control tokens,
and regions of plain text are encoded without the added vocabulary and without seeing each other.
Built by the renderers, read by `recipe/tokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.recipe.conversation import ImageSource, PromptText


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """parts: region, control token, region, control token, ..., region (regions may be empty).

    images: the sources of the image tokens, in the order of their places. Messages that were built
    by hand with more sources than places add the surplus here, as the official codec does.
    """

    parts: tuple[str, ...]
    images: tuple[ImageSource, ...] = ()

    @property
    def regions(self) -> tuple[str, ...]:
        """The plain texts: one more than there are control tokens."""
        return self.parts[0::2]

    @property
    def specials(self) -> tuple[str, ...]:
        """The spellings of the control tokens."""
        return self.parts[1::2]

    @property
    def text(self) -> str:
        """The prompt as one string, for people and for comparison; never encode this."""
        return "".join(self.parts)

    def special_ranges(self) -> list[tuple[int, int]]:
        """[start, end) of every control token in `text`, in code points."""
        ranges: list[tuple[int, int]] = []
        start = 0
        for number, part in enumerate(self.parts):
            end = start + len(part)
            if number % 2:
                ranges.append((start, end))
            start = end
        return ranges


class PromptBuilder:
    """Collects plain text and control tokens; neighbouring plain text becomes one region."""

    __slots__ = ("_image", "_images", "_parts", "_plain", "plain")

    def __init__(self, image: str) -> None:
        self._image = image
        self._parts: list[str] = []
        self._plain: list[str] = []
        self._images: list[ImageSource] = []
        # The bound method itself: this is called for every piece of every prompt.
        self.plain = self._plain.append

    def special(self, spelling: str) -> None:
        """Append one control token; one without a spelling does not exist."""
        if spelling:
            plain = self._plain
            self._parts.append("".join(plain))
            self._parts.append(spelling)
            plain.clear()

    def text(self, content: PromptText) -> None:
        """Append the text of a message, with image tokens at its places."""
        parts = content.parts
        self.plain(parts[0])
        for part in parts[1:]:
            self.special(self._image)
            self.plain(part)
        if content.images:
            self._images += content.images

    def prepared(self, parts: Sequence[str]) -> None:
        """Append parts that alternate like those of a prompt."""
        self.plain(parts[0])
        if len(parts) > 1:
            plain = self._plain
            self._parts.append("".join(plain))
            self._parts += parts[1:-1]
            plain.clear()
            self.plain(parts[-1])

    def build(self) -> RenderedPrompt:
        """The finished prompt."""
        return RenderedPrompt((*self._parts, "".join(self._plain)), tuple(self._images))
