"""Settings of the HTTP server: a frozen value, validated once, where it is built.

Contract: every bound of the server is here; a `ConfigError` names the dotted field and what is
allowed. Built by `config/load.py` from the section [server] and by the command line; imports no
torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.errors import ConfigError

LOG_FORMATS = ("text", "json")
MAX_KEY_FILE_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of one HTTP server.

    host, port: where it listens; port 0 takes a free one. api_keys: with at least one, every route
    but /health needs one of them. api_key_file: more keys, one a line, `#` starts a comment.
    default_thinking_mode: whether the model thinks when a request does not say.
    max_body_bytes: one request body. max_messages: of one conversation. max_requests: requests at
    once, all keys together (then 503); max_requests_per_key: of one key, or of all callers together
    without keys (then 429). max_connections: open connections, idle ones included.
    header_timeout_s, body_timeout_s: a client must have sent them by then. idle_timeout_s: a
    connection without a request is closed after this. send_timeout_s: a client that takes nothing
    for so long counts as gone. keep_alive_s: a waiting stream gets a comment this often.
    drain_timeout_s: how long running requests may go on after SIGTERM.
    encode_threads: threads that turn text into ids. max_stored_responses, max_stored_bytes: answers
    (and their bytes) kept in memory for `previous_response_id`, 0: none. log_format: text or json.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    default_thinking_mode: bool = True
    max_body_bytes: int = 16 * 2**20
    max_messages: int = 4096
    max_requests: int = 1024
    max_requests_per_key: int = 256
    max_connections: int = 4096
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    send_timeout_s: float = 60.0
    keep_alive_s: float = 10.0
    drain_timeout_s: float = 60.0
    encode_threads: int = 2
    max_stored_responses: int = 1024
    max_stored_bytes: int = 256 * 2**20
    log_format: str = "text"

    def __post_init__(self) -> None:
        if not self.host or not isinstance(self.host, str):
            raise _error("host", f"must be a host name or an address, got {self.host!r}")
        if not isinstance(self.default_thinking_mode, bool):
            raise _error("default_thinking_mode", "must be true or false")
        if self.log_format not in LOG_FORMATS:
            raise _error(
                "log_format", f"must be one of {', '.join(LOG_FORMATS)}, got {self.log_format!r}"
            )
        for key in self.api_keys:
            _check_key(key, "api_keys")
        self._check_integer("port", 0, 65535)
        self._check_integer("max_body_bytes", 1, 2**30)
        for name in ("max_messages", "max_requests", "max_requests_per_key", "max_connections"):
            self._check_integer(name, 1, 2**20)
        self._check_integer("encode_threads", 1, 256)
        self._check_integer("max_stored_responses", 0, 2**20)
        self._check_integer("max_stored_bytes", 1, 2**40)
        for name in (
            "header_timeout_s",
            "body_timeout_s",
            "idle_timeout_s",
            "send_timeout_s",
            "keep_alive_s",
            "drain_timeout_s",
        ):
            self._check_seconds(name)

    def with_key_file(self) -> ServerConfig:
        """The same settings with the keys of `api_key_file` added; ConfigError if it is unusable.

        A key file without a key is refused: it would silently open the server to everybody.
        """
        if self.api_key_file is None:
            return self
        keys = read_key_file(Path(self.api_key_file))
        return replace(self, api_keys=(*self.api_keys, *keys), api_key_file=None)

    def _check_integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _error(name, f"must be an integer in [{low}, {high}], got {value!r}")

    def _check_seconds(self, name: str) -> None:
        value = getattr(self, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not 0 < value <= 86_400:
            raise _error(name, f"must be seconds in (0, 86400], got {value!r}")


def read_key_file(path: Path) -> tuple[str, ...]:
    """API keys of a file, one a line. Raises ConfigError naming file and line."""
    field = "server.api_key_file"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEY_FILE_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.", param=field) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}).", param=field) from error
    if len(data) > MAX_KEY_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_KEY_FILE_BYTES} bytes.", param=field)
    lines = (line.strip() for line in text.splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{path} holds no API key.", param=field)
    for key in keys:
        _check_key(key, "api_key_file")
    return keys


def _check_key(key: object, field: str) -> None:
    # A key travels in a header: printable ASCII without spaces, or clients cannot send it.
    good = isinstance(key, str) and 8 <= len(key) <= 512
    if not good or not all(0x21 <= ord(character) <= 0x7E for character in str(key)):
        raise _error(field, "a key must be 8 to 512 printable ASCII characters without spaces")


def _error(name: str, text: str) -> ConfigError:
    return ConfigError(f"server.{name}: {text}.", param=f"server.{name}")
