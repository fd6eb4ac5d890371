"""The attribution line of Claude Code."""

from __future__ import annotations

import pytest

from headrace.recipe.protocols.attribution import is_billing_header, strip_attribution

LINE = "x-anthropic-billing-header: cc_version=2.1; cch=abc;"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{LINE}\n\nYou are x", "You are x"),
        (f"{LINE} You are x", "You are x"),
        (f"a\n{LINE.upper()}\n\nb", "a\n\nb"),
        (f"a\n  {LINE}\nb\n{LINE}\nc", "a\nb\nc"),
        (LINE, ""),
        (f"about {LINE}", f"about {LINE}"),
        ("nothing", "nothing"),
    ],
)
def test_strip_attribution(text: str, expected: str) -> None:
    assert strip_attribution(text) == expected


def test_billing_header_in_any_case() -> None:
    assert is_billing_header("X-Anthropic-BILLING-header")
    assert not is_billing_header(" x-anthropic-billing-header")
    assert not is_billing_header("x-anthropic-billing")
