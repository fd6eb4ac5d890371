"""Throughput curves on disk, so that a restart on the same machine measures nothing.

Contract: one JSON file per fingerprint, replaced atomically, valid for `ttl_s`; no clock: the time
comes in as an argument. What cannot be read, is damaged, too old or from the future counts as
absent. The fingerprint says all that the curve depends on: device, library versions, model,
precision, parallel sizes, graph sizes, kind of curve.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.core.files import read_regular
from headrace.engine.speculation.curve import Curve
from headrace.errors import CheckpointError, ConfigError, OutputError

FORMAT = "headrace-curve/1"
TTL_S = 3600.0
MAX_FILE_BYTES = 2**20
MAX_PRUNED = 256  # files looked at when one is stored


class CurveCache:
    """directory: made when a curve is stored. ttl_s: how long a curve counts."""

    def __init__(self, directory: Path, ttl_s: float = TTL_S) -> None:
        self._directory = directory
        self._ttl_s = ttl_s

    def load(self, fingerprint: Mapping[str, object], now_s: float) -> Curve | None:
        """The stored curve of `fingerprint` (what JSON can hold), or None. now_s: Unix time."""
        record = self._read(self._path(fingerprint), now_s)
        if record is None or record.get("fingerprint") != _plain(fingerprint):
            return None
        try:
            return Curve(record["sizes"], record["seconds"], stepped=bool(record["stepped"]))
        except (KeyError, TypeError, ValueError, ConfigError):
            return None

    def store(self, fingerprint: Mapping[str, object], curve: Curve, now_s: float) -> None:
        """Keep `curve` and drop what has expired. Raises OutputError, naming the directory; a
        caller that can measure again may go on."""
        record = {
            "format": FORMAT,
            "fingerprint": _plain(fingerprint),
            "measured_at_s": now_s,
            "sizes": curve.sizes.tolist(),
            "seconds": curve.seconds.tolist(),
            "stepped": curve.stepped,
        }
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._prune(now_s)
            _replace(self._path(fingerprint), json.dumps(record).encode())
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise OutputError(
                f"The throughput curve could not be stored in {self._directory} ({reason})."
            ) from error

    def _path(self, fingerprint: Mapping[str, object]) -> Path:
        key = json.dumps(_plain(fingerprint), sort_keys=True)
        return self._directory / f"curve-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def _read(self, path: Path, now_s: float) -> dict[str, Any] | None:
        try:
            record = json.loads(read_regular(path, MAX_FILE_BYTES))
        except (CheckpointError, ValueError, RecursionError):
            return None
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            return None
        measured_at_s = record.get("measured_at_s")
        if not isinstance(measured_at_s, int | float):
            return None
        return record if 0.0 <= now_s - measured_at_s < self._ttl_s else None

    def _prune(self, now_s: float) -> None:
        """Unlink our files that no longer count. Another process may do the same."""
        for _, path in zip(range(MAX_PRUNED), self._directory.glob("curve-*.json"), strict=False):
            if self._read(path, now_s) is None:
                with contextlib.suppress(OSError):
                    path.unlink()


def _plain(fingerprint: Mapping[str, object]) -> object:
    """As it is when read back: tuples become lists."""
    return json.loads(json.dumps(dict(fingerprint)))


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old or the new content, never a part."""
    handle, name = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
