"""`headrace recipe` and `headrace check recipe` as a user meets them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.cli.recipe_input import guess_protocol
from headrace.recipe.images.tokens import token_count
from tests.unit.recipe import golden

CHAT = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "Hello"}]}
PROMPT = "<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: 75"


class Stdin(io.TextIOWrapper):
    """Standard input that is a pipe with these bytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object, stdin: object = b"") -> tuple[int, str, str]:
        data = stdin if isinstance(stdin, bytes) else json.dumps(stdin).encode()
        monkeypatch.setattr("sys.stdin", Stdin(data))
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "tokenizer.json").write_bytes(golden.patched_json())
    return folder


def test_render_from_a_file_and_from_stdin(call: Any, tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(CHAT))
    code, text, _ = call("recipe", "render", path)
    assert code == 0
    assert text.startswith(PROMPT)
    assert text.endswith("<｜User｜>Hello<｜Assistant｜><think>")
    assert call("recipe", "render", stdin=CHAT)[1] == text


def test_render_json_can_be_read_again(call: Any) -> None:
    _, text, _ = call("recipe", "render", "--json", stdin=CHAT)
    shown = json.loads(text)
    assert shown["prompt"].startswith(PROMPT)
    assert shown["special_ranges"][0] == [0, 21]
    assert (shown["protocol"], shown["model_version"]) == ("chat", "v4.1")
    assert shown["inference"]["temperature"] == 1.0
    assert shown["parsing"]["thinking_initial_stage"] == "ReasoningStart"
    _, again, _ = call("recipe", "render", "--protocol", "conversation", stdin=shown)
    assert again == shown["prompt"]
    _, v4, _ = call(
        "recipe", "render", "--protocol", "conversation", "--model-version", "v4", stdin=shown
    )
    assert "<｜System｜>" not in v4


@pytest.mark.parametrize(
    ("request_", "protocol"),
    [
        (CHAT, "chat"),
        ({**CHAT, "messages": [{"role": "tool", "content": [{"type": "text"}]}]}, "chat"),
        ({"model": "m", "input": "x"}, "responses"),
        ({"model": "m", "instructions": "x"}, "responses"),
        ({**CHAT, "system": "x"}, "messages"),
        ({**CHAT, "tools": [{"name": "f", "input_schema": {}}]}, "messages"),
        ({**CHAT, "messages": [{"content": [{"type": "tool_result"}]}]}, "messages"),
        ({"messages": []}, "conversation"),
        ({"model": "m", "thinking_mode": True, "messages": []}, "conversation"),
    ],
)
def test_the_protocol_is_guessed(request_: dict[str, Any], protocol: str) -> None:
    assert guess_protocol(request_) == protocol


def test_encode_and_count(call: Any, tokenizer: Path) -> None:
    code, text, _ = call("recipe", "encode", "--tokenizer", tokenizer, stdin=CHAT)
    ids = json.loads(text)
    assert code == 0
    assert ids[:2] == [0, 128799]
    assert ids[-2:] == [128804, 128821]
    file = tokenizer / "tokenizer.json"
    assert call("recipe", "count", "--tokenizer", file, stdin=CHAT)[1] == f"{len(ids)}\n"
    _, text, _ = call("recipe", "encode", "--json", "--tokenizer", file, stdin=CHAT)
    shown = json.loads(text)
    assert (shown["ids"], shown["count"]) == (ids, len(ids))


def test_count_adds_the_tokens_of_images(call: Any, tokenizer: Path) -> None:
    import base64

    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (640, 480)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    request = {**CHAT, "messages": [{"role": "user", "content": [image]}]}
    _, text, _ = call("recipe", "count", "--json", "--tokenizer", tokenizer, stdin=request)
    shown = json.loads(text)
    assert shown["image_tokens"] == [token_count(640, 480)]
    assert shown["prompt_tokens"] == shown["text_tokens"] + sum(shown["image_tokens"])
    remote = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    request = {**CHAT, "messages": [{"role": "user", "content": [remote]}]}
    code, _, error = call("recipe", "count", "--tokenizer", tokenizer, stdin=request)
    assert code == 2
    assert "data URL" in error


