"""The codec of a checkpoint, and what importing the package loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headrace.recipe
from headrace.core.sampling import LogprobsMode, SamplingParams, StopScope
from headrace.errors import ContextTooLong, InvalidRequest
from headrace.model.tiny_presets import preset_config
from headrace.model.tiny_tokenizer import tiny_tokenizer
from headrace.recipe import (
    Codec,
    Conversation,
    ConvertedRequest,
    ModelVersion,
    PromptText,
    Protocol,
    UserMessage,
    convert,
)

USER = [{"role": "user", "content": "hi"}]
BODIES: dict[Protocol, dict[str, Any]] = {
    Protocol.CHAT: {"messages": USER},
    Protocol.RESPONSES: {"input": "hi"},
    Protocol.MESSAGES: {"messages": USER},
}


def checkpoint(directory: Path, preset: str) -> Path:
    config = preset_config(preset, quantised=True, compressed_vocab=100)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(json.dumps(tiny_tokenizer()))
    return directory


@pytest.fixture
def codec(tmp_path: Path) -> Codec:
    return Codec.from_directory(checkpoint(tmp_path, "tiny-8"))


def converted(codec: Codec, protocol: Protocol = Protocol.CHAT, **fields: Any) -> ConvertedRequest:
    body = json.dumps({"model": "m", **BODIES[protocol], **fields}).encode()
    return convert(protocol, body, codec.options("m"))


def test_the_prompt_format_is_that_of_the_checkpoint(codec: Codec, tmp_path: Path) -> None:
    (tmp_path / "v4").mkdir()
    older = Codec.from_directory(checkpoint(tmp_path / "v4", "v4-tiny"))
    assert (codec.version, older.version) == (ModelVersion.V41, ModelVersion.V4)
    system = [{"role": "system", "content": "Be brief."}, *USER]
    for each, with_system in ((codec, True), (older, False)):
        request = converted(each, messages=system)
        assert request.version is each.version
        ids = each.encode(request)
        assert ids == each.encode(request.conversation)
        assert len(ids) == each.count(request)
        # Only V4.1 has a control token for it.
        assert (each.tokenizer.added[each.special.system] in ids) is with_system


@pytest.mark.parametrize("protocol", Protocol)
def test_a_prompt_that_cannot_fit_is_not_tokenized(
    codec: Codec, protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = converted(codec, protocol)
    length = codec.count(request)
    name = "input" if protocol is Protocol.RESPONSES else "messages"
    with pytest.raises(ContextTooLong) as caught:
        codec.sampling(request, length, length - 1)
    assert caught.value.param == name
    monkeypatch.setattr("headrace.recipe.tokenizer.Tokenizer.encode_prompt", None)
    with pytest.raises(ContextTooLong, match="at least") as caught:
        codec.encode(request, context_limit=4)
    assert caught.value.param == name


def test_everything_asked_for_is_in_the_sampling(codec: Codec) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.25,
        "seed": 4,
        "n": 2,
        "max_tokens": 9,
        "stop": ["x"],
        "logprobs": True,
        "top_logprobs": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "min_p": 0.1,
        "top_k": 5,
        "min_tokens": 3,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "allowed_token_ids": [8, 9],
        "logit_bias": {"8": 1.5},
        "logprobs_mode": "processed",
    }
    request = converted(codec, **fields)
    assert codec.sampling(request, 10, 100) == SamplingParams(
        temperature=0.5,
        top_p=0.25,
        seed=4,
        n=2,
        max_tokens=9,
        stop=("x",),
        stop_scope=codec.stop_scope(request.parsing),
        logprobs=3,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        min_p=0.1,
        top_k=5,
        min_tokens=3,
        ignore_eos=True,
        stop_token_ids=(7,),
        allowed_token_ids=(8, 9),
        logit_bias={8: 1.5},
        logprobs_mode=LogprobsMode.PROCESSED,
    )


def test_lengths_fit_the_room_that_is_left(codec: Codec) -> None:
    plain = codec.sampling(converted(codec), 90, 100)
    assert (plain.max_tokens, plain.logprobs, plain.stop) == (10, None, ())
    assert codec.sampling(converted(codec, min_tokens=50), 90, 100).min_tokens == 10
    with pytest.raises(ContextTooLong):
        codec.sampling(converted(codec, max_tokens=11), 90, 100)


def test_errors_have_the_names_of_the_request(codec: Codec) -> None:
    request = converted(codec, Protocol.MESSAGES, stop_sequences=["x" * 2000])
    with pytest.raises(InvalidRequest, match="1024") as caught:
        codec.sampling(request, 10, 100)
    assert caught.value.param == "stop_sequences"
    with pytest.raises(InvalidRequest) as caught:
        codec.sampling(converted(codec, stop=["x" * 2000]), 10, 100)
    assert caught.value.param == "stop"


def test_stop_strings_count_in_the_content_alone(codec: Codec) -> None:
    added = codec.tokenizer.added
    end, dsml = added["</think>"], added["｜DSML｜"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    off = {"thinking": {"type": "disabled"}}
    prefix = [*USER, {"role": "assistant", "content": "So", "prefix": True}]
    for fields, scope in (
        ({}, StopScope(end, after_border=True, skip_newlines=True)),
        (off, StopScope(end, skip_newlines=True)),
        ({"messages": prefix}, StopScope(end)),
        ({"tools": tools, **off}, StopScope(end, skip_newlines=True, end_token=dsml)),
        (
            {"tools": tools, "tool_choice": "none", **off},
            StopScope(end, skip_newlines=True, end_token=dsml),
        ),
    ):
        assert codec.stop_scope(converted(codec, **fields).parsing) == scope, fields


def test_a_conversation_can_be_encoded_without_a_request(codec: Codec) -> None:
    conversation = Conversation((UserMessage(PromptText.of("hi")),))
    assert codec.encode(conversation) == codec.encode(converted(codec))


# --- the package -----------------------------------------------------------------------------

HEAVY = ("torch", "numpy", "starlette", "PIL", "jsonschema_rs", "fastokens", "headrace.engine")


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, headrace.recipe; print([m for m in {HEAVY} if m in sys.modules])"
    assert run(code) == "[]"


def test_a_whole_request_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, headrace.recipe as r\n"
        "from headrace.recipe.render import render\n"
        "o = r.ConvertOptions()\n"
        'b = b\'{"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", '
        '"content": "hi"}]}\'\n'
        "c = r.convert_chat(b, o)\n"
        "assert render(c.conversation, c.version, o.special).text\n"
        "s = r.AnswerStream(c, response_id='x', model='m', special=o.special, tokenizer=None)\n"
        "assert s.push(r.Ready(1)) and s.push(r.Text('hi', 1)) and s.push(r.Finish())\n"
        "print([m for m in ('torch', 'numpy', 'starlette', 'headrace.engine') if m in sys.modules])"
    )
    assert run(code) == "[]"


def run(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[3],
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_every_public_name_is_there() -> None:
    for name in headrace.recipe.__all__:
        assert getattr(headrace.recipe, name) is not None
    assert set(headrace.recipe.__all__) == set(headrace.recipe._PUBLIC)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = headrace.recipe.nothing
