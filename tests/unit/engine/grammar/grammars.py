"""Vocabulary, grammars and random schemas for the grammar tests."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.engine.grammar.backend import MaskWords, TokenTable
from headrace.engine.grammar.llguidance_backend import LlguidanceBackend
from headrace.engine.grammar.states import StateGraph
from headrace.model.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer
from headrace.recipe.tokenizer import Tokenizer

EOS = 1
VOCAB = VOCAB_SIZE
PLENTY = 10**9


@cache
def tokenizer() -> Tokenizer:
    """The tokenizer of the tiny checkpoints: 512 ids, all control spellings."""
    return Tokenizer(json.dumps(tiny_tokenizer(), ensure_ascii=False).encode())


@cache
def table() -> TokenTable:
    return TokenTable.of(tokenizer(), VOCAB, EOS)


@cache
def backend() -> LlguidanceBackend:
    return LlguidanceBackend(table())


def graph_of(spec: GrammarSpec, limit_bytes: int = PLENTY) -> StateGraph:
    return StateGraph(backend().compile(spec.kind, spec.text), table(), limit_bytes)


def schema(value: object, **changes: Any) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(value), **changes)


def ids_of(mask: MaskWords) -> list[int]:
    """Tokens that a mask allows."""
    return np.flatnonzero(
        np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
    ).tolist()


def text_of(tokens: list[int]) -> bytes:
    return b"".join(table().texts[token] for token in tokens)


class Walker:
    """Draws tokens at random, but so that answers come to an end."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._closers = frozenset(
            i for i, text in enumerate(table().texts) if text and text[:1] in b'"}],:'
        )
        self._spaces = frozenset(i for i, text in enumerate(table().texts) if text.isspace())

    def pick(self, allowed: list[int]) -> int:
        choose, chance = self._random.choice, self._random.random
        if EOS in allowed and chance() < 0.6:
            return EOS
        closing = [token for token in allowed if token in self._closers]
        if closing and chance() < 0.35:
            return choose(closing)
        solid = [token for token in allowed if token not in self._spaces]
        return choose(solid if solid and chance() < 0.9 else allowed)


