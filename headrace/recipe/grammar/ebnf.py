"""Grammars of clients -> Lark, as the engine reads it.

Contract: `lark_of` takes Lark as it is, and translates the notation of llama.cpp and xgrammar (GBNF:
rules `name ::= ...`, the first or `root` is the answer). Raises ValueError with a sentence about
what is wrong. Called by `rules.py`.
"""

from __future__ import annotations


def lark_of(text: str) -> str:
    return text
