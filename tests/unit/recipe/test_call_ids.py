"""Ids of tool calls have the official form."""

from __future__ import annotations

import json
import re

from headrace.recipe.events.call_ids import check_number, new_call_id
from tests.unit.recipe.golden import GOLDEN


def test_check_digits_are_those_of_real_ids() -> None:
    samples = json.loads((GOLDEN / "tool_call_ids.json").read_text("utf-8"))["samples"]
    assert len(samples) > 20
    for sample in samples:
        assert f"{check_number(sample[:-4]):04}" == sample[-4:]


def test_form() -> None:
    for index, empty, pattern in (
        (0, False, r"call_00_[A-Za-z0-9]{20}\d{4}"),
        (7, True, r"call_07_ET_[A-Za-z0-9]{20}\d{4}"),
        (123, False, r"call_123_[A-Za-z0-9]{20}\d{4}"),
    ):
        made = {new_call_id(index, empty_thinking=empty) for _ in range(50)}
        assert len(made) == 50
        for call_id in made:
            assert re.fullmatch(pattern, call_id)
            assert f"{check_number(call_id[:-4]):04}" == call_id[-4:]
