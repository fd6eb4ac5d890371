"""Lines of `headrace generate` that offer tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.generate_fakes import Case

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_a_line_may_offer_tools(case: Case) -> None:
    ask = {"messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL]}
    case.write({"id": "call", **ask}, {"id": "none", **ask, "tool_choice": "none"})
    call = (
        'Let me see.\n\n<｜DSML｜ calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜ calls>"
    )
    engine = case.engine()
    engine._answer = [*case.tokenizer.encode_full(call), engine._answer[-1]]
    assert case.run(engine) == 0
    answers = case.answers()
    arguments = '{"city": "Paris"}'
    assert answers["call"]["text"] == "Let me see."
    assert answers["call"]["tool_calls"] == [{"name": "weather", "arguments": arguments}]
    assert answers["none"]["text"] == "Let me see."
    assert "tool_calls" not in answers["none"]
    prompt = case.tokenizer.decode(engine.requests[0].prompt_token_ids)
    assert "weather" in prompt


def test_a_demanded_call_is_a_grammar_and_tools_need_messages(case: Case) -> None:
    ask = {"messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL]}
    case.write(
        {"id": "required", **ask, "tool_choice": "required"},
        {"id": "prompt", "prompt": "Hello", "tools": [TOOL]},
    )
    engine = case.engine()
    assert case.run(engine) == 1
    answers = case.answers()
    assert engine.requests[0].sampling.grammar is not None
    assert "error" not in answers["required"]
    assert "need messages" in answers["prompt"]["error"]["message"]