class Letters:
    """A vocabulary for `FakeModel`: 50 ids of one character each; 0 and 1 are begin and end."""

    alphabet = '{}[]":, 0123456789-.abcdefghijklmnopqrstuvxyz@/\n'
    vocab_size = 2 + len(alphabet)

    def encode(self, text: str) -> list[int]:
        return [2 + self.alphabet.index(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join(self.token_bytes(token).decode() for token in token_ids if token > 1)

    def detokenizer(self) -> _LettersDetokenizer:
        return _LettersDetokenizer()

    def token_bytes(self, token_id: int) -> bytes:
        return b"<>" if token_id < 2 else self.alphabet[token_id - 2].encode()

    def is_added(self, token_id: int) -> bool:
        return token_id < 2


class _LettersDetokenizer:
    def push(self, token_ids: Sequence[int]) -> str:
        return Letters().decode(token_ids)

    def flush(self) -> str:
        return ""

    def copy(self) -> _LettersDetokenizer:
        return self


GRAMMARS = (
    GrammarSpec(GrammarKind.REGEX, "(abc|de+f){2,3}"),
    GrammarSpec(GrammarKind.REGEX, r"\d{3}-[a-z]+@(x|yy)\.com"),
    GrammarSpec(GrammarKind.REGEX, '[^"]*'),
    GrammarSpec(GrammarKind.CHOICE, '["yes", "no", "no way", "ünsure\\n"]'),
    GrammarSpec(GrammarKind.LARK, 'start: "a" (NUMBER ";")+ <[280]>?\nNUMBER: /[0-9]+/'),
    GrammarSpec(GrammarKind.LARK, 'start: e\ne: t ("+" t)*\nt: /[xy]/ | "(" e ")"'),
    GrammarSpec(GrammarKind.JSON_OBJECT),
    schema({"type": "string"}),
    schema({"type": "string", "minLength": 2, "maxLength": 4}),
    schema({"type": "string", "pattern": "^a[bc]*$"}),
    schema({"type": "string", "format": "date"}),
    schema({"type": "integer", "minimum": -3, "maximum": 250}),
    schema({"type": "number"}),
    schema({"enum": ["a", "ab", 1, 12, None, True, [1, 2], {"k": "v"}]}),
    schema({"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3}),
    schema({"type": "array", "prefixItems": [{"type": "null"}, {"const": "é"}], "minItems": 1}),
    schema({"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}}),
    schema(
        {
            "type": "object",
            "properties": {"id": {"type": "integer"}, "next": {"$ref": "#"}},
            "required": ["id"],
            "additionalProperties": False,
        }
    ),
    schema({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}),
    schema(
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"t": {"const": kind}, "v": value},
                    "required": ["t", "v"],
                    "additionalProperties": False,
                }
                for kind, value in (("p", {"type": "integer"}), ("q", {"type": "string"}))
            ]
        }
    ),
)


class Schemas:
    """Random JSON schemas of what the default backend enforces."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield self.schema()

    def schema(self) -> dict[str, Any]:
        defs = self._random.random() < 0.4
        root = self._make(0, defs)
        if defs:
            item = {"$ref": "#/$defs/d0"}
            node = {"type": "object", "properties": {"x": item, "y": {"type": "string"}}}
            root["$defs"] = {
                "d0": self._random.choice([{"type": "array", "items": item}, node]),
                "d1": self._make(3, False),
            }
        return root

    def _make(self, depth: int, defs: bool) -> dict[str, Any]:
        deep = ["_object", "_object", "_array", "_prefix", "_any_of", "_one_of", "_all_of", "_free"]
        flat = [
            "_plain",
            "_plain",
            "_measured",
            "_pattern",
            "_number",
            "_enum",
            "_types",
            "_format",
        ]
        kinds = (deep if depth < 3 else []) + (flat if depth else ["_object"] * 5)
        if defs and depth and self._random.random() < 0.15:
            return {"$ref": self._random.choice(["#/$defs/d0", "#/$defs/d1"])}
        return getattr(self, self._random.choice(kinds))(lambda: self._make(depth + 1, defs))

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _plain(self, _: Any) -> dict[str, Any]:
        return {"type": self._random.choice(["string", "boolean", "null", "integer", "number"])}

    def _measured(self, _: Any) -> dict[str, Any]:
        least = self._random.randrange(4)
        made: dict[str, Any] = {"type": "string"}
        if self._chance(0.6):
            made["minLength"] = least
        if self._chance(0.8):
            made["maxLength"] = least + self._random.randrange(6)
        return made

    def _pattern(self, _: Any) -> dict[str, Any]:
        patterns = ["^a+b?$", "^[a-z]{2,4}$", "x", "^(ab|c)*d$"]
        return {"type": "string", "pattern": self._random.choice(patterns)}

    def _format(self, _: Any) -> dict[str, Any]:
        formats = ["date", "time", "ipv4", "uuid", "email"]
        return {"type": "string", "format": self._random.choice(formats)}

    def _number(self, _: Any) -> dict[str, Any]:
        made: dict[str, Any] = {"type": self._random.choice(["integer", "number"])}
        if self._chance(0.5):
            made["minimum"] = self._random.randrange(-20, 20)
        if self._chance(0.5):
            made["maximum"] = self._random.randrange(20, 3000)
        if made["type"] == "integer" and len(made) == 1 and self._chance(0.3):
            made["multipleOf"] = self._random.choice([2, 5])
        return made

    def _enum(self, _: Any) -> dict[str, Any]:
        values = ["a", "ab", "b c", 1, 12, -3, None, True, "ä\n", [1], {"k": 1}]
        return {"enum": self._random.sample(values, self._random.randrange(1, 5))}

    def _types(self, _: Any) -> dict[str, Any]:
        return {"type": self._random.sample(["string", "integer", "null", "boolean"], 2)}

    def _free(self, _: Any) -> dict[str, Any]:
        return {"type": self._random.choice(["object", "array"])}

    def _any_of(self, make: Any) -> dict[str, Any]:
        return {"anyOf": [make() for _ in range(self._random.randrange(1, 4))]}

    def _one_of(self, make: Any) -> dict[str, Any]:
        return {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"t": {"const": name}, "v": make()},
                    "required": ["t"],
                    "additionalProperties": False,
                }
                for name in "pq"
            ]
        }

    def _all_of(self, make: Any) -> dict[str, Any]:
        first = {"type": "object", "properties": {"u": make()}, "required": ["u"]}
        return {"allOf": [first, {"properties": {"w": make()}}]}

    def _prefix(self, make: Any) -> dict[str, Any]:
        items = [make() for _ in range(self._random.randrange(1, 3))]
        made: dict[str, Any] = {"type": "array", "prefixItems": items}
        if self._chance(0.5):
            made["items"] = self._random.choice([False, make()])
        if self._chance(0.4):
            made["minItems"] = self._random.randrange(len(items) + 1)
        return made

    def _array(self, make: Any) -> dict[str, Any]:
        made: dict[str, Any] = {"type": "array", "items": make()}
        if self._chance(0.4):
            made["minItems"] = self._random.randrange(3)
        if self._chance(0.4):
            made["maxItems"] = made.get("minItems", 0) + self._random.randrange(4)
        return made

    def _object(self, make: Any) -> dict[str, Any]:
        names = ["a", "b", "name", "id", "é", "long key", 'q"x', "ab"]
        chosen = self._random.sample(names, self._random.randrange(0, 5))
        made: dict[str, Any] = {"type": "object", "properties": {name: make() for name in chosen}}
        if self._chance(0.7):
            made["required"] = [name for name in chosen if self._chance(0.6)]
        more = self._random.random()
        if more < 0.4:
            made["additionalProperties"] = False
        elif more < 0.6:
            made["additionalProperties"] = make()
        return made
