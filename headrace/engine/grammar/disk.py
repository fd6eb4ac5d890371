"""Compiled grammars on disk, for libraries that take seconds to compile and can write them.

Contract: one file per (vocabulary, library version, kind, text), named by a digest, written whole
or not at all. The cache may be deleted at any time and never fails a request: what cannot be read
is compiled again, what cannot be written is left out. At most `max_bytes`: the oldest files go
first. Called in compiler threads, several at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from headrace.core.grammar import GrammarKind
from headrace.engine.grammar.backend import CompiledGrammar, GrammarBackend, TokenTable

MAX_DIRECTORY_BYTES = 2**30
MAX_FILE_BYTES = 2**28
_SUFFIX = ".grammar"


class GrammarDirectory:
    """A directory of compiled grammars."""

    def __init__(self, path: Path, max_bytes: int = MAX_DIRECTORY_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes

    def load(
        self, backend: GrammarBackend, table: TokenTable, kind: GrammarKind, text: str
    ) -> CompiledGrammar | None:
        """The grammar, None: it is not there or cannot be read."""
        path = self._file(backend, table, kind, text)
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                return None
            data = path.read_bytes()
            os.utime(path)
            return backend.deserialise(data)
        except (OSError, ValueError):
            return None

    def store(
        self,
        backend: GrammarBackend,
        table: TokenTable,
        kind: GrammarKind,
        text: str,
        grammar: CompiledGrammar,
    ) -> None:
        """Write a grammar if its library can."""
        data = backend.serialise(grammar)
        if data is None or len(data) > min(MAX_FILE_BYTES, self._max_bytes):
            return
        temporary = None
        with contextlib.suppress(OSError):
            self._path.mkdir(parents=True, exist_ok=True)
            self._make_room(len(data))
            handle, temporary = tempfile.mkstemp(dir=self._path)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, self._file(backend, table, kind, text))
            temporary = None
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def _file(
        self, backend: GrammarBackend, table: TokenTable, kind: GrammarKind, text: str
    ) -> Path:
        hasher = hashlib.sha256(table.digest())
        for part in (backend.name, kind, text):
            hasher.update(b"\0" + part.encode())
        return self._path / (hasher.hexdigest() + _SUFFIX)

    def _make_room(self, needed: int) -> None:
        files = [(path, path.stat()) for path in self._path.glob("*" + _SUFFIX)]
        size = sum(stat.st_size for _, stat in files) + needed
        for path, stat in sorted(files, key=lambda entry: entry[1].st_mtime):
            if size <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            size -= stat.st_size
