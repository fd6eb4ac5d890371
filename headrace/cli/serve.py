"""`headrace serve`: an HTTP server of three protocols in front of one model."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from headrace.cli.integer import Integer


def command(
    checkpoint: Path | None = None,
    /,
    *,
    host: str | None = None,
    port: Integer | None = None,
    api_key: Annotated[list[str] | None, Parameter(negative="")] = None,
    api_key_file: Path | None = None,
    served_model_name: str | None = None,
    device: str | None = None,
    dtype: Literal["float64", "float32", "bfloat16"] | None = None,
    max_model_len: Integer | None = None,
    max_num_seqs: Integer | None = None,
    max_num_batched_tokens: Integer | None = None,
    threads: Integer | None = None,
    speculation: str | None = None,
    jump_forward: Annotated[bool | None, Parameter(negative="--no-jump-forward")] = None,
    thinking: Annotated[bool | None, Parameter(negative="--no-thinking")] = None,
    max_body_bytes: Integer | None = None,
    max_requests: Integer | None = None,
    max_requests_per_key: Integer | None = None,
    drain_timeout_s: float | None = None,
    log_format: Literal["text", "json"] | None = None,
    config: Path | None = None,
) -> None:
    """Serve a model over HTTP (Chat Completions, Responses and Messages).

    Routes: POST /v1/chat/completions, /v1/responses and /v1/messages (streamed or not; clients of
    OpenAI and Anthropic work), /v1/messages/count_tokens, GET /v1/models, /health/live,
    /health/ready, /metrics. The engine runs in a process of its own and is restarted if it dies.

    Example:

        headrace serve
        curl -N http://127.0.0.1:8000/v1/chat/completions \\
          -H 'content-type: application/json' -d '{"model": "tiny", "max_tokens": 64,
          "stream": true, "messages": [{"role": "user", "content": "What is 27 + 58?"}]}'

    Settings come from the command line, then HEADRACE_API_KEYS, then the TOML file (sections
    [server] and [engine]; docs/config.md lists all settings), then the defaults. The first SIGTERM
    or Ctrl-C lets running requests finish, the second one ends at once.

    Parameters
    ----------
    checkpoint: Path
        Directory in the official layout: config.json, tokenizer.json, *.safetensors (default:
        the embedded model, also called `tiny`).
    host: str
        Address to listen on (127.0.0.1: this machine only; 0.0.0.0: every network).
    port: int
        Port to listen on (8000); 0 takes a free one.
    api_key: list[str]
        A key that clients must send as `Authorization: Bearer KEY`; may be repeated. Without keys
        everybody who reaches the port may ask. Others on this machine can see the command line:
        prefer the file or HEADRACE_API_KEYS.
    api_key_file: Path
        File with one key a line.
    served_model_name: str
        Name that requests use (default: name of the directory).
    device: str
        Where the model runs: cpu, cuda (the first card), cuda:N, or auto (a card if there is one
        and the model is not small).
    dtype: str
        Arithmetic of the model (bfloat16 on a card, else float32).
    max_model_len: int
        Tokens of prompt plus answer (default: what the model and the memory allow).
    max_num_seqs: int
        Requests computed at once (32); others wait.
    max_num_batched_tokens: int
        Tokens of one step of the engine, all requests together (512).
    threads: int
        CPU threads of the operators (default: 1 for small models, else all physical cores).
    speculation: str
        Drafts of the model's draft module that a step verifies: off, adaptive (as many as pay) or
        fixed:K (default: adaptive if the model has a draft module); a request may have its own.
    jump_forward: bool
        Whether tokens that a schema or grammar forces are computed in one step instead of one each
        (yes); answers are the same.
    thinking: bool
        Whether the model thinks before it answers when a request does not say (yes).
    max_body_bytes: int
        Largest request body (16 MiB).
    max_requests: int
        Requests held at once, all callers together (1024); then 503.
    max_requests_per_key: int
        Requests held at once per API key (256); then 429.
    drain_timeout_s: float
        Seconds that running requests get to finish after SIGTERM (60).
    log_format: str
        text or json; one line a request on stderr.
    config: Path
        TOML file with more settings (also: HEADRACE_CONFIG).
    """
    from headrace.cli.checkpoint import checkpoint_path
    from headrace.cli.serve_run import serve
    from headrace.config import flags_of, naming_flags

    overrides: dict[str, object] = {
        "server.host": host,
        "server.port": port,
        "server.api_keys": api_key or None,
        "server.api_key_file": None if api_key_file is None else str(api_key_file),
        "server.default_thinking_mode": thinking,
        "server.max_body_bytes": max_body_bytes,
        "server.max_requests": max_requests,
        "server.max_requests_per_key": max_requests_per_key,
        "server.drain_timeout_s": drain_timeout_s,
        "server.log_format": log_format,
        "engine.served_model_name": served_model_name,
        "engine.device": device,
        "engine.dtype": dtype,
        "engine.max_model_len": max_model_len,
        "engine.max_num_seqs": max_num_seqs,
        "engine.max_num_batched_tokens": max_num_batched_tokens,
        "engine.threads": threads,
        "engine.speculation": speculation,
        "engine.jump_forward": jump_forward,
    }
    renamed = {"server.api_keys": "--api-key", "server.default_thinking_mode": "--thinking"}
    with naming_flags(flags_of(overrides, renamed)):
        asyncio.run(serve(checkpoint_path(checkpoint), config, overrides))
    sys.stderr.flush()
