"""Makes the tokenizer.json of the embedded model: byte-level BPE of 8192 entries.

`python -m train.tokenizer ENGLISH OUT` (ENGLISH as written by `train.english build`). Algorithm,
pre-tokeniser and id layout are those of the released tokenizer; digits are never merged, so that
the model sees the digits it adds. Control tokens have the last ids.
"""

from __future__ import annotations

import json
import lzma
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from headrace.eval.families import FAMILIES, draw
from headrace.eval.items import Draw
from headrace.model import tiny_tokenizer as tiny
from headrace.recipe.constants import TASK_SPELLINGS, SpecialTokens
from headrace.recipe.render.v41 import render

VOCAB_SIZE = 8192
ADDED = (*tiny.TEXT_CONTROLS, *TASK_SPELLINGS.values(), *tiny.SPECIAL_CONTROLS)
_FIRST_MERGE = tiny.FIRST_BYTE + tiny.NUM_BYTES
_ENGLISH_CHARACTERS = 16_000_000
_TASK_SAMPLES = 30_000


def _texts(english: Path) -> Iterator[str]:
    size = 0
    with lzma.open(english, "rt", encoding="utf-8") as file:
        for line in file:
            document = json.loads(line)
            if not document["held_out"]:
                size += len(document["text"])
                yield document["text"]
            if size > _ENGLISH_CHARACTERS:
                break
    special = SpecialTokens()
    rng = random.Random(11)
    names = [name for name in FAMILIES if name != "recall"]
    for number in range(_TASK_SAMPLES):
        family = "recall" if number % 60 == 0 else rng.choice(names)
        options = Draw(thinking=number % 2 == 0, tokens=2000)
        item = draw(family, rng.randrange(10**9), options)[-1]
        yield from render(item.conversation, special).regions
        yield item.answer.content
        yield item.answer.reasoning_content or ""


def _merges(english: Path, count: int) -> list[tuple[str, str]]:
    """The first `count` merges that give different tokens, none with a digit."""
    splits = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in tiny._PRE_TOKENIZER_PATTERNS
    ]
    splits[0] = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=tiny.NUM_BYTES + count + 200,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(english), trainer)
    learned = json.loads(tokenizer.to_str())["model"]["merges"]
    merges: dict[str, tuple[str, str]] = {}
    for merge in learned:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        merges.setdefault(left + right, (left, right))
    return list(merges.values())[:count]


def make(english: Path) -> dict[str, object]:
    """The content of tokenizer.json."""
    merges = _merges(english, VOCAB_SIZE - _FIRST_MERGE - len(ADDED))
    content = tiny.tiny_tokenizer()
    vocab = {tiny.BOS: 0, tiny.EOS: 1, tiny.PAD: 2}
    vocab |= {text: tiny.FIRST_BYTE + i for i, text in enumerate(tiny.byte_spellings())}
    vocab |= {a + b: _FIRST_MERGE + rank for rank, (a, b) in enumerate(merges)}
    first = VOCAB_SIZE - len(ADDED)
    if len(vocab) != first:
        raise ValueError(f"{len(vocab)} entries, {first} expected")
    ids = {tiny.BOS: 0, tiny.EOS: 1, tiny.PAD: 2, **{t: first + i for i, t in enumerate(ADDED)}}
    model = {**content["model"], "vocab": vocab, "merges": [f"{a} {b}" for a, b in merges]}  # type: ignore[dict-item]
    added = [tiny._added_token(text, token) for text, token in ids.items()]
    return {**content, "added_tokens": added, "model": model}


if __name__ == "__main__":
    text = json.dumps(make(Path(sys.argv[1])), ensure_ascii=False, separators=(",", ":"))
    Path(sys.argv[2]).write_text(text, "utf-8")
