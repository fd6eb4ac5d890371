"""JSON-Schema-Test-Suite (draft 2020-12) against compiled grammars.

Right: an instance is accepted in some serialisation (compact or spaced, any order of properties)
exactly if it is valid. Refused: the schema is refused with a path, before anything is generated.
Narrowed: on purpose fewer texts than the suite allows (below). Wrong: anything else, never. The
table of docs/structured-output.md holds its counts.
"""

from __future__ import annotations

import itertools
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.core.grammar import GrammarKind, GrammarSpec
from headrace.core.schema.schema import check_schema_form
from headrace.errors import InvalidRequest
from tests.unit.recipe.grammars import accepts, matcher_of

ROOT = Path(__file__).parents[2]
SUITE: dict[str, list[dict[str, Any]]] = json.loads(
    lzma.decompress((ROOT / "tests/golden/json_schema/draft2020-12.json.xz").read_bytes())
)
DOC = (ROOT / "docs/structured-output.md").read_text()


def narrowed(name: str, description: str) -> bool:
    """A valid instance that we leave out.

    Formats count; leap seconds with an offset do not; addresses and host names that validators
    disagree about (quoted names, addresses of machines, rare signs, other scripts) neither.
    """
    if name == "format":
        return description.endswith("is only an annotation by default")
    if name in ("optional/format/email", "optional/format/hostname"):
        return bool(re.search("tilde|quoted string|address-literal|punycoded", description))
    return name in ("optional/format/time", "optional/format/date-time") and bool(
        re.fullmatch(r"(?:a )?valid .*leap second, .*offset", description)
    )


def serialisations(value: Any) -> Iterator[str]:
    for form in itertools.islice(_orders(value), 800):
        yield json.dumps(form, ensure_ascii=False)
        yield json.dumps(form, ensure_ascii=False, separators=(",", ":"))


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for names in itertools.islice(itertools.permutations(value), 720):
            parts = [list(itertools.islice(_orders(value[name]), 30)) for name in names]
            for entries in itertools.islice(itertools.product(*parts), 200):
                yield dict(zip(names, entries, strict=True))
    elif isinstance(value, list):
        parts = [list(itertools.islice(_orders(entry), 30)) for entry in value]
        for entries in itertools.islice(itertools.product(*parts), 200):
            yield list(entries)
    else:
        yield value
        if isinstance(value, float) and value.is_integer():
            yield int(value)


def count(name: str) -> tuple[list[int], list[str]]:
    """[right, refused, narrowed, wrong] of one file, and what was wrong."""
    counts, wrong = [0, 0, 0, 0], []
    for case in SUITE[name]:
        try:
            form = check_schema_form(case["schema"], "schema")
        except InvalidRequest as error:
            assert error.param is not None and error.param.startswith("schema"), error
            counts[1] += len(case["tests"])
            continue
        matcher = matcher_of(GrammarSpec(GrammarKind.JSON_SCHEMA, form.text()))
        for test in case["tests"]:
            texts = serialisations(test["data"])
            accepted = any(accepts(matcher, text) for text in texts)
            if accepted == test["valid"]:
                counts[0] += 1
            elif test["valid"] and narrowed(name, test["description"]):
                counts[2] += 1
            else:
                counts[3] += 1
                wrong.append(f"{case['description']}: {test['description']}")
    return counts, wrong


@pytest.mark.parametrize("name", sorted(SUITE))
def test_no_instance_is_judged_wrongly(name: str) -> None:
    counts, wrong = count(name)
    assert wrong == []
    row = f"| `{name}` | {counts[0]} | {counts[1]} | {counts[2]} | 0 |"
    assert row in DOC, row


def test_the_suite_is_whole_and_the_total_is_that_of_the_doc() -> None:
    assert sum(len(case["tests"]) for cases in SUITE.values() for case in cases) == 1906
    rows = re.findall(r"^\| `[^`]+` \| (\d+) \| (\d+) \| (\d+) \| 0 \|$", DOC, re.MULTILINE)
    total = [sum(map(int, column)) for column in zip(*rows, strict=True)]
    assert sum(total) == 1906
    assert f"| **all** | {total[0]} | {total[1]} | {total[2]} | 0 |" in DOC
