"""Index arithmetic of Engram: token compression, bucket primes, hash multipliers, row offsets.

Everything here is fixed by tokenizer.json and config.json; the released tables were written under
exactly these numbers, so one differing compressed id or prime reads other rows everywhere. Pure
NumPy (and `tokenizers` for the token map). Called by the model's Engram layer, by `weights` and by
`tiny`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, normalizers

from headrace.core.files import MAX_TOKENIZER_BYTES, read_regular
from headrace.errors import CheckpointError, ModelConfigError
from headrace.model.spec import EngramSpec, ModelSpec

# Stands for "a lone space" while the text is stripped (private use area, in no vocabulary text).
_LONE_SPACE = "\ue000"
_SEED_PER_LAYER = 10007
# Strong pseudoprimes to all of these bases start above 3.3e24, so the test is exact below 2^64.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


@dataclass(frozen=True, slots=True)
class EngramTables:
    """Constants of all Engram layers.

    token_map: int32 [V], token id -> compressed id. pad: compressed id of the pad token.
    multipliers: int64 [layers, max_ngram]. primes, offsets: int64 [layers, max_ngram - 1, heads];
    the table row of bucket b is offset + b. Layers are in config order.
    """

    token_map: npt.NDArray[np.int32]
    pad: int
    multipliers: npt.NDArray[np.int64]
    primes: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def hash_rows(self, layer: int, compressed: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Table rows of n-grams of compressed ids.

        layer: position in the config's list. compressed: int64 [..., max_ngram], newest first, pad
        where there is no token. Returns int64 [..., (max_ngram - 1) * heads], ordered by n-gram
        size, then head.
        """
        products = compressed * self.multipliers[layer]
        # XOR of the first n products for every n >= 2 at once.
        mixed = np.bitwise_xor.accumulate(products, axis=-1)[..., 1:, None]
        rows: npt.NDArray[np.int64] = mixed % self.primes[layer] + self.offsets[layer]
        return rows.reshape(*compressed.shape[:-1], -1)


def engram_tables(spec: ModelSpec, tokenizer_json: Path) -> EngramTables | None:
    """Tables of a checkpoint, or None for a model without Engram.

    Raises ModelConfigError where config and tokenizer disagree (compressed size) or a table has
    fewer rows than the buckets need; CheckpointError where tokenizer.json cannot be read.
    """
    engram = spec.engram
    if engram is None:
        return None
    token_map = compressed_token_map(tokenizer_json, spec.vocab_size)
    computed = int(token_map.max()) + 1
    if computed != engram.compressed_vocab:
        raise ModelConfigError(
            f"config.json says engram_compressed_vocab_size {engram.compressed_vocab}, "
            f"{tokenizer_json} gives {computed}: every table row would be another one.",
            param="text_config.engram_compressed_vocab_size",
        )
    return tables_of(engram, token_map)


def tables_of(engram: EngramSpec, token_map: npt.NDArray[np.int32]) -> EngramTables:
    """Tables for a map of token ids [V] to compressed ids.

    Raises ModelConfigError where a table has fewer rows than the buckets need.
    """
    return EngramTables(
        token_map=token_map,
        pad=int(token_map[engram.pad_id]),
        multipliers=np.stack(
            [
                ngram_multipliers(layer, engram.max_ngram, engram.compressed_vocab)
                for layer in engram.layers
            ]
        ),
        primes=np.array(checked_primes(engram), dtype=np.int64),
        offsets=row_offsets(engram),
    )


def _normalizer() -> normalizers.Normalizer:
    """The token text normaliser. Its StripAccents removes all marks: Mn, Mc and Me."""
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def load_tokenizer(tokenizer_json: Path) -> Tokenizer:
    """Read tokenizer.json. Raises CheckpointError."""
    data = read_regular(tokenizer_json, MAX_TOKENIZER_BYTES)
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises bare Exception for malformed files
        raise CheckpointError(f"{tokenizer_json} is not a valid tokenizer: {error}.") from error


