"""The checks of golden codec cases: everything a case expects, at level `official`.

Which checks run follows from a file's name (`encode_chat`, `decode_messages`, `tokenizer` ...) and
from what its cases expect. A case that makes the codec raise anything undocumented is a difference,
never the end of the check. Called by `headrace check recipe` and by the tests.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.check.recipe_cases import CaseFile, Difference, first_difference, same_ids
from headrace.errors import ConfigError
from headrace.recipe.tokenizer import Tokenizer

Stage = tuple[str, Difference | None]
Check = Callable[[Mapping[str, Any], Tokenizer], Iterator[Stage]]


@dataclass(slots=True)
class FileResult:
    """What came of one file: (equal, total) cases and stages, and every difference."""

    kind: str
    total: int = 0
    equal: int = 0
    stages: Counter[str] = field(default_factory=Counter)
    equal_stages: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the file has cases and all are equal."""
        return self.total > 0 and self.equal == self.total

    def summary(self) -> str:
        """One line: cases, then each stage."""
        parts = [f"{name} {self.equal_stages[name]}/{n}" for name, n in self.stages.items()]
        word = "ok  " if self.passed else "FAIL"
        return f"{word} {self.kind:<20} {self.equal}/{self.total}  {', '.join(parts)}"

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "file": self.kind,
            "passed": self.passed,
            "equal": self.equal,
            "total": self.total,
            "stages": {n: [self.equal_stages[n], total] for n, total in self.stages.items()},
            "differences": [
                {"case": d.case, "stage": d.stage, "where": d.where, "text": str(d)}
                for d in self.differences
            ],
        }


def check_file(file: CaseFile, tokenizer: Tokenizer) -> FileResult:
    """Run all cases of a file. Raises ConfigError for a file whose name says no known kind."""
    check = _check_of(file)
    result = FileResult(file.kind)
    for case in file.cases():
        found = check_case(check, case, tokenizer)
        result.total += 1
        result.equal += not any(difference for _, difference in found)
        for stage, difference in found:
            result.stages[stage] += 1
            result.equal_stages[stage] += difference is None
            if difference is not None:
                result.differences.append(difference)
    return result


def check_case(check: Check, case: Mapping[str, Any], tokenizer: Tokenizer) -> list[Stage]:
    """The stages of one case; an undocumented exception is the difference of its last stage."""
    found: list[Stage] = []
    try:
        found.extend(check(case, tokenizer))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
        text = f"{type(error).__name__}: {error} ({where})"
        found.append(("crash", Difference(case["id"], "crash", "", "no exception", text)))
    return found


def _check_of(file: CaseFile) -> Check:
    kind = file.kind
    if kind.startswith("encode_"):
        from headrace.check.recipe_encode import check_encode

        return check_encode
    if kind.startswith("decode_"):
        from headrace.check.recipe_decode import check_decode

        return check_decode
    if kind == "tokenizer":
        return check_tokenizer
    if kind == "image_tokens":
        return check_image
    raise ConfigError(
        f"{file.path}: no such kind of case file. Known: encode_*, decode_*, tokenizer, "
        "image_tokens (.jsonl or .jsonl.gz)."
    )


def check_tokenizer(case: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[Stage]:
    """Plain text to ids, without and with the added vocabulary."""
    for stage, encode in (
        ("plain_ids", tokenizer.encode),
        ("full_vocab_ids", tokenizer.encode_full),
    ):
        if stage in case:
            ids = list(encode(case["text"]))
            if same_ids(ids, case[stage]):
                yield stage, None
            else:
                found = first_difference(case[stage], ids) or ("", case[stage], ids)
                yield stage, Difference(case["id"], stage, *found)


def check_image(case: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[Stage]:
    """Tokens of an image size, and the size that preprocessing makes of a picture."""
    from headrace.check.recipe_images import image_result

    stage, expected, got = image_result(case)
    found = first_difference(expected, got)
    yield stage, None if found is None else Difference(case["id"], stage, *found)
