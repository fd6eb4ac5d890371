"""Chat requests: what is understood, what is refused, and the field an error names."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from headrace.core.sampling import LogprobsMode, SamplingParams
from headrace.errors import ContextTooLong, InvalidRequest
from headrace.recipe import AssistantMessage, Conversation, ReasoningEffort, SystemMessage
from headrace.recipe.protocols.chat import ChatOptions, ChatRequest, parse_chat, resolve_max_tokens
from headrace.recipe.protocols.chat_refused import REFUSED

USER = [{"role": "user", "content": "hi"}]


def parse(options: ChatOptions | None = None, **fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": USER, **fields}
    return parse_chat(json.dumps(body).encode(), options or ChatOptions())


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({}, True, None),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "adaptive"}}, True, None),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "minimal"}, True, ReasoningEffort.LOW),
        ({"reasoning_effort": 33}, True, 33),
        ({"chat_template_kwargs": {"thinking": False}}, False, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        ({"chat_template_kwargs": {"reasoning_effort": "max"}}, True, ReasoningEffort.MAX),
        # Precedence: thinking > chat_template_kwargs > effort > default.
        (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}},
            True,
            None,
        ),
        ({"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "none"}, True, None),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "max"}, False, None),
    ],
)
def test_thinking_switches(fields: dict[str, Any], thinking: bool, effort: object) -> None:
    conversation = parse(**fields).conversation
    assert (conversation.thinking, conversation.reasoning_effort) == (thinking, effort)


def test_the_server_decides_where_the_request_is_silent() -> None:
    off = ChatOptions(default_thinking_mode=False)
    assert not parse(off).conversation.thinking
    assert parse(off, reasoning_effort="low").conversation.thinking


def test_temperature_is_honoured_while_thinking() -> None:
    sampling = parse(temperature=0, top_p=0.5, top_k=0, seed=7).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (
        0.0,
        0.5,
        -1,
        7,
    )
    assert sampling.greedy


def test_max_completion_tokens_is_max_tokens() -> None:
    assert parse(max_completion_tokens=5).sampling.max_tokens == 5
    assert parse(max_completion_tokens=5, max_tokens=5).sampling.max_tokens == 5
    for fields in ({"max_completion_tokens": 5, "max_tokens": 6}, {"max_completion_tokens": 0}):
        with pytest.raises(InvalidRequest) as caught:
            parse(**fields)
        assert caught.value.param == "max_completion_tokens"


def test_developer_is_system_and_reasoning_is_an_alias() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        *USER,
        {"role": "assistant", "content": "", "reasoning": "hm", "prefix": True},
    ]
    conversation = parse(messages=messages).conversation
    assert conversation.messages[0] == SystemMessage("be brief")
    assert conversation.messages[-1] == AssistantMessage("", "hm", prefix=True)


def test_null_means_absent_and_harmless_fields_are_ignored() -> None:
    names = [*REFUSED, "temperature", "stop", "thinking", "user", "metadata", "stream_options"]
    assert parse(**dict.fromkeys(names)) == parse()
    harmless = {name: value for name, row in REFUSED.items() for value in row.harmless[:1]}
    assert parse(**harmless, user="u", store=True, metadata={"a": 1}, whatever=[1]) == parse()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [*USER, *USER, *USER]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{**USER[0], "prefix": True}]}, "messages[0].prefix"),
        ({"messages": [{**USER[0], "tool_calls": []}]}, "messages[0].tool_calls"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {}}, "thinking.type"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"reasoning_effort": 101}, "reasoning_effort"),
        (
            {"chat_template_kwargs": {"reasoning_effort": 0}},
            "chat_template_kwargs.reasoning_effort",
        ),
        ({"chat_template_kwargs": {"foo": 1}}, "chat_template_kwargs.foo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10.0}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a" * 1025]}, "stop"),
        ({"stop": [7]}, "stop[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "logprobs_mode": "best"}, "logprobs_mode"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 101}, "repetition_penalty"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ],
)
def test_an_error_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(ChatOptions(max_messages=2), **fields)
    assert caught.value.param == param


def test_sampling_fields_of_openai_and_vllm_clients() -> None:
    sampling = parse(
        n=3,
        stop=["END", "\n\n"],
        logprobs=True,
        top_logprobs=4,
        logprobs_mode="processed",
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "7": 2.5},
        min_p=0.05,
        min_tokens=3,
        allowed_token_ids=[5, 6],
    ).sampling
    assert sampling == SamplingParams(
        n=3,
        stop=("END", "\n\n"),
        logprobs=4,
        logprobs_mode=LogprobsMode.PROCESSED,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={5: -100, 7: 2.5},
        min_p=0.05,
        min_tokens=3,
        allowed_token_ids=(5, 6),
    )
    assert parse(stop="END").sampling.stop == ("END",)
    assert parse(logprobs=True).sampling.logprobs == 0
    assert parse(logprobs=False, top_logprobs=0).sampling.logprobs is None


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused(name: str) -> None:
    for value in (["x"], {"type": "json_object"}, 7):
        with pytest.raises(InvalidRequest) as caught:
            parse(**{name: value})
        assert caught.value.param == name
    # true is not 1, false is not 0: JSON keeps them apart.
    if any(type(value) is int for value in REFUSED[name].harmless):
        with pytest.raises(InvalidRequest):
            parse(**{name: REFUSED[name].harmless == (1,)})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800x"}]}',
        b'{"x":' * 5000,
        b'{"x":' * 5000 + b"1" + b"}" * 5000,
        b'{"model":"m","messages":[],"temperature":1e999}',
        b'{"model":"m","messages":[],"temperature":NaN}',
    ],
)
def test_what_is_no_json_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"invalid (JSON request|request body)"):
        parse_chat(body, ChatOptions())


def test_of_a_repeated_key_the_last_one_wins() -> None:
    body = b'{"model":"a","model":"b","messages":[{"role":"user","content":"x"}]}'
    assert parse_chat(body, ChatOptions()).model == "b"


def test_max_tokens_fits_the_context() -> None:
    thinking, plain = Conversation(()), Conversation((), thinking=False)
    most = Conversation((), reasoning_effort=ReasoningEffort.MAX)
    assert resolve_max_tokens(thinking, None, 10, 10**6) == 65_536
    assert resolve_max_tokens(most, None, 10, 10**6) == 131_072
    assert resolve_max_tokens(plain, None, 10, 10**6) == 8_192
    assert resolve_max_tokens(plain, None, 10, 100) == 90
    assert resolve_max_tokens(plain, 90, 10, 100) == 90
    with pytest.raises(ContextTooLong, match=r"100 tokens.*requested 101 tokens \(10 in"):
        resolve_max_tokens(plain, 91, 10, 100)
    with pytest.raises(ContextTooLong, match=r"100 tokens.*requested 100 tokens"):
        resolve_max_tokens(plain, None, 100, 100)


def test_the_codec_loads_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys, headrace.recipe, headrace.recipe.protocols.chat, headrace.recipe.events.chat\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'starlette') or "
        "m.startswith(('headrace.engine', 'headrace.model', 'headrace.serve'))]\n"
        "sys.exit(repr(bad) if bad else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
