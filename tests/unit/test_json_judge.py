"""The judge of structured output is exact: two validators agree on numbers beyond any float."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest

from tests.json_judge import exact_value, is_valid

HUGE = ["1e400", "-1e871463", "2.5E+99999999", "1e" + "9" * 40, "-7" + "0" * 500 + ".5"]
SMALL = ["1e-400", "-3e-871463", "1e-" + "9" * 40]


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "number"}, [*HUGE, *SMALL, "0e999"], ['"1e999"', "null", "[1e999]"]),
        ({"type": "integer"}, ["1e400", "1.0", "250e-1", "0e-5"], ["1e-400", "0.5"]),
        ({"minimum": 3}, ["1e400", "3", '"a"'], ["-1e400", "1e-400", "2." + "9" * 30]),
        ({"maximum": 3}, ["-1e400", "1e-400", "3"], ["1e400", "3." + "0" * 30 + "1"]),
        ({"exclusiveMinimum": 0}, ["1e400"], ["0", "-0.0", "0e7", "-1e-400"]),
        ({"multipleOf": 2}, ["1e400", "4"], ["1e-400", "3"]),
        ({"multipleOf": 0.1}, ["0.3", "1e400"], ["0.35", "1e-400"]),
        ({"enum": [1, "a", 2.5]}, ["1.0", '"a"', "25e-1"], ["1e400", "2.500000000000000000001"]),
        ({"items": {"type": "number"}}, ["[1e999,1]"], ['[1e999,"1"]', "[[1e999]]"]),
        ({"format": "date"}, ['"2024-02-29"', "1e999"], ['"2023-02-29"']),
    ],
)
def test_numbers_have_no_range(schema: Any, valid: list[str], invalid: list[str]) -> None:
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    assert [text for text in valid if not is_valid(validator, text)] == []
    assert [text for text in invalid if is_valid(validator, text)] == []


def test_a_float_that_is_finite_has_to_fit_as_well() -> None:
    validator = jsonschema_rs.validator_for({"exclusiveMinimum": 2})
    assert validator.is_valid(exact_value("2.00000000000000000001"))
    assert not is_valid(validator, "2.00000000000000000001")


def test_a_second_validator_says_the_same() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="extra dev is not installed")
    exact = jsonschema.Draft202012Validator
    numbers = ["0", "-0.0", "3", "3.0", "2.5", "1e400", "-1e400", "1e-400", "12e1", "0e99"]
    keywords = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const")
    schemas: list[Any] = [{name: bound} for name in keywords for bound in (0, 3, 2.5, -1)]
    schemas += [{"type": "number"}, {"type": "string"}, {"enum": [3, 2.5]}]
    for schema in schemas:
        ours, other = jsonschema_rs.validator_for(schema), exact(schema)
        for number in numbers:
            value = exact_value(number)
            assert ours.is_valid(value) == other.is_valid(value), (schema, number)
