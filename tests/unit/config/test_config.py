"""EngineConfig validation, and merging of file, environment and command line."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from headrace.config import (
    EngineConfig,
    build_section,
    check_sections,
    flags_of,
    naming_flags,
    read_settings,
    unknown_variables,
)
from headrace.config.load import CONFIG_PATH_VARIABLE, ENVIRONMENT, MAX_CONFIG_BYTES
from headrace.config.server import ServerConfig
from headrace.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "field", "message"),
    [
        ({"device": "gpu"}, "device", "allowed: auto, cpu, cuda, cuda:N"),
        ({"device": "cuda:x"}, "device", "'cuda:x' is unknown"),
        ({"device": "cuda:1\n"}, "device", "is unknown"),
        ({"device": 0}, "device", "0 is unknown"),
        ({"dtype": "float16"}, "dtype", "float64, float32, bfloat16"),
        ({"kv_quant": 1}, "kv_quant", "true or false"),
        ({"max_num_seqs": 0}, "max_num_seqs", r"in \[1, 4096\], got 0"),
        ({"max_num_seqs": True}, "max_num_seqs", "got True"),
        ({"max_num_batched_tokens": 31}, "max_num_batched_tokens", r"at least .*\(32\)"),
        ({"max_model_len": 1}, "max_model_len", r"\[2, 16777216\]"),
        ({"num_blocks": 1}, "num_blocks", r"\[2, "),
        ({"num_blocks": 9, "kv_memory_bytes": 9}, "num_blocks", "exclude each other"),
        ({"max_waiting": "many"}, "max_waiting", "got 'many'"),
        ({"seed": 2**64}, "seed", "got 18446744073709551616"),
        ({"threads": 0}, "threads", "got 0"),
        ({"threads": 2, "batch_invariant": True}, "threads", "must be 1 or unset"),
        ({"threads": 2, "deterministic": True}, "threads", "with engine.deterministic"),
        ({"deterministic": 1}, "deterministic", "true or false"),
        ({"deterministic": True, "replay": "bounded"}, "replay", "leave it out or set"),
        ({"replay": "sometimes"}, "replay", "bounded, exact, off"),
        ({"served_model_name": " "}, "served_model_name", "1 to 256 characters"),
    ],
)
def test_bad_values(values: dict[str, object], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig(**values)
    assert caught.value.param == f"engine.{field}" and field in caught.value.message
    assert caught.value.exit_code == 2


def test_what_deterministic_includes() -> None:
    config = EngineConfig(deterministic=True)
    assert config.invariant_operators and config.replay_mode == "exact"
    assert EngineConfig(deterministic=True, replay="off").replay_mode == "off"
    uncached = EngineConfig(deterministic=True, replay="bounded", prefix_cache=False)
    assert uncached.replay_mode == "bounded"
    assert not EngineConfig().invariant_operators and EngineConfig().replay_mode == "bounded"
    assert EngineConfig(batch_invariant=True).invariant_operators


def test_priority_of_sources(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text('[engine]\nseed = 3\nmax_waiting = 7\n[server]\napi_keys = ["file"]\n')
    environ = {"HEADRACE_API_KEYS": "first-key, second-key,", "HEADRACE_OTHER": "ignored"}
    overrides = {"engine.seed": 4, "engine.threads": None, "engine.dtype": "float64"}
    settings = read_settings(path, overrides=overrides, environ=environ)
    assert settings == {
        "engine": {"seed": 4, "max_waiting": 7, "dtype": "float64"},
        "server": {"api_keys": ["first-key", "second-key"]},
    }
    assert build_section(EngineConfig, "engine", settings) == EngineConfig(
        seed=4, max_waiting=7, dtype="float64"
    )
    assert build_section(ServerConfig, "server", settings).api_keys == ("first-key", "second-key")


def test_path_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text("[engine]\nseed = 3\n")
    monkeypatch.setenv(CONFIG_PATH_VARIABLE, str(path))
    assert read_settings()["engine"] == {"seed": 3}
    monkeypatch.delenv(CONFIG_PATH_VARIABLE)
    assert read_settings() == {}


def test_defaults_without_sources() -> None:
    assert build_section(EngineConfig, "engine", read_settings(environ={})) == EngineConfig()


@pytest.mark.parametrize(
    ("text", "param", "message"),
    [
        ("[engine]\nmax_num_seq = 3", "engine.max_num_seq", "Did you mean max_num_seqs?"),
        ("[engine]\ncolour = 3", "engine.colour", "Known: device, "),
        ("[engine]\nseed = '3'", "engine.seed", "engine.seed: Expected `int | null`, got `str`"),
        ("[engine]\nseed = 3.0", "engine.seed", "got `float`"),
        ("[engine]\nmax_num_seqs = 0", "engine.max_num_seqs", "got 0"),
        ("seed = 3", "seed", "outside a section"),
        ("[engin]\nseed = 3", "engin", "Did you mean engine?"),
        ("[engine\nseed = 3", None, "is not valid TOML: "),
    ],
)
def test_bad_files(tmp_path: Path, text: str, param: str | None, message: str) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        settings = read_settings(path, environ={})
        check_sections(settings, ["engine", "server"])
        build_section(EngineConfig, "engine", settings)
    assert caught.value.param == param and message in caught.value.message


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.toml: No such file"):
        read_settings(tmp_path / "missing.toml")
    path = tmp_path / "headrace.toml"
    path.write_bytes(b"[engine]\n\xff = 1")
    with pytest.raises(ConfigError, match=r"not UTF-8 \(byte 9\)"):
        read_settings(path)
    path.write_bytes(b"#" * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        read_settings(path)


def test_overrides_need_a_section() -> None:
    with pytest.raises(ConfigError, match="no dotted setting"):
        read_settings(overrides={"seed": 1}, environ={})


def test_every_variable_is_documented() -> None:
    assert {v.name for v in ENVIRONMENT} == {CONFIG_PATH_VARIABLE, "HEADRACE_API_KEYS"}
    assert all(v.name.startswith("HEADRACE_") and v.meaning for v in ENVIRONMENT)


# --- keys that are none ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", ",", " , ,", "\n", "\t,"])
def test_a_key_variable_without_keys_never_opens_the_server(tmp_path: Path, text: str) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text('[server]\napi_keys = ["a-good-key"]\n')
    with pytest.raises(ConfigError, match="HEADRACE_API_KEYS is set but holds nothing") as caught:
        read_settings(path, environ={"HEADRACE_API_KEYS": text})
    assert caught.value.param == "server.api_keys"


@pytest.mark.parametrize("keys", [[""], ["a-good-key", ""], ["        "], ["a-good-key", " \t"]])
def test_blank_keys_of_file_and_flag_are_refused(keys: list[str]) -> None:
    for settings in (
        read_settings(environ={}, overrides={"server.api_keys": keys}),
        {"server": {"api_keys": keys}},
    ):
        with pytest.raises(ConfigError, match=r"server\.api_keys: a key must be 8 to 512"):
            build_section(ServerConfig, "server", settings)


@pytest.mark.parametrize("text", ["", "\n\n", "# a-good-key\n", " \t\n"])
def test_a_key_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match="holds no API key"):
        ServerConfig(api_key_file=str(path)).with_key_file()
    with pytest.raises(ConfigError, match="cannot read"):
        ServerConfig(api_key_file="").with_key_file()


# --- names ----------------------------------------------------------------------------------------


def test_mistyped_variables_are_told() -> None:
    environ = {"HEADRACE_API_KEY": "x", "HEADRACE_CONFIG": "y", "HOME": "/", "HEADRACE_ZZZ": ""}
    first, second = unknown_variables(environ)
    assert "HEADRACE_API_KEY is no variable" in first
    assert "HEADRACE_ZZZ is no variable" in second
    assert all("Known: HEADRACE_CONFIG, HEADRACE_API_KEYS." in text for text in (first, second))


def test_errors_name_the_flag_that_was_given() -> None:
    overrides = {"engine.max_num_seqs": 9, "engine.seed": None, "server.max_requests": 0}
    flags = flags_of(overrides, {"engine.max_num_seqs": "--batch", "engine.seed": "--seed"})
    assert flags == {"engine.max_num_seqs": "--batch", "server.max_requests": "--max-requests"}
    with pytest.raises(ConfigError) as caught, naming_flags(flags):
        EngineConfig(max_num_seqs=9, max_num_batched_tokens=8)
    assert "engine.max_num_batched_tokens (8)" in caught.value.message
    assert "--batch (engine.max_num_seqs) (9)" in caught.value.message
    assert caught.value.param == "engine.max_num_batched_tokens"
    with pytest.raises(ConfigError) as caught, naming_flags(flags):
        ServerConfig(max_requests_per_key=0)
    assert caught.value.message.startswith("server.max_requests_per_key: ")


@pytest.mark.parametrize("name", [("server", ServerConfig), ("engine", EngineConfig)])
def test_the_documentation_lists_exactly_the_settings(name: tuple[str, type]) -> None:
    """Names in order, defaults as TOML writes them (`none`: no default)."""
    section, cls = name
    text = (Path(__file__).parents[3] / "docs" / "config.md").read_text("utf-8")
    table = text.split(f"## `[{section}]`")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| [\w ]+ \| (\S+) \| \S.*\|$", table, re.MULTILINE)
    expected = []
    for field in fields(cls):
        default = json.dumps(field.default)
        expected.append((field.name, "none" if default == "null" else f"`{default}`"))
    assert rows == expected


def test_the_example_of_the_documentation_works(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "config.md").read_text("utf-8")
    path = tmp_path / "headrace.toml"
    path.write_text(text.split("```toml\n")[1].split("```")[0])
    settings = read_settings(path, environ={})
    check_sections(settings, ("server", "engine"))
    assert build_section(EngineConfig, "engine", settings).max_num_seqs == 8
    assert build_section(ServerConfig, "server", settings).api_key_file == "keys.txt"


@pytest.mark.parametrize(
    ("cls", "section", "toml", "field"),
    [
        (ServerConfig, "server", 'port = "8000"', "server.port"),
        (ServerConfig, "server", "api_keys = 'a-good-key'", "server.api_keys"),
        (ServerConfig, "server", "api_keys = ['a-good-key', 5]", "server.api_keys[1]"),
        (ServerConfig, "server", "keep_alive_s = true", "server.keep_alive_s"),
        (ServerConfig, "server", "host = ''", "server.host"),
        (EngineConfig, "engine", "kv_quant = 1", "engine.kv_quant"),
        (EngineConfig, "engine", "dtype = 32", "engine.dtype"),
        (EngineConfig, "engine", "seed = 1979-05-27", "engine.seed"),
        (EngineConfig, "engine", "threads = [1]", "engine.threads"),
    ],
)
def test_type_errors_name_the_field(
    tmp_path: Path, cls: type, section: str, toml: str, field: str
) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text(f"[{section}]\n{toml}\n")
    with pytest.raises(ConfigError) as caught:
        build_section(cls, section, read_settings(path, environ={}))
    assert caught.value.message.startswith(field)
    assert caught.value.param == field
