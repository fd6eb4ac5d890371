"""Output of `headrace generate`: answers as JSONL, written so that a run can be resumed.

Contract: a line is written whole or not at all; `AnswerFile.open` reads which ids an earlier run
has finished and cuts a last line that a crash left incomplete. Files that `generate` did not write
are refused, never changed. Every failure to write is an OutputError.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
from pathlib import Path
from typing import Final

import msgspec

from headrace.errors import InvalidRequest, OutputError

_LINE_START: Final = b'{"id":'
_MAX_LINE_BYTES: Final = 256 * 2**20


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a declared tool. arguments: JSON text."""

    name: str
    arguments: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One finished answer. token_ids: with the token that ended it. reasoning: chats that think."""

    id: str
    prompt_tokens: int
    text: str
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    token_ids: list[int]
    finish_reason: str
    usage: Usage


class LineError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was wrong; code and param as the server reports them. line: of the input file."""

    line: int
    code: str
    message: str
    param: str | None = None


class FailedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A line that has no answer."""

    id: str
    error: LineError


class _Finished(msgspec.Struct):
    """What a resumed run needs of a line that is there."""

    id: str
    error: dict[str, object] | None = None


class AnswerFile:
    """Append-only JSONL file; a context manager.

    finished: ids that an earlier run has written. failed: those of them that are errors.
    cut_bytes: size of the incomplete last line that was removed.
    """

    def __init__(self, descriptor: int, name: str, *, owned: bool) -> None:
        self._descriptor = descriptor
        self._name = name
        self._owned = owned
        self._regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self.finished: set[str] = set()
        self.failed = 0
        self.cut_bytes = 0

    @classmethod
    def open(cls, path: Path | None) -> AnswerFile:
        """Open or create the file; None: standard output, which cannot be resumed.

        Raises OutputError when it cannot be opened or another run writes to it, InvalidRequest when
        it holds something else than answers.
        """
        if path is None:
            sys.stdout.flush()
            return cls(sys.stdout.fileno(), "standard output", owned=False)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise OutputError(f"{path} cannot be opened for writing: {error.strerror}.") from error
        file = cls(descriptor, str(path), owned=True)
        try:
            if file._regular:
                file._lock()
                file._read_finished(path)
        except BaseException:
            os.close(descriptor)
            raise
        return file

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owned:
            os.close(self._descriptor)

    @property
    def resumable(self) -> bool:
        """Whether the same command can go on where this run stops."""
        return self._regular and self._owned

    def write(self, answer: Answer | FailedAnswer) -> None:
        """Append one line. Raises OutputError; the part of a line that fitted is removed again."""
        line = msgspec.json.encode(answer) + b"\n"
        written = 0
        try:
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except BrokenPipeError:
            raise
        except OSError as error:
            if written and self._regular:
                with contextlib.suppress(OSError):
                    end = os.lseek(self._descriptor, 0, os.SEEK_END)
                    os.ftruncate(self._descriptor, end - written)
            raise self._failure(error) from error

    def sync(self) -> None:
        """Have the disk take everything; raises OutputError if it does not."""
        if not self._regular:
            return
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> OutputError:
        hint = " Free some space first." if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return OutputError(f"{self._name} could not be written: {error.strerror}.{hint}")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"{self._name} is being written by another process.") from None
        except OSError:
            return  # a file system without locks

    def _read_finished(self, path: Path) -> None:
        decoder = msgspec.json.Decoder(_Finished)
        number = 0
        with path.open("rb") as file:
            while line := file.readline(_MAX_LINE_BYTES):
                number += 1
                if not line.endswith(b"\n"):
                    self._cut_tail(line, file.tell() - len(line))
                    return
                try:
                    entry = decoder.decode(line)
                except msgspec.MsgspecError:
                    raise self._foreign(number) from None
                self.finished.add(entry.id)
                self.failed += entry.error is not None

    def _cut_tail(self, line: bytes, start: int) -> None:
        """Remove an incomplete last line, if it is the beginning of one of ours."""
        if line[: len(_LINE_START)] != _LINE_START[: len(line)]:
            raise self._foreign(None)
        try:
            os.ftruncate(self._descriptor, start)
        except OSError as error:
            raise self._failure(error) from error
        self.cut_bytes = len(line)

    def _foreign(self, number: int | None) -> InvalidRequest:
        where = "its end" if number is None else f"line {number}"
        return InvalidRequest(
            f"{self._name} exists and {where} is not an answer of headrace generate; nothing was "
            "changed. Choose another output file, or move this one away.",
            param="output",
        )
