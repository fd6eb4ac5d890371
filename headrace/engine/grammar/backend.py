"""What a grammar library must do for us, and the vocabulary that it is given.

Contract: a `GrammarBackend` compiles the text of a `GrammarSpec` (in any thread, several at once)
to a `CompiledGrammar`, which makes matchers. A `BackendMatcher` follows one answer token by token;
it is used by one thread at a time and knows nothing of triggers, EOS handling or caches: that is
`engine/grammar/matcher.py`. After equal bytes it must give equal masks, whatever the tokens were.
Implementations: `llguidance_backend` (default), `xgrammar_backend` (extra). No torch here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.core.grammar import GrammarKind
from headrace.core.protocols import Vocabulary

# One bit per token, token i at bit i % 32 of word i // 32: int32 [ceil(vocab / 32)].
MaskWords = npt.NDArray[np.int32]


class MatcherFailed(Exception):
    """A matcher met a limit of its library (states, items of one step) and cannot go on."""


class MatcherBroken(MatcherFailed):
    """A matcher got a token that it had not allowed: a bug, never the grammar's fault."""


class BackendMatcher(Protocol):
    """One answer inside a grammar."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on by tokens that the masks allowed. Raises MatcherFailed at a limit."""
        ...

    def rollback(self, count: int) -> None:
        """Take the last `count` accepted tokens back."""
        ...

    def fill_mask(self, words: MaskWords) -> None:
        """Write the tokens that may come next, EOS among them where the answer may end.

        Raises MatcherFailed at a limit.
        """
        ...


class CompiledGrammar(Protocol):
    """A grammar that matchers can be made of."""

    @property
    def json_schema(self) -> str | None:
        """Schema whose JSON it describes, members in the schema's order; None: something else."""
        ...

    def matcher(self) -> BackendMatcher:
        """A matcher at the start of an answer; microseconds."""
        ...


class GrammarBackend(Protocol):
    """One grammar library with one vocabulary."""

    @property
    def name(self) -> str:
        """Name and version, part of the key of the disk cache."""
        ...

    def compile(self, kind: GrammarKind, text: str) -> CompiledGrammar:
        """Raises InvalidGrammar saying what the library does not take."""
        ...

    def serialise(self, grammar: CompiledGrammar) -> bytes | None:
        """A compiled grammar as bytes; None: this library cannot."""
        ...

    def deserialise(self, data: bytes) -> CompiledGrammar:
        """What `serialise` wrote. Raises ValueError when it cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Every id of the model's vocabulary as a grammar sees it.

    texts: bytes by id, empty for ids that are no tokens. control_ids: ids that are never text.
    """

    texts: tuple[bytes, ...]
    control_ids: tuple[int, ...]
    eos_id: int

    @classmethod
    def of(cls, vocabulary: Vocabulary, vocab_size: int, eos_id: int) -> TokenTable:
        """vocab_size: of the model's logits; its ids beyond the tokenizer's are no tokens."""
        known = range(min(vocab_size, vocabulary.vocab_size))
        texts = [vocabulary.token_bytes(token) for token in known]
        control = [t for t in known if texts[t] and (vocabulary.is_added(t) or t == eos_id)]
        texts += [b""] * (vocab_size - len(texts))
        return cls(tuple(texts), tuple(control), eos_id)

    @property
    def num_words(self) -> int:
        """Words of a mask."""
        return (len(self.texts) + 31) // 32

    def digest(self) -> bytes:
        """Names this vocabulary."""
        hasher = hashlib.sha256(b"%d %d " % (len(self.texts), self.eos_id))
        hasher.update(np.array(self.control_ids, dtype="<i8").tobytes())
        hasher.update(np.array([len(text) for text in self.texts], dtype="<i8").tobytes())
        hasher.update(b"".join(self.texts))
        return hasher.digest()