def test_decode_text_ids_and_chunks(call: Any, tokenizer: Path) -> None:
    answer = 'Hm.</think>Hello\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n' + (
        '<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )
    expected = {"role": "assistant", "content": "Hello", "reasoning_content": "Hm."}

    def message(*arguments: object, stdin: bytes) -> dict[str, Any]:
        code, text, error = call("recipe", "decode", *arguments, stdin=stdin)
        assert code == 0, error
        found: dict[str, Any] = json.loads(text)["choices"][0]["message"]
        (used,) = found.pop("tool_calls")
        assert used["function"] == {"name": "f", "arguments": '{"a": 1}'}
        return {key: item for key, item in found.items() if key in expected}

    assert message(stdin=answer.encode() + b"\n") == expected
    ids = golden.real_tokenizer().encode_full(answer)
    line = json.dumps(ids).encode()
    assert message("--tokenizer", tokenizer, stdin=line) == expected
    words = b"\n".join(b"%d %d" % tuple(pair) for pair in zip(ids[::2], ids[1::2], strict=False))
    if len(ids) % 2:
        words += b"\n%d" % ids[-1]
    assert message("--tokenizer", tokenizer, stdin=words) == expected
    chunks = [{"ready": {}}, {"text": answer, "token_count": 9}, {"finish": "stop"}]
    lines = "\n".join(map(json.dumps, chunks)).encode()
    assert message(stdin=lines) == expected


def test_decode_streams_events_of_the_requests_protocol(call: Any, tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps({**CHAT, "max_tokens": 9, "system": "x"}))
    code, text, _ = call("recipe", "decode", "--stream", "--request", path, stdin=b"a</think>b")
    assert code == 0
    assert text.startswith("event: message_start\ndata: {")
    assert text.endswith("\n\n")
    _, text, _ = call("recipe", "decode", "--stream", stdin=b"a</think>b")
    assert text.endswith("data: [DONE]\n\n")
    _, text, _ = call("recipe", "decode", "--stream", "--json", stdin=b"a</think>b")
    lines = [json.loads(line) for line in text.splitlines()]
    assert all(set(line) == {"event", "data"} for line in lines)
    _, text, _ = call("recipe", "decode", "--no-thinking", stdin=b"plain")
    assert json.loads(text)["choices"][0]["message"]["content"] == "plain"


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (["recipe", "render", "absent.json"], b"", "absent.json cannot be read"),
        (["recipe", "render"], b"nonsense", "must be one JSON object"),
        (["recipe", "render"], {**CHAT, "model": "x"}, "--model-version"),
        (["recipe", "render"], {**CHAT, "messages": []}, "Read as chat; --protocol"),
        (["recipe", "render", "--protocol", "conversation"], {"messages": 5}, "must be a list"),
        (["recipe", "encode"], CHAT, "--tokenizer DIR"),
        (["recipe", "decode"], b"[72, 105]", "--tokenizer DIR"),
        (["recipe", "decode", "--input-format", "ids"], b"a b", "Line 1 is no list of ids"),
        (["recipe", "decode"], b'{"finish": "what"}', "Line 1 is no chunk"),
    ],
)
def test_errors_say_what_to_do(call: Any, arguments: list[str], stdin: Any, words: str) -> None:
    code, text, error = call(*arguments, stdin=stdin)
    assert code == 2
    assert text == ""
    assert words in error


def test_any_model_name_with_a_version(call: Any) -> None:
    request = {**CHAT, "model": "my-model"}
    code, text, _ = call("recipe", "render", "--model-version", "v4.1", stdin=request)
    assert code == 0
    assert text.startswith(PROMPT)


def test_the_image_token_is_spelled_as_in_the_checkpoint(call: Any, tmp_path: Path) -> None:
    spelled = golden.patched_json().replace("<｜image｜>".encode(), "<｜deepseek_image｜>".encode())
    (tmp_path / "tokenizer.json").write_bytes(spelled)
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    request = {**CHAT, "messages": [{"role": "user", "content": [image]}]}
    assert "<｜image｜>" in call("recipe", "render", stdin=request)[1]
    _, text, _ = call("recipe", "render", "--tokenizer", tmp_path, stdin=request)
    assert "<｜deepseek_image｜>" in text


def test_check_recipe_passes_and_fails(call: Any, tmp_path: Path) -> None:
    file = golden.GOLDEN / "encode_conversation.jsonl.gz"
    code, text, _ = call("check", "recipe", file)
    assert code == 0
    assert text.startswith("ok   encode_conversation")
    assert text.endswith("82 cases, 0 not equal\n")
    (tmp_path / "tokenizer.json").write_bytes(golden.patched_json())
    cases = golden.cases("tokenizer")[:6]
    for case in cases[2:]:
        case["plain_ids"] = [5]
    path = tmp_path / "tokenizer.jsonl"
    path.write_text("\n".join(map(json.dumps, cases)))
    arguments = ("check", "recipe", path, "--tokenizer", tmp_path)
    code, text, _ = call(*arguments, "--differences", 2)
    assert code == 1
    assert "FAIL tokenizer            2/6" in text
    assert text.count("expected 5") == 2
    assert "and 2 more" in text
    code, text, _ = call(*arguments, "--json")
    assert code == 1
    shown = json.loads(text)
    assert (shown["equal"], shown["total"], len(shown["differences"])) == (2, 6, 4)


def test_the_codec_commands_load_no_torch() -> None:
    cases = golden.GOLDEN / "tokenizer.jsonl.gz"
    code = (
        "import io, sys\n"
        "from headrace.cli import main\n"
        f"sys.stdin = io.TextIOWrapper(io.BytesIO({json.dumps(CHAT).encode()!r}))\n"
        "assert main.run(['recipe', 'render']) == 0\n"
        "sys.stdin = io.TextIOWrapper(io.BytesIO(b'a</think>b'))\n"
        "assert main.run(['recipe', 'decode']) == 0\n"
        f"assert main.run(['check', 'recipe', {str(cases)!r}]) == 0\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
