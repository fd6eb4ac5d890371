"""Text <-> ids with the tokenizer.json of a checkpoint (byte-level BPE).

Contract: control tokens are found by spelling in the ADDED vocabulary and come only from the odd
parts of a rendered prompt; plain text is encoded without the added vocabulary, so no text can
smuggle one in. Regions are cached by their text. Thread-safe after construction. Used by `serve`,
`LLM` and the command line through `core.protocols.Tokenizer`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from headrace.core.files import MAX_TOKENIZER_BYTES, TOKENIZER_FILE, read_regular
from headrace.errors import CheckpointError, InvalidRequest
from headrace.recipe.detokenizer import IncrementalDetokenizer
from headrace.recipe.encoder import bare_tokenizer, load_encoder
from headrace.recipe.render.prompt import RenderedPrompt
from headrace.recipe.segment_cache import Ids, SegmentCache

# Above this, ids are not shared between cached regions: a hostile file may name any number.
_MAX_SHARED_IDS = 2**20

DEFAULT_CACHE_BYTES = 64 * 2**20


class Tokenizer:
    """Byte-level BPE of one checkpoint.

    added: spelling -> id of the added vocabulary. vocab_size: highest known id + 1. is_added(id):
    whether an id belongs to the added vocabulary. cache: ids of the regions of earlier prompts.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        *,
        source: str = TOKENIZER_FILE,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        """Raises CheckpointError when the file is not a byte-level tokenizer.json."""
        self.source = source
        self._json = tokenizer_json
        content = _parse(tokenizer_json, source)
        # Loading comes first: it refuses every malformed vocabulary.
        self._encode_batch = load_encoder(content, source)
        added = _added_tokens(content, source)
        self.added: dict[str, int] = {spelling: token_id for token_id, spelling, _ in added}
        added_ids = frozenset(self.added.values())
        self.is_added: Callable[[int], bool] = added_ids.__contains__
        self._hidden_ids = frozenset(token_id for token_id, _, hidden in added if hidden)
        self._bytes_by_id = _bytes_by_id(content, source)
        plain = (len(data) for i, data in self._bytes_by_id.items() if i not in added_ids)
        self._longest_bytes = max(1, *plain)
        _check_unique(content["model"]["vocab"], self.added, len(added), source)
        for token_id, spelling, _ in added:
            self._bytes_by_id[token_id] = spelling.encode()
        self.vocab_size = max(self._bytes_by_id, default=-1) + 1
        # One int object per id: cached regions then cost 8 bytes a token instead of 40.
        shared = range(self.vocab_size if self.vocab_size <= _MAX_SHARED_IDS else 0)
        self.cache = SegmentCache(cache_bytes, list(shared))

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Tokenizer of a checkpoint directory; CheckpointError names a missing or broken file."""
        path = directory / TOKENIZER_FILE
        return cls(read_regular(path, MAX_TOKENIZER_BYTES), source=str(path))

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; spellings of control tokens stay ordinary text."""
        return self._encode_texts([text])[0].tolist()

    def encode_full(self, text: str) -> list[int]:
        """Ids of text in which spellings of the added vocabulary are tokens; never for prompts."""
        try:
            ids: list[int] = self._full.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise _no_utf8() from error
        return ids

    def encode_prompt(self, prompt: RenderedPrompt) -> list[int]:
        """Ids of a rendered prompt. Regions between control tokens do not see each other.

        Raises InvalidRequest when a control token of the prompt is not in the added vocabulary.
        """
        parts = prompt.parts
        specials = self._special_ids(parts[1::2])
        regions = self._region_ids(parts[0::2])
        ids = list(regions[0])
        for special, region in zip(specials, regions[1:], strict=True):
            ids.append(special)
            ids += region
        return ids

    def count(self, prompt: RenderedPrompt) -> int:
        """Length of `encode_prompt`; an image counts as the one token that stands in its place."""
        parts = prompt.parts
        specials = self._special_ids(parts[1::2])
        return len(specials) + sum(map(len, self._region_ids(parts[0::2])))

    def least_tokens(self, prompt: RenderedPrompt) -> int:
        """A number of tokens that the prompt has for certain, found without tokenizing it."""
        return len(prompt.specials) + sum(map(self.least_text_tokens, prompt.regions))

    def least_text_tokens(self, text: str) -> int:
        """The same for plain text: none of its tokens is longer than the longest one."""
        size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        return -(-size // self._longest_bytes)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; tokens flagged special are left out by default, unknown ids are empty."""
        detokenizer = self.detokenizer(skip_special=skip_special)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def detokenizer(self, *, skip_special: bool = True) -> IncrementalDetokenizer:
        """A fresh incremental detokenizer."""
        return IncrementalDetokenizer(
            self._visible_bytes if skip_special else self._bytes_by_id.get, self.is_added
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token, control tokens included; empty for an unknown id."""
        return self._bytes_by_id.get(token_id, b"")

    def has_id(self, token_id: int) -> bool:
        """Whether the id is a token."""
        return token_id in self._bytes_by_id

    @cached_property
    def whole_text(self) -> Callable[[int], str | None]:
        """whole_text(id): text of a token that is complete UTF-8 on its own, else None.

        Control tokens are their spelling, unknown ids None. A plain function, for inner loops.
        """
        texts: dict[int, str] = {}
        for token_id, data in self._bytes_by_id.items():
            try:
                texts[token_id] = data.decode()
            except UnicodeDecodeError:
                continue
        return texts.get

    @cached_property
    def whole_texts(self) -> Sequence[str | None]:
        """`whole_text` of every id, by number."""
        return list(map(self.whole_text, range(self.vocab_size)))

    @cached_property
    def _full(self) -> tokenizers.Tokenizer:
        """With the added vocabulary; loaded when first asked for, since prompts never need it."""
        return bare_tokenizer(_parse(self._json, self.source), self.source)

    def _special_ids(self, spellings: Sequence[str]) -> list[int]:
        added = self.added
        try:
            return [added[spelling] for spelling in spellings]
        except KeyError as error:
            raise InvalidRequest(
                f'failed to encode conversation: special token "{error.args[0]}" is not in the '
                "added vocabulary"
            ) from None

    def _region_ids(self, regions: Sequence[str]) -> list[Ids]:
        found = self.cache.find(regions)
        if None not in found:
            return found  # type: ignore[return-value]
        places = [place for place, ids in enumerate(found) if ids is None]
        texts = [regions[place] for place in places]
        encoded = self._encode_texts(texts)
        for place, ids in zip(places, encoded, strict=True):
            found[place] = ids.tolist()
        self.cache.add(list(zip(texts, encoded, strict=True)))
        return found  # type: ignore[return-value]

    def _encode_texts(self, texts: list[str]) -> list[array[int]]:
        try:
            return self._encode_batch(texts)
        except (TypeError, UnicodeEncodeError) as error:
            raise _no_utf8() from error

    def _visible_bytes(self, token_id: int) -> bytes | None:
        return None if token_id in self._hidden_ids else self._bytes_by_id.get(token_id)


def _no_utf8() -> InvalidRequest:
    # The library says TypeError: of all str values, only those with lone surrogates fail.
    return InvalidRequest("Text contains a lone surrogate, which is not a character.")


def _parse(data: bytes, source: str) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{source}: not valid JSON: {error}.") from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise CheckpointError(f'{source}: has no "model" object; not a tokenizer.json.')
    decoder = content.get("decoder")
    kind = decoder.get("type") if isinstance(decoder, dict) else None
    if kind != "ByteLevel":
        raise CheckpointError(
            f"{source}: decoder is {kind!r}; only byte-level tokenizers (ByteLevel) are supported."
        )
    return content


def _added_tokens(content: dict[str, Any], source: str) -> list[tuple[int, str, bool]]:
    """(id, spelling, whether it is left out of text) of every added token."""
    entries = content.get("added_tokens") or []
    try:
        tokens = [(entry["id"], entry["content"], entry["special"]) for entry in entries]
        for token_id, spelling, special in tokens:
            # type(): True is an int too.
            if type(token_id) is not int or token_id < 0 or not isinstance(spelling, str):
                raise ValueError
            if not isinstance(special, bool):
                raise TypeError
        return tokens
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{source}: an entry of added_tokens is malformed.") from error


def _byte_of_character() -> dict[str, int]:
    """The GPT-2 table: printable bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in table)
    table.update({chr(0x100 + number): byte for number, byte in enumerate(others)})
    return table


def _bytes_by_id(content: dict[str, Any], source: str) -> dict[int, bytes]:
    vocabulary = content["model"].get("vocab")
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise CheckpointError(f'{source}: has no "model.vocab".')
    # str.translate + latin-1 is far faster than a look-up per character: 128k tokens in 0.1 s.
    table = {ord(character): byte for character, byte in _byte_of_character().items()}
    result: dict[int, bytes] = {}
    for token, token_id in vocabulary.items():
        try:
            result[token_id] = token.translate(table).encode("latin-1")
        except UnicodeEncodeError:
            # Not byte-level text: BOS, EOS and padding stand in the BPE vocabulary by spelling.
            result[token_id] = token.encode()
    return result


def _check_unique(
    vocabulary: dict[str, int], added: dict[str, int], added_entries: int, source: str
) -> None:
    """Refuse ids with two spellings and spellings with two ids: text would not survive."""
    problem = None
    spellings = {token_id: spelling for spelling, token_id in vocabulary.items()}
    if len(spellings) < len(vocabulary):
        token_id = next(i for s, i in vocabulary.items() if spellings[i] != s)
        problem = f"two tokens of model.vocab have the id {token_id}"
    elif len(added) < added_entries or len(set(added.values())) < len(added):
        problem = "two entries of added_tokens have the same id or the same content"
    for spelling, token_id in added.items():
        # BOS, EOS and padding may stand in both lists, as the same token.
        if spellings.get(token_id, spelling) != spelling:
            problem = f"added token {token_id} has the id of another token of model.vocab"
        elif vocabulary.get(spelling, token_id) != token_id:
            problem = f"added token {token_id} has another id in model.vocab"
    if problem is not None:
        raise CheckpointError(f"{source}: {problem}.")
