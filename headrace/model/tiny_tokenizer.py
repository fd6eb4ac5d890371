"""tokenizer.json of the tiny checkpoints: byte-level BPE, 512 entries, all control spellings.

Same algorithm, pre-tokeniser and id layout as the released tokenizer: BOS, EOS and pad are 0, 1, 2,
then the 256 byte tokens, then merges in rank order, then the added tokens. The merges are learned
here from a fixed list of words, so the file is the same everywhere. Used by `tiny`.
"""

from __future__ import annotations

import itertools
from collections import Counter

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
NOISE = "<｜place▁holder▁no▁799｜>"
IMAGE = "<｜deepseek_image｜>"
# Spellings that are part of the text of an answer or a prompt: found in text, kept when decoding.
TEXT_CONTROLS = (
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
)
SPECIAL_CONTROLS = (
    NOISE,
    "<｜/polygon｜>",
    "<｜polygon｜>",
    "<｜/point｜>",
    "<｜point｜>",
    "<｜/box｜>",
    "<｜box｜>",
    "<｜/ref｜>",
    "<｜ref｜>",
    IMAGE,
)
VOCAB_SIZE = 512
FIRST_BYTE = 3
NUM_BYTES = 256

_PRE_TOKENIZER_PATTERNS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)

# Frequent words, most frequent first; a word's weight is its rank from the end.
_WORD_LIST = """
the of and to in is that for it as was with be by on not he this are or his from at which but have
an had they you were their one all we can her has there been if more when will would who so no out
up into them then she many some its about other than only time these two may do first any my now
such like our over even most me after also made did must before see through way where get much go
well your should people down own just because good each those how too little state world very year
still work make between both being under never day same another know while last might great old
us off come since against came right used take three however system part number use place point
think question answer model language token write read number small large where change house again
The This That There What When How Is It In A He She We You They And But If As At On For From
hello Hello user assistant help please thanks yes sorry understand reason therefore because given
function return class import value string list data code error result test file line print name
"""


def byte_spellings() -> list[str]:
    """The printable stand-in of every byte (GPT-2's table), in the order of the byte tokens.

    Bytes that print as themselves come first in byte order, the others follow as U+0100, ....
    """
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(NUM_BYTES) if byte not in own]
    return [chr(byte) for byte in own] + [chr(NUM_BYTES + i) for i in range(len(others))]


def _spell(text: str) -> list[str]:
    """Byte stand-ins of an ASCII text: a space is U+0120."""
    return ["\u0120" if character == " " else character for character in text]


def learn_merges(count: int) -> list[tuple[str, str]]:
    """`count` byte-pair merges from the word list; equal counts go to the smaller pair."""
    words = Counter[tuple[str, ...]]()
    ranked = _WORD_LIST.split()
    for rank, word in enumerate(ranked):
        words[tuple(_spell(" " + word))] += len(ranked) - rank
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs = Counter[tuple[str, str]]()
        for pieces, weight in words.items():
            for pair in itertools.pairwise(pieces):
                pairs[pair] += weight
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        merged = Counter[tuple[str, ...]]()
        for pieces, weight in words.items():
            # Most words lack the pair; skipping them makes this several times faster.
            new = _apply(pieces, best) if best[0] in pieces else pieces
            merged[new] += weight
        words = merged
    return merges


def _apply(pieces: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    result: list[str] = []
    position = 0
    while position < len(pieces):
        if pieces[position : position + 2] == pair:
            result.append(pair[0] + pair[1])
            position += 2
        else:
            result.append(pieces[position])
            position += 1
    return tuple(result)


def control_ids() -> dict[str, int]:
    """Ids of all control spellings: BOS, EOS, pad, then the last ids of the vocabulary."""
    added = (*TEXT_CONTROLS, *SPECIAL_CONTROLS)
    first = VOCAB_SIZE - len(added)
    return {BOS: 0, EOS: 1, PAD: 2, **{text: first + i for i, text in enumerate(added)}}


def _added_token(text: str, token: int) -> dict[str, object]:
    special = text not in TEXT_CONTROLS
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    return {"id": token, "content": text, **flags, "normalized": not special, "special": special}


def tiny_tokenizer() -> dict[str, object]:
    """The content of tokenizer.json."""
    controls = control_ids()
    spellings = byte_spellings()
    first_merge = FIRST_BYTE + NUM_BYTES
    merges = learn_merges(VOCAB_SIZE - first_merge - (len(controls) - FIRST_BYTE))
    vocab = {BOS: 0, EOS: 1, PAD: 2}
    vocab |= {text: FIRST_BYTE + i for i, text in enumerate(spellings)}
    vocab |= {a + b: first_merge + rank for rank, (a, b) in enumerate(merges)}
    splits: list[dict[str, object]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in _PRE_TOKENIZER_PATTERNS
    ]
    to_bytes: dict[str, object] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(text, token) for text, token in controls.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, to_bytes]},
        "post_processor": None,
        "decoder": {**to_bytes, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": [f"{a} {b}" for a, b in merges],
        },
    }
