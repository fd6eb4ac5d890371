"""Curves on disk: found again, or measured again."""

from __future__ import annotations

import json
import os

import pytest

from headrace.engine.speculation.curve import Curve
from headrace.engine.speculation.curve_cache import CurveCache
from headrace.errors import OutputError

FINGERPRINT = {"device": "cpu", "libraries": (("numpy", "2.0"),), "sizes": [1, 2], "kind": "verify"}
CURVE = Curve((1, 2, 4), (0.1, 0.2, 0.30000000000000004), stepped=True)
NOW_S = 1_000_000.0


@pytest.fixture
def cache(tmp_path) -> CurveCache:
    return CurveCache(tmp_path / "curves", ttl_s=100.0)


def test_found_again_exactly(cache, tmp_path):
    cache.store(FINGERPRINT, CURVE, NOW_S)
    found = CurveCache(tmp_path / "curves", ttl_s=100.0).load(FINGERPRINT, NOW_S + 99.0)
    assert found is not None
    assert found.sizes.tolist() == CURVE.sizes.tolist()
    assert found.seconds.tolist() == CURVE.seconds.tolist()
    assert found.stepped
    assert not CurveCache(tmp_path, ttl_s=100.0).load(FINGERPRINT, NOW_S)


def test_only_of_the_same_fingerprint(cache):
    cache.store(FINGERPRINT, CURVE, NOW_S)
    assert cache.load(FINGERPRINT | {"device": "gpu"}, NOW_S) is None
    assert cache.load(FINGERPRINT | {"more": None}, NOW_S) is None
    assert cache.load(dict(reversed(FINGERPRINT.items())), NOW_S) is not None


@pytest.mark.parametrize("now_s", [NOW_S + 100.0, NOW_S - 0.1])
def test_not_when_too_old_or_from_the_future(cache, now_s):
    cache.store(FINGERPRINT, CURVE, NOW_S)
    assert cache.load(FINGERPRINT, now_s) is None


def test_replaced_and_expired_ones_removed(cache, tmp_path):
    cache.store(FINGERPRINT, CURVE, NOW_S)
    cache.store(FINGERPRINT | {"kind": "draft"}, CURVE, NOW_S + 50.0)
    cache.store(FINGERPRINT, Curve((1,), (9.0,)), NOW_S + 50.0)
    found = cache.load(FINGERPRINT, NOW_S + 50.0)
    assert found is not None and found.of(1) == 9.0
    assert len(list((tmp_path / "curves").iterdir())) == 2
    (tmp_path / "curves" / "notes.txt").write_text("not ours")
    cache.store({"other": 1}, CURVE, NOW_S + 500.0)
    names = sorted(path.name for path in (tmp_path / "curves").iterdir())
    assert len(names) == 2 and names[1] == "notes.txt"


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: "",
        lambda record: "{",
        lambda record: "[" * 100_000,
        lambda record: "[]",
        lambda record: json.dumps(record)[:-20],
        lambda record: json.dumps(record | {"format": "headrace-curve/2"}),
        lambda record: json.dumps(record | {"fingerprint": {}}),
        lambda record: json.dumps(record | {"sizes": [2, 1]}),
        lambda record: json.dumps(record | {"sizes": [[1], 2]}),
        lambda record: json.dumps(record | {"sizes": "ab", "seconds": "cd"}),
        lambda record: json.dumps(record | {"seconds": [1, 2, None]}),
        lambda record: json.dumps(record | {"seconds": [1, 2, float("nan")]}),
        lambda record: json.dumps(record | {"measured_at_s": "today"}),
        lambda record: json.dumps(record | {"measured_at_s": float("nan")}),
        lambda record: json.dumps({k: v for k, v in record.items() if k != "stepped"}),
        lambda record: " " * (2**20 + 1),
    ],
)
def test_damaged_files_count_as_absent(cache, tmp_path, damage):
    cache.store(FINGERPRINT, CURVE, NOW_S)
    (path,) = (tmp_path / "curves").iterdir()
    path.write_text(damage(json.loads(path.read_text())))
    assert cache.load(FINGERPRINT, NOW_S) is None
    cache.store(FINGERPRINT, CURVE, NOW_S)
    assert cache.load(FINGERPRINT, NOW_S) is not None


def test_pipes_and_folders_in_its_place_do_not_block(cache, tmp_path):
    cache.store(FINGERPRINT, CURVE, NOW_S)
    (path,) = (tmp_path / "curves").iterdir()
    path.unlink()
    os.mkfifo(path)
    assert cache.load(FINGERPRINT, NOW_S) is None
    cache.store(FINGERPRINT, CURVE, NOW_S)
    assert cache.load(FINGERPRINT, NOW_S) is not None
    path.unlink()
    path.mkdir()
    assert cache.load(FINGERPRINT, NOW_S) is None
    with pytest.raises(OutputError, match="could not be stored"):
        cache.store(FINGERPRINT, CURVE, NOW_S)
    assert [p.name for p in (tmp_path / "curves").iterdir()] == [path.name]  # no temporary file


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file"):
        CurveCache(tmp_path / "file").store(FINGERPRINT, CURVE, NOW_S)
    assert CurveCache(tmp_path / "file").load(FINGERPRINT, NOW_S) is None
