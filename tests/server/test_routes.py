"""Models, health, metrics, settings and the model card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.config import build_section
from headrace.config.server import ServerConfig
from headrace.errors import CheckpointError, ConfigError
from headrace.recipe import convert_chat
from headrace.serve.model_card import make_card, read_note
from tests.server.scripted import CODEC, CONTEXT, MODEL, LiveServer


def get(live: LiveServer, path: str) -> httpx.Response:
    return httpx.get(live.url + path)


def test_models(server: LiveServer) -> None:
    card = {
        "id": MODEL,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "headrace",
        "max_model_len": CONTEXT,
    }
    assert get(server, "/v1/models").json() == {"object": "list", "data": [card]}
    assert get(server, f"/v1/models/{MODEL}").json() == card


def test_random_weights_are_said(server: LiveServer, tmp_path: Path) -> None:
    note = {"random": True, "preset": "tiny-8", "seed": 1}
    (tmp_path / "headrace.json").write_text(json.dumps(note))

    class Facts:
        model_name = MODEL
        max_model_len = 10

    before = server.state.model
    server.state.model = make_card(read_note(tmp_path), Facts())
    (card,) = get(server, "/v1/models").json()["data"]
    server.state.model = before
    assert "random text" in card["description"]
    assert card["headrace"] == note
    assert make_card({}, Facts()).description is None
    assert read_note(tmp_path / "nowhere") == {}
    for text in ("[]", "{"):
        (tmp_path / "headrace.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"headrace\.json"):
            read_note(tmp_path)


def test_health(server: LiveServer) -> None:
    def ready() -> tuple[int, str]:
        response = get(server, "/health/ready")
        return response.status_code, response.json()["status"]

    assert get(server, "/health/live").json() == {"status": "live"}
    assert ready() == (200, "ready")
    server.engine.ready = False
    assert ready() == (503, "restarting")
    server.state.draining = True
    assert ready() == (503, "draining")
    assert get(server, "/health/live").status_code == 200


def test_health_while_loading() -> None:
    with LiveServer(loaded=False) as live:
        assert get(live, "/health/ready").json() == {"status": "loading"}
        assert get(live, "/v1/models").json() == {"object": "list", "data": []}


def test_metrics() -> None:
    with LiveServer() as live:
        live.engine.restarts = 3
        live.chat()
        live.chat(temperature=-1)
        text = get(live, "/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    chat = 'route="/v1/chat/completions"'
    assert values[f'headrace_requests_total{{{chat},status="200"}}'] == "1.0"
    assert values[f'headrace_requests_total{{{chat},status="400"}}'] == "1.0"
    assert values["headrace_requests_running"] == "1.0"
    assert float(values["headrace_prompt_tokens_total"]) > 0
    assert float(values["headrace_completion_tokens_total"]) > 0
    assert values["headrace_time_to_first_token_seconds_count"] == "1.0"
    assert values["headrace_request_seconds_count"] == "1.0"
    assert values["headrace_engine_restarts_total"] == "3.0"
    assert values["headrace_engine_ready"] == "1.0"
    assert "headrace_engine_free_blocks" in values
    assert "headrace_engine_steps_total" in values


def test_metrics_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 rounds: 4 verified nothing, 2 one draft, 4 three, of which 0, 1, 3 and 3 held."""
    with LiveServer() as live:
        stats = replace(
            live.engine.stats(),
            drafted_tokens=30,
            draft_rounds=10,
            verified_drafts=(6, 4, 4),
            judged_drafts=(6, 3, 2),
            accepted_drafts=(4, 2, 2),
            predicted_drafts=(4.5, 2.0, 1.5),
        )
        monkeypatch.setattr(live.engine, "stats", lambda: stats)
        text = get(live, "/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    engine = {
        name.removeprefix("headrace_engine_"): float(value)
        for name, value in values.items()
        if name.startswith("headrace_engine_")
    }
    assert engine["drafted_tokens_total"] == 30
    for name in ("verified", "judged", "accepted", "predicted"):
        by_place = [engine[f'{name}_drafts_total{{place="{place}"}}'] for place in (1, 2, 3)]
        assert tuple(by_place) == getattr(stats, f"{name}_drafts")
    assert [engine[f'verified_length_bucket{{le="{n}"}}'] for n in range(4)] == [4, 6, 6, 10]
    assert [engine[f'accepted_length_bucket{{le="{n}"}}'] for n in range(1, 5)] == [6, 8, 8, 10]
    for name, total in (("verified_length", 14), ("accepted_length", 18)):
        assert engine[f'{name}_bucket{{le="+Inf"}}'] == engine[f"{name}_count"] == 10
        assert engine[f"{name}_sum"] == total


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", ""),
        ("port", 70000),
        ("port", "80"),
        ("api_keys", ["short"]),
        ("api_keys", ["has a space"]),
        ("api_keys", ["ключ-ключ-ключ"]),
        ("max_body_bytes", 0),
        ("max_requests", True),
        ("drain_timeout_s", 0),
        ("keep_alive_s", float("nan")),
        ("log_format", "xml"),
        ("default_thinking_mode", 1),
        ("prot", 80),
    ],
)
def test_settings_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        build_section(ServerConfig, "server", {"server": {name: value}})
    assert (caught.value.param or "").startswith(f"server.{name}")


def test_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# mine\nfirst-key-1\n\n  second-key  \n")
    config = ServerConfig(api_keys=("zeroth-key",), api_key_file=str(path)).with_key_file()
    assert config.api_keys == ("zeroth-key", "first-key-1", "second-key")
    # A file without a usable key must not open the server to everybody.
    for content in (b"", b"# nothing\n", b"short\n", b"\xff\xff\xff\xff\xff\xff\xff\xff"):
        path.write_bytes(content)
        with pytest.raises(ConfigError):
            ServerConfig(api_key_file=str(path)).with_key_file()
    with pytest.raises(ConfigError, match="cannot read"):
        replace(config, api_key_file=str(tmp_path / "nowhere")).with_key_file()


def test_the_example_of_the_documentation_is_a_request() -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
    body = text.split("-d '")[1].split("'\n")[0]
    chat = convert_chat(body, CODEC.options("tiny"))
    assert (chat.model, chat.inference.max_tokens, chat.stream) == ("tiny", 64, True)
    assert text.count('model="tiny"') == 1
    assert "my-model" not in text