def compressed_token_map(tokenizer_json: Path, vocab_size: int) -> npt.NDArray[np.int32]:
    """int32 [vocab_size]: ids of tokens that differ only in case, accents or spacing are merged.

    Compressed ids count up in order of first appearance. Pieces that are no valid UTF-8 by
    themselves are keyed by their vocabulary spelling. Raises CheckpointError for an unreadable
    tokenizer or one that lacks ids below `vocab_size`.
    """
    return tokenizer_map(load_tokenizer(tokenizer_json), vocab_size)


def tokenizer_map(tokenizer: Tokenizer, vocab_size: int) -> npt.NDArray[np.int32]:
    """As `compressed_token_map`, of a loaded tokenizer."""
    known = set(tokenizer.get_vocab().values())
    absent = next((token for token in range(vocab_size) if token not in known), None)
    if absent is not None:
        raise CheckpointError(
            f"tokenizer.json has no token {absent}, but vocab_size is {vocab_size}."
        )
    normalize = _normalizer().normalize_str
    texts = tokenizer.decode_batch([[i] for i in range(vocab_size)], skip_special_tokens=False)
    seen: dict[str, int] = {}
    result = np.empty(vocab_size, dtype=np.int32)
    for token, text in enumerate(texts):
        if not text or "\ufffd" in text:
            key = (tokenizer.id_to_token(token) or "") if text else ""
        else:
            key = normalize(text) or text
        result[token] = seen.setdefault(key, len(seen))
    return result


def is_prime(number: int) -> bool:
    """Exact for 0 <= number < 2^64 (Miller-Rabin with fixed witnesses)."""
    if number < 2:
        return False
    for p in _WITNESSES:
        if number % p == 0:
            return number == p
    odd = number - 1
    twos = (odd & -odd).bit_length() - 1
    odd >>= twos
    for a in _WITNESSES:
        x = pow(a, odd, number)
        if x in (1, number - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % number
            if x == number - 1:
                break
        else:
            return False
    return True


def ngram_primes(spec: EngramSpec) -> list[list[list[int]]]:
    """Bucket counts per layer [max_ngram - 1][heads]: ascending primes, none used twice."""
    seen: set[int] = set()
    layers = []
    for _ in spec.layers:
        sizes = []
        for _ in range(spec.max_ngram - 1):
            heads: list[int] = []
            candidate = spec.vocab_size - 1
            while len(heads) < spec.heads:
                candidate += 1
                if candidate not in seen and is_prime(candidate):
                    seen.add(candidate)
                    heads.append(candidate)
            sizes.append(heads)
        layers.append(sizes)
    return layers


def checked_primes(spec: EngramSpec) -> list[list[list[int]]]:
    """`ngram_primes`; raises ModelConfigError where a table has fewer rows than their sum."""
    primes = ngram_primes(spec)
    for layer, rows, sizes in zip(spec.layers, spec.num_embeddings, primes, strict=True):
        needed = sum(map(sum, sizes))
        if rows < needed:
            raise ModelConfigError(
                f"config.json: text_config.engram_num_embeddings: layer {layer} has {rows} rows, "
                f"its buckets need {needed}.",
                param="text_config.engram_num_embeddings",
            )
    return primes


def ngram_multipliers(
    layer_id: int, max_ngram: int, compressed_vocab: int
) -> npt.NDArray[np.int64]:
    """int64 [max_ngram], odd; compressed id times multiplier stays below 2^63."""
    bound = max(1, ((2**63 - 1) // compressed_vocab) // 2)
    drawn = np.random.default_rng(_SEED_PER_LAYER * layer_id).integers(
        0, bound, size=max_ngram, dtype=np.int64
    )
    return drawn * 2 + 1


def row_offsets(spec: EngramSpec) -> npt.NDArray[np.int64]:
    """int64 [layers, max_ngram - 1, heads]: first table row of each bucket group."""
    primes = np.array(ngram_primes(spec), dtype=np.int64).reshape(len(spec.layers), -1)
    starts = np.cumsum(primes, axis=1) - primes
    return starts.reshape(len(spec.layers), spec.max_ngram - 1, spec.heads)
