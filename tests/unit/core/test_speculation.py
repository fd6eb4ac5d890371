"""The setting that says how many drafts a step verifies."""

from __future__ import annotations

import pytest

from headrace.core.speculation import ADAPTIVE, Policy
from headrace.errors import ConfigError, InvalidRequest


@pytest.mark.parametrize(
    ("text", "drafts"), [("off", 0), ("adaptive", ADAPTIVE), ("fixed:1", 1), ("fixed:64", 64)]
)
def test_parse_and_back(text, drafts):
    policy = Policy.parse(text)
    assert policy == Policy(drafts)
    assert str(policy) == text
    assert policy.adaptive == (text == "adaptive")


@pytest.mark.parametrize(
    "text",
    [
        *("", "on", "OFF", "fixed", "fixed:", "fixed:0", "fixed:-1", "fixed:05", "fixed:1000000"),
        *("fixed:5 ", "fixed:٣", "fixed:1\n", "fixed:" + "9" * 6000, "adaptive:5"),
        *(None, 5, True, ["off"], {}),
    ],
)
def test_parse_refuses_by_name(text):
    with pytest.raises(ConfigError) as raised:
        Policy.parse(text)
    assert raised.value.param == "engine.speculation"
    assert '"off", "adaptive" or "fixed:K" with K from 1 to the block size' in raised.value.message
    assert len(raised.value.message) < 300


def test_requests_have_their_own_error():
    with pytest.raises(InvalidRequest, match=r"^speculation must be .* got 'maybe'\.$") as raised:
        Policy.parse("maybe", param="speculation", error=InvalidRequest)
    assert raised.value.param == "speculation"


def test_a_draft_block_bounds_the_length():
    for text in ("off", "adaptive", "fixed:1", "fixed:5"):
        Policy.parse(text).require_length(5)
    with pytest.raises(ConfigError, match=r'"fixed:7" asks for 7 drafts a step, .* has 5 here'):
        Policy.parse("fixed:7").require_length(5)


@pytest.mark.parametrize("text", ["adaptive", "fixed:1"])
def test_without_a_draft_module_only_off_works(text):
    Policy.parse("off").require_length(0)
    with pytest.raises(InvalidRequest, match="needs a draft module"):
        Policy.parse(text).require_length(0, param="speculation", error=InvalidRequest)
