"""Makes headrace/assets/tiny/held-out.jsonl.xz: the texts on which perplexity is measured.

`python -m train.held_out ENGLISH TOKENIZER OUT`: long held-out documents of `train.english build`,
cut into pieces of a little over 8192 tokens, at most four of one document, and one of glosses.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path

from headrace.recipe.tokenizer import Tokenizer

_TOKENIZED = 8200
_PER_DOCUMENT = 4
# Its held-out page of release notes stands word for word in other pages, too.
_SKIPPED = ("sqlite",)


def pieces(english: Path, tokenizer: Tokenizer) -> Iterator[dict[str, str]]:
    """{"source", "text"} of every piece."""
    glosses: list[str] = []
    with lzma.open(english, "rt", encoding="utf-8") as file:
        for line in file:
            document = json.loads(line)
            if not document["held_out"] or document["source"] in _SKIPPED:
                continue
            if document["source"] == "wordnet":
                glosses.append(document["text"])
                continue
            ids = tokenizer.encode(document["text"])
            for number in range(min(_PER_DOCUMENT, len(ids) // _TOKENIZED)):
                part = ids[number * _TOKENIZED : (number + 1) * _TOKENIZED]
                yield {"source": document["source"], "text": tokenizer.decode(part)}
    ids = tokenizer.encode("\n".join(glosses))[:_TOKENIZED]
    yield {"source": "wordnet", "text": tokenizer.decode(ids)}


if __name__ == "__main__":
    made = pieces(Path(sys.argv[1]), Tokenizer(Path(sys.argv[2]).read_bytes()))
    with lzma.open(sys.argv[3], "wt", preset=9, encoding="utf-8") as out:
        for piece in made:
            print(piece["source"], len(piece["text"]))
            out.write(json.dumps(piece, ensure_ascii=False) + "\n")
