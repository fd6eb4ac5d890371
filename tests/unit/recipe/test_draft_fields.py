"""`coupling` and `speculation`: how drafts are used, as fields of all three protocols."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.core.sampling import Coupling
from headrace.errors import InvalidRequest
from headrace.recipe.converted import ConvertedRequest
from headrace.recipe.options import ConvertOptions, Level
from headrace.recipe.protocols.convert import convert
from tests.unit.recipe.streams import body

PROTOCOLS = ("chat", "responses", "messages")
WRONG = (
    "",
    "maybe",
    "Gumbel",
    "fixed:0",
    "fixed:-1",
    "fixed:",
    3,
    1.5,
    True,
    [],
    ["off"],
    {"a": 1},
)


def made(protocol: str, level: Level = Level.CLIENTS, **fields: Any) -> ConvertedRequest:
    request = {**body(protocol), **fields}
    return convert(protocol, json.dumps(request).encode(), ConvertOptions(level=level))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_they_go_to_the_engine(protocol: str) -> None:
    for coupling in Coupling:
        extra = made(protocol, coupling=str(coupling)).inference.extra
        assert extra == {"coupling": coupling}
    for text in ("off", "adaptive", "fixed:1", "fixed:5", "fixed:999999"):
        assert made(protocol, speculation=text).inference.extra == {"speculation": text}
    both = made(protocol, coupling="maximal", speculation="off").inference.extra
    assert both == {"coupling": Coupling.MAXIMAL, "speculation": "off"}
    assert made(protocol, coupling=None, speculation=None).inference.extra == {}


@pytest.mark.parametrize("wrong", [*WRONG, "x" * 100_000], ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_wrong_value_is_refused_with_the_right_ones(protocol: str, wrong: Any) -> None:
    for field, allowed in (
        ("coupling", ("gumbel", "maximal")),
        ("speculation", ("off", "adaptive", "fixed:K")),
    ):
        with pytest.raises(InvalidRequest) as caught:
            made(protocol, **{field: wrong})
        assert caught.value.param == field
        assert all(f'"{value}"' in caught.value.message for value in allowed)
        assert len(caught.value.message) < 250


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_official_level_does_not_read_them(protocol: str) -> None:
    for value in (*WRONG, "off", "gumbel"):
        found = made(protocol, Level.OFFICIAL, coupling=value, speculation=value)
        assert found == made(protocol, Level.OFFICIAL)
