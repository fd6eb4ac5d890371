"""What an answer must look like, as a value: a grammar and the point from which it holds.

Contract: a `GrammarSpec` is validated once, where it is built, is hashable and travels over the
wire; whether the grammar itself can be compiled is found out by `engine/grammar`. Made by the
protocol layer (`recipe`) and by users of `SamplingParams.grammar`; imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace.core.plain import is_huge, plain_ids
from headrace.errors import InvalidRequest

MAX_GRAMMAR_CHARACTERS = 2**20
MAX_TRIGGER_TOKENS = 64
# Of white space in a row between the parts of JSON: enough for indented text, and an end for a
# model that would go on for ever.
MAX_JSON_SPACES = 32


class GrammarKind(StrEnum):
    """What `GrammarSpec.text` is."""

    JSON_SCHEMA = "json_schema"  # a JSON schema
    JSON_OBJECT = "json_object"  # empty: any JSON object
    REGEX = "regex"  # a regular expression that the whole answer matches
    LARK = "lark"  # a Lark grammar in llguidance's dialect; <[5]> is the token with id 5
    CHOICE = "choice"  # a JSON array of strings, one of which is the answer


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar for one answer. Raises InvalidRequest naming what is wrong.

    text: by `kind`. trigger_token_ids: generation is free until this sequence has appeared
    completely, the grammar holds for all that follows; (): it holds from the first token.
    bound_token_id: once this token is drawn in the free part, the rest of the trigger is forced
    token by token, and the grammar follows. required: EOS is masked until the trigger has come, so
    that no answer ends without the grammar; False: it may end before. Stop tokens and stop strings
    of the request end it anywhere. checked: schemas in `text` are in the normal form of
    `core/schema`, as the protocol layer writes them; leave it out, and the engine sees to that.
    """

    kind: GrammarKind
    text: str = ""
    trigger_token_ids: tuple[int, ...] = ()
    bound_token_id: int | None = None
    required: bool = True
    checked: bool = False

    def __post_init__(self) -> None:
        self._check_text()
        ids = plain_ids(self.trigger_token_ids)
        if ids is None or len(ids) > MAX_TRIGGER_TOKENS:
            raise InvalidRequest(
                f"grammar.trigger_token_ids must be a list of at most {MAX_TRIGGER_TOKENS} token "
                "ids.",
                param="grammar",
            )
        for token in ids if self.bound_token_id is None else (*ids, self.bound_token_id):
            if isinstance(token, bool) or not isinstance(token, int) or is_huge(token) or token < 0:
                raise InvalidRequest(
                    "grammar.trigger_token_ids and grammar.bound_token_id must be token ids.",
                    param="grammar",
                )
        if self.bound_token_id is not None and not ids:
            raise InvalidRequest(
                "grammar.bound_token_id needs trigger_token_ids, the tokens that it forces.",
                param="grammar",
            )
        for name in ("required", "checked"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"grammar.{name} must be true or false.", param="grammar")
        object.__setattr__(self, "trigger_token_ids", ids)

    def _check_text(self) -> None:
        try:
            object.__setattr__(self, "kind", GrammarKind(self.kind))
        except ValueError:
            raise InvalidRequest(
                f"grammar.kind {self.kind!r} is unknown, allowed: {', '.join(GrammarKind)}.",
                param="grammar",
            ) from None
        if not isinstance(self.text, str) or len(self.text) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(
                f"grammar.text must be a string of at most {MAX_GRAMMAR_CHARACTERS} characters.",
                param="grammar",
            )
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                "grammar.text holds a lone surrogate, which is not a character.", param="grammar"
            ) from None
        if bool(self.text) == (self.kind is GrammarKind.JSON_OBJECT):
            wanted = "must be empty" if self.text else "must not be empty"
            raise InvalidRequest(f"grammar.text {wanted} for {self.kind}.", param="grammar")
