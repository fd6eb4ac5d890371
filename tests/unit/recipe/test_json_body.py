"""Bodies: what is no JSON, what a typed decoder would let pass, and the field an error names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.errors import InvalidBody
from headrace.recipe.protocols.json_body import U8, U64, check_unsigned, decode_body, read_json


class Wire(msgspec.Struct):
    """A small request."""

    model: str
    count: int | None = None
    schema: msgspec.Raw = msgspec.Raw()


def fails(body: Any, **exact: bool) -> InvalidBody:
    with pytest.raises(InvalidBody, match=r"^invalid (JSON request|request body): ") as caught:
        decode_body(body, Wire, **exact)
    return caught.value


def nested(levels: int) -> bytes:
    """A body whose innermost list is on this level."""
    return b'{"model":"m","other":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"5",
        b"\xff\xfe",
        b'\xef\xbb\xbf{"model":"m"}',
        b'{"model":"m"} x',
        b'{"model":"\xff"}',
        b'{"model":"\\ud800"}',
        b'{"model":"\\ud800x"}',
        b'{"model":NaN}',
        b'{"count":1}',
        b'{"model":null}',
        b'{"model":"m","count":1.0}',
        b'{"model":"m","count":"1"}',
        b'{"model":"m","count":true}',
        b'{"x":' * 5000,
        b'{"x":' * 5000 + b"1" + b"}" * 5000,
        {"model": float("nan")},
        {"model": "\ud800"},
        {"model": b"bytes"},
    ],
)
def test_what_is_no_such_request(body: Any, exact: bool) -> None:
    fails(body, exact=exact)


@pytest.mark.parametrize(
    "body",
    [
        nested(128),
        b'{"model":"m","other":"\xff"}',
        b'{"model":"m","other":1e999}',
    ],
)
def test_fields_that_nobody_reads_count_when_exact(body: bytes) -> None:
    fails(body)
    assert decode_body(body, Wire, exact=False).model == "m"


@pytest.mark.parametrize(
    ("body", "path", "reason"),
    [
        (b'{"model":"m","a":{"b":[1,{"c":NaN}]}}', "a.b[1].c", "number out of range"),
        (b'{"model":"m","a":[[],[-1e999]]}', "a[1][0]", "number out of range"),
        (b'{"model":"m","a":{"x":1,"y":"\\ud800"}}', "a.y", "text with a lone surrogate"),
        (b'{"model":"m","a":{"\\ud800":1}}', "a.?", "text with a lone surrogate"),
    ],
)
def test_what_json_cannot_carry_is_told_with_its_path(body: bytes, path: str, reason: str) -> None:
    with pytest.raises(InvalidBody) as caught:
        decode_body(body, Wire)
    assert caught.value.param == "a"
    assert caught.value.message == f"invalid JSON request: a: {reason} at {path}"


def test_depth_is_that_of_structure_not_of_text() -> None:
    assert decode_body(nested(127), Wire).model == "m"
    wide = b'{"model":"' + b"[" * 500 + b'","other":[' + b"[]," * 500 + b"[]]}"
    assert decode_body(wide, Wire).model == "[" * 500


def test_bytes_text_and_dict_are_equal() -> None:
    wire = decode_body(b'{"model":"\\u00e9"}', Wire)
    assert wire == decode_body('{"model":"é"}', Wire) == decode_body({"model": "é"}, Wire)


def test_of_a_repeated_key_the_last_one_wins_even_when_an_earlier_one_is_wrong() -> None:
    assert decode_body(b'{"model":"a","model":"b"}', Wire).model == "b"
    assert decode_body(b'{"model":1,"model":"b"}', Wire).model == "b"
    assert fails(b'{"model":"a","model":1}').param == "model"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{}", "model"),
        (b'{"model":"m","count":1.0}', "count"),
        (b'{"model":"m","other":"\\ud800"}', "other"),
        (b"{", None),
    ],
)
def test_an_error_names_its_field(body: bytes, param: str | None) -> None:
    assert fails(body).param == param


def test_numbers_of_free_values() -> None:
    raw = decode_body(b'{"model":"m","schema":[-0, 18446744073709551616, 1e2]}', Wire).schema
    numbers = read_json(raw)
    assert [repr(number) for number in numbers] == ["-0.0", "1.8446744073709552e+19", "100.0"]
    with pytest.raises(InvalidBody):
        read_json(b"[" * 200 + b"]" * 200)


def test_unsigned_integers() -> None:
    for value in (None, 0, U8):
        check_unsigned(value, U8, "n")
    for value, text in (
        (-1, "invalid value: integer `-1`, expected u8"),
        (256, "invalid value: integer `256`, expected u8"),
        (2**64, "invalid type: floating point"),
    ):
        with pytest.raises(InvalidBody) as caught:
            check_unsigned(value, U8, "n")
        assert text in caught.value.message and caught.value.param == "n"
    with pytest.raises(InvalidBody, match="expected u64"):
        check_unsigned(-1, U64, "seed")
