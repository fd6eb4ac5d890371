"""`headrace serve` on a tiny checkpoint: the whole way from HTTP to the model and back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.cli.main import main
from headrace.config import EngineConfig
from headrace.core.sampling import SamplingParams
from headrace.engine.llm import LLM
from headrace.model.tiny import write_tiny
from headrace.recipe import Codec, Conversation, PromptText, UserMessage
from tests.server.scripted import events_of, running_at, wait_for

PROMPT = "Hello, what is the answer?"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_tiny(directory, preset="tiny-8", seed=1)
    return directory


class Served:
    """A running `headrace serve`."""

    def __init__(self, checkpoint: Path, log: Path) -> None:
        code = "import sys; from headrace.cli.main import main; main(sys.argv[1:])"
        arguments = ["serve", str(checkpoint), "--port", "0", "--threads", "1"]
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL, stderr=file
            )
        wait_for(lambda: "try it:" in self.text() or self.process.poll() is not None, 90)
        match = re.search(r"serving tiny at (http://\S+) ", self.text())
        assert match, self.text()
        self.url = match[1]

    def text(self) -> str:
        return self.log.read_text()

    def chat(self, **fields: Any) -> httpx.Response:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": PROMPT}],
            "thinking": {"type": "disabled"},
            "temperature": 0,
            **fields,
        }
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)

    def ready(self) -> bool:
        return httpx.get(f"{self.url}/health/ready").status_code == 200

    def engine_pid(self) -> int:
        return int(re.findall(r"engine ready.*pid=(\d+)", self.text())[-1])


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(checkpoint, tmp_path_factory.mktemp("log") / "log")
    yield server
    server.process.kill()
    server.process.wait(10)


def test_start_up_text_says_url_example_and_random_weights(served: Served) -> None:
    text = served.text()
    assert "NOTE: Random weights" in text
    assert f"curl -N {served.url}/v1/chat/completions" in text
    (card,) = httpx.get(f"{served.url}/v1/models").json()["data"]
    assert "Random weights" in card["description"]


def test_the_right_tokens_come_back(served: Served, checkpoint: Path) -> None:
    codec = Codec.from_directory(checkpoint)
    ids = codec.encode(Conversation((UserMessage(PromptText.of(PROMPT)),), thinking=False))
    with LLM(checkpoint, EngineConfig(threads=1), tokenizer=codec.tokenizer) as llm:
        (expected,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=24))
    complete = served.chat(max_tokens=24).json()
    assert complete["usage"]["prompt_tokens"] == len(ids)
    assert complete["usage"]["completion_tokens"] == len(expected.token_ids)
    # The parser leaves out newlines in front of an answer.
    assert complete["choices"][0]["message"]["content"] == expected.text.lstrip("\n") != ""
    events = events_of(served.chat(max_tokens=24, stream=True).text)
    deltas = [event["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
    assert "".join(deltas) == complete["choices"][0]["message"]["content"]
    assert len([delta for delta in deltas if delta]) > 1


def test_a_stop_string_ends_the_answer_in_the_engine_process(served: Served) -> None:
    free = served.chat(max_tokens=24).json()
    content = free["choices"][0]["message"]["content"]
    stop = content[5:9]
    body = served.chat(max_tokens=24, stop=[stop], logprobs=True, top_logprobs=2).json()
    (choice,) = body["choices"]
    assert choice["message"]["content"] == content[: content.index(stop)]
    assert choice["finish_reason"] == "stop"
    entries = choice["logprobs"]["content"]
    # All its tokens are content, so there is one entry each, the one of the stop string the last.
    assert len(entries) == body["usage"]["completion_tokens"] < 24
    assert stop in b"".join(bytes(entry["bytes"]) for entry in entries).decode("utf-8", "replace")
    assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] for entry in entries)


def test_choices_differ_and_each_is_reproducible(served: Served) -> None:
    fields = {"n": 3, "temperature": 1, "seed": 7, "max_tokens": 12, "frequency_penalty": 0.5}
    first, again = served.chat(**fields).json(), served.chat(**fields).json()
    assert first["choices"] == again["choices"]
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    events = events_of(served.chat(stream=True, **fields).text)[:-1]
    for number, text in enumerate(texts):
        deltas = [c["delta"] for e in events for c in e["choices"] if c["index"] == number]
        assert "".join(delta.get("content") or "" for delta in deltas) == text


def test_requests_say_how_drafts_are_used(served: Served) -> None:
    """The draft module of the checkpoint has blocks of 3; its weights are random."""
    without = served.chat(max_tokens=24, speculation="off").json()
    assert "completion_tokens_details" not in without["usage"]
    for coupling in ("gumbel", "maximal"):
        body = served.chat(max_tokens=24, speculation="fixed:3", coupling=coupling).json()
        assert body["choices"] == without["choices"]  # greedy
        details = body["usage"]["completion_tokens_details"]
        accepted = details["accepted_prediction_tokens"]
        rejected = details["rejected_prediction_tokens"]
        rounds = body["usage"]["completion_tokens"] - 1 - accepted
        assert accepted >= 0 and 0 < accepted + rejected <= 3 * rounds
    wait_for(lambda: metric(served, 'verified_drafts_total{place="3"}') > 0)
    assert metric(served, "drafted_tokens_total") % 3 == 0
    assert metric(served, "accepted_length_count") > 0
    judged = metric(served, 'judged_drafts_total{place="1"}')
    assert judged == metric(served, 'verified_drafts_total{place="1"}')
    assert 0 < metric(served, 'predicted_drafts_total{place="1"}') < judged


def metric(served: Served, name: str) -> float:
    text = httpx.get(f"{served.url}/metrics").text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    (value,) = [v for n, v in (line.rsplit(" ", 1) for line in lines) if n.endswith(f"e_{name}")]
    return float(value)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
        ("responses", {"input": "a", "max_output_tokens": 4}),
        ("messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
    ],
)
def test_more_drafts_than_a_block_has_are_refused(
    served: Served, path: str, fields: dict[str, Any]
) -> None:
    for text, words in (
        ("fixed:4", ["asks for 4 drafts", "block has 3", '"off", "adaptive" or "fixed:K"']),
        ("fixed:70", ["asks for 70 drafts", "block has 3"]),
        ("often", ['"off", "adaptive" or "fixed:K"']),
    ):
        body = {"model": "tiny", **fields, "speculation": text}
        response = httpx.post(f"{served.url}/v1/{path}", json=body, timeout=60)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error.get("param", "speculation") == "speculation"
        assert all(word in error["message"] for word in words), error
        body = {"model": "tiny", **fields, "speculation": "fixed:3", "coupling": "gumbel"}
        assert httpx.post(f"{served.url}/v1/{path}", json=body, timeout=60).status_code == 200


def test_a_context_too_long_says_limit_and_length(served: Served) -> None:
    (card,) = httpx.get(f"{served.url}/v1/models").json()["data"]
    error = served.chat(max_tokens=card["max_model_len"]).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(card["max_model_len"]) in error["message"]


def test_sigkill_of_the_engine_ends_requests_and_restarts_it(served: Served) -> None:
    results: list[httpx.Response] = []
    fields = {"stream": True, "max_tokens": 900, "ignore_eos": True}
    thread = threading.Thread(target=lambda: results.append(served.chat(**fields)))
    thread.start()
    wait_for(lambda: running_at(served.url) == 1)
    time.sleep(1.0)  # into the answer: the first token is out
    os.kill(served.engine_pid(), signal.SIGKILL)
    thread.join()
    assert events_of(results[0].text)[-1]["error"]["code"] == "engine_lost"
    wait_for(served.ready, 60)
    assert served.chat(max_tokens=4).status_code == 200
    metrics = httpx.get(f"{served.url}/metrics").text
    assert "headrace_engine_restarts_total 1.0" in metrics


def test_sigterm_ends_with_0_after_the_running_request(served: Served) -> None:
    """Last test of this module: it stops the server."""
    results: list[httpx.Response] = []
    fields = {"max_tokens": 80, "ignore_eos": True}
    thread = threading.Thread(target=lambda: results.append(served.chat(**fields)))
    thread.start()
    wait_for(lambda: running_at(served.url) == 1)
    time.sleep(0.5)  # past the encoding of the prompt: the engine has it
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 0
    thread.join()
    assert results[0].json()["usage"]["completion_tokens"] == 80


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (["NOWHERE"], 3, "is no directory"),
        (["CHECKPOINT", "--port", "70000"], 2, "server.port"),
        (["CHECKPOINT", "--max-model-len", "0"], 2, "engine.max_model_len"),
        (["CHECKPOINT", "--api-key", "x"], 2, "server.api_keys"),
        (["CHECKPOINT", "--api-key-file", "NOWHERE"], 2, "cannot read"),
        (["CHECKPOINT", "--host", "no.such.host.invalid"], 2, "cannot listen"),
        (["CHECKPOINT", "--config", "NOWHERE"], 2, "config file"),
        (["BROKEN"], 3, "tokenizer.json"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_exit_code(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    exit_code: int,
    text: str,
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    places = {"CHECKPOINT": checkpoint, "NOWHERE": tmp_path / "nowhere", "BROKEN": broken}
    with pytest.raises(SystemExit) as caught:
        main(["serve", *(str(places.get(argument, argument)) for argument in arguments)])
    assert caught.value.code == exit_code
    error = capsys.readouterr().err
    assert text in error
    assert "error: " in error
    assert "Traceback" not in error
