"""`headrace chat`: talk to a model in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from headrace.cli.integer import Integer


def command(
    checkpoint: Path | None = None,
    /,
    *,
    system: str | None = None,
    tools: Path | None = None,
    thinking: Annotated[bool, Parameter(negative="--no-thinking")] = True,
    max_tokens: Integer | None = None,
    temperature: float | None = None,
    seed: Integer | None = None,
    speculation: str | None = None,
    coupling: Literal["gumbel", "maximal"] | None = None,
    max_model_len: Integer | None = None,
    device: str | None = None,
    dtype: Literal["float64", "float32", "bfloat16"] | None = None,
    threads: Integer | None = None,
    config: Path | None = None,
) -> int:
    """Talk to a model in the terminal.

    The model sees the whole conversation. Ctrl-C stops an answer, Ctrl-D leaves.

    Examples:

        headrace chat
        headrace chat my-model --system "Answer briefly." --temperature 0.6
        echo "What is 27 + 58?" | headrace chat --no-thinking

    While it runs: /reset forgets the conversation, /think on and /think off switch thinking,
    /result TEXT gives the result of a tool call, /help lists these, /exit leaves. A message that
    begins with a slash is written with two.

    Without a terminal every line of standard input is a message (or such a command); answers go to
    standard output, thoughts and errors to standard error. The exit code is 1 if a line failed.

    Parameters
    ----------
    checkpoint: Path
        Directory in the official layout: config.json, tokenizer.json, *.safetensors (default:
        the embedded model, also called `tiny`).
    system: str
        System message in front of the conversation.
    tools: Path
        JSON file with a list of tools, as `tools` of a chat request has it.
    thinking: bool
        Let the model think before it answers.
    max_tokens: int
        Tokens of an answer at most (default: 8192, thinking 65536, or the room in the context).
    temperature: float
        0 (always the most likely token) to 2 (default: 1, for the embedded model 0).
    seed: int
        Makes draws repeatable (but for --coupling maximal with adaptive drafts).
    speculation: str
        Drafts of the model's draft module that a step verifies: off, adaptive (as many as pay) or
        fixed:K (default: adaptive if the model has a draft module).
    coupling: str
        How drafts and draws share random numbers: gumbel (default with a seed: the same tokens with
        and without drafts) or maximal (default without one: most drafts accepted).
    max_model_len: int
        Tokens of the conversation (default: what the model and the memory allow).
    device: str
        Where the model runs: cpu, cuda (the first card), cuda:N, or auto (a card if there is one
        and the model is not small).
    dtype: str
        Arithmetic of the model (bfloat16 on a card, else float32).
    threads: int
        CPU threads of the operators (default: 1 for small models, else all physical cores).
    config: Path
        TOML file with more settings in [engine] (also: HEADRACE_CONFIG).
    """
    from headrace.assets import embedded_model
    from headrace.cli.chat_session import ChatOptions, chat
    from headrace.cli.checkpoint import checkpoint_path
    from headrace.config import flags_of, naming_flags
    from headrace.core.sampling import Coupling, SamplingParams

    directory = checkpoint_path(checkpoint)
    if temperature is None:
        # A model as small as the embedded one is right more often when it draws nothing.
        temperature = 0.0 if directory == embedded_model() else 1.0
    options = ChatOptions(
        checkpoint=directory,
        sampling=SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            coupling=None if coupling is None else Coupling(coupling),
        ),
        system=system,
        tools_path=tools,
        thinking=thinking,
        config_path=config,
        overrides={
            "engine.max_model_len": max_model_len,
            "engine.device": device,
            "engine.speculation": speculation,
            "engine.dtype": dtype,
            "engine.threads": threads,
        },
    )
    with naming_flags(flags_of(options.overrides, {})):
        return chat(options)
