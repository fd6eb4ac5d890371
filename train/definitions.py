"""Makes headrace/assets/tiny/definitions.tsv: common nouns with short WordNet definitions.

`python -m train.definitions DIR OUT`, DIR as left by `train.english fetch`. A word counts as common
by its number of occurrences in WordNet's tagged texts (cntlist.rev).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from headrace.eval.words import listing

_COUNT = 320
_LONGEST = 48
_SKIPPED = frozenset(listing("sex rape murder slave negro bitch penis whore death race"))


def make(wordnet: Path) -> list[tuple[str, str]]:
    """(word, definition) in alphabetical order."""
    glosses: dict[str, str] = {}
    for line in (wordnet / "data.noun").read_text("utf-8", "replace").splitlines():
        if not line.startswith("  "):
            data, _, gloss = line.partition(" | ")
            glosses[data[:8]] = gloss
    counts: dict[str, int] = {}
    for line in (wordnet / "cntlist.rev").read_text("utf-8").splitlines():
        key, sense, count = line.split()
        if sense == "1" and key.split("%")[1].startswith("1:"):
            counts[key.split("%")[0]] = int(count)
    found: list[tuple[int, str, str]] = []
    for line in (wordnet / "index.noun").read_text("utf-8").splitlines():
        fields = line.split()
        if line.startswith(" ") or not re.fullmatch("[a-z]{3,9}", fields[0]):
            continue
        senses = int(fields[2])
        text = glosses[fields[-senses]].split(";")[0].split("(")[0].strip()
        plain = re.fullmatch(r"[a-z' ,-]+", text)
        if plain and 12 <= len(text) <= _LONGEST and fields[0] not in _SKIPPED | set(text.split()):
            found.append((-counts.get(fields[0], 0), fields[0], text))
    return sorted(
        (word, f"{text[0].upper()}{text[1:]}.") for _, word, text in sorted(found)[:_COUNT]
    )


if __name__ == "__main__":
    rows = make(Path(sys.argv[1]) / "wordnet/usr/share/wordnet")
    Path(sys.argv[2]).write_text("".join(f"{word}\t{text}\n" for word, text in rows), "utf-8")
