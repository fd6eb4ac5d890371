"""Keys are exactly those of the specification, however the tokens arrive."""

from __future__ import annotations

import hashlib
import hmac
import json
import random
import struct

import numpy as np
import pytest

from headrace.core.hashing import (
    GRAIN_TOKENS,
    BlockKeys,
    media_extra,
    namespace_key,
    pack_tokens,
    root_key,
    salt_key,
)
from headrace.errors import InternalError

NAMESPACE, SALT = bytes(range(32)), bytes(range(32, 64))
ROOT = root_key(NAMESPACE, SALT)


def plain_keys(tokens, extras=None, grain=128):
    """The formula of spec/serving.md 3.2, word by word."""
    key = hashlib.sha256(b"kvkey-v1" + NAMESPACE + SALT).digest()
    keys = []
    for i in range(len(tokens) // grain):
        ids = b"".join(struct.pack("<i", t) for t in tokens[grain * i : grain * (i + 1)])
        key = hashlib.sha256(key + ids + (extras or {}).get(i, b"")).digest()
        keys.append(key)
    return keys


def random_tokens(count, seed=1):
    return random.Random(seed).choices(range(129280), k=count)


def test_namespace_is_the_sorted_json_of_the_profile():
    profile = {"model_id": "m", "grain": 128, "sources": [{"layer": 2, "ratio": 2}]}
    text = '{"grain":128,"model_id":"m","sources":[{"layer":2,"ratio":2}]}'
    assert namespace_key(profile) == hashlib.sha256(text.encode()).digest()
    assert namespace_key(dict(reversed(profile.items()))) == namespace_key(profile)
    assert namespace_key({**profile, "grain": 64}) != namespace_key(profile)
    assert json.loads(text) == profile


def test_salt_is_an_hmac_of_the_domain():
    expected = hmac.new(b"secret", b"tenant:7", hashlib.sha256).digest()
    assert salt_key(b"secret", "tenant:7") == expected
    assert salt_key(b"secret", "public") != expected != salt_key(b"other", "tenant:7")


def test_known_answer():
    # Computed once with coreutils' sha256sum, so that no refactoring changes stored keys.
    assert ROOT.hex() == "5f8a5614e4213079d580a3488640ef78fd576dec5d8219bcb870b6138cb0fde7"
    keys = BlockKeys(ROOT).cover(pack_tokens(range(256)), 256)
    assert keys[1].hex() == "1435c8e670ca4d29a8733d85b34797233a381b3e4c95c960b53524f4a881bd87"


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 255, 256, 1000])
def test_only_full_blocks_have_keys(count):
    tokens = random_tokens(count)
    keys = BlockKeys(ROOT)
    assert keys.cover(pack_tokens(tokens), count) == plain_keys(tokens)
    assert len(keys) == count // GRAIN_TOKENS


def test_arriving_in_pieces_gives_the_same_keys():
    tokens = random_tokens(1500)
    buffer = np.zeros(2000, dtype=np.int32)
    keys, seen = BlockKeys(ROOT), []
    for count in (1, 100, 128, 130, 700, 701, 1408, 1500):
        buffer[:count] = tokens[:count]
        seen += keys.cover(buffer.data, count)
        assert keys.cover(buffer.data, count) == []
        assert keys.keys == plain_keys(tokens[:count]) == seen


def test_one_changed_token_changes_its_block_and_all_later_ones():
    tokens = random_tokens(640)
    changed = tokens.copy()
    changed[300] ^= 1
    old, new = plain_keys(tokens), BlockKeys(ROOT).cover(pack_tokens(changed), 640)
    assert [a == b for a, b in zip(old, new, strict=True)] == [True, True, False, False, False]


def test_namespaces_and_salts_never_meet():
    tokens = pack_tokens(random_tokens(128))
    roots = [ROOT, root_key(SALT, NAMESPACE), root_key(NAMESPACE, NAMESPACE)]
    assert len({BlockKeys(root).cover(tokens, 128)[0] for root in roots}) == 3


def test_extras_of_images_and_adapters():
    tokens = random_tokens(512)
    extras = {
        1: media_extra([(100, 200, b"\1" * 32)]),
        2: media_extra([(-28, 200, b"\1" * 32), (120, 9, b"\2" * 32)], adapter=b"\3" * 32),
    }
    assert extras[2] == (
        struct.pack("<ii", -28, 200)
        + b"\1" * 32
        + struct.pack("<ii", 120, 9)
        + b"\2" * 32
        + b"\3" * 32
    )
    keys = BlockKeys(ROOT)
    packed = pack_tokens(tokens)
    new = keys.cover(packed, 200, extras) + keys.cover(packed, 512, extras)
    assert new == plain_keys(tokens, extras)
    assert new[0] == plain_keys(tokens)[0]
    assert not set(new[1:]) & set(plain_keys(tokens))


def test_fork_and_truncate():
    tokens = random_tokens(600)
    keys = BlockKeys(ROOT)
    keys.cover(pack_tokens(tokens), 300)
    twin = keys.copy()
    other = tokens[:300] + random_tokens(300, seed=2)
    twin.cover(pack_tokens(other), 600)
    keys.cover(pack_tokens(tokens), 600)
    assert keys.keys == plain_keys(tokens)
    assert twin.keys == plain_keys(other)
    keys.truncate(1)
    keys.cover(pack_tokens(other), 600)
    assert keys.keys == [plain_keys(tokens)[0], *plain_keys(tokens[:128] + other[128:])[1:]]


def test_other_grains():
    tokens = random_tokens(40)
    assert BlockKeys(ROOT, 4).cover(pack_tokens(tokens), 40) == plain_keys(tokens, grain=4)


def test_contradictions_are_refused():
    with pytest.raises(InternalError, match="buffer"):
        BlockKeys(ROOT).cover(pack_tokens(range(200)), 256)
    with pytest.raises(InternalError, match="32 bytes"):
        root_key(b"short", SALT)
