"""`headrace generate`: prompts in, completions out, without a server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from headrace.cli.integer import Integer

_Text = Annotated[str, Parameter(allow_leading_hyphen=True)]
_Texts = Annotated[list[str], Parameter(allow_leading_hyphen=True, negative_iterable="")]


def command(
    checkpoint: Path,
    /,
    prompt: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    *,
    input_path: Annotated[Path | None, Parameter(name=["--input", "-i"])] = None,
    output_path: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    raw: Annotated[bool, Parameter(negative="--chat")] = False,
    system: str | None = None,
    thinking: Annotated[bool, Parameter(negative="--no-thinking")] = False,
    max_tokens: Integer | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: Integer = -1,
    seed: Integer | None = None,
    ignore_eos: Annotated[bool, Parameter(negative="")] = False,
    json_schema: _Text | None = None,
    regex: _Text | None = None,
    choice: _Texts | None = None,
    grammar: Path | None = None,
    speculation: str | None = None,
    coupling: Literal["gumbel", "maximal"] | None = None,
    batch: Integer | None = None,
    max_model_len: Integer | None = None,
    device: str | None = None,
    dtype: Literal["float64", "float32", "bfloat16"] | None = None,
    batch_invariant: Annotated[bool | None, Parameter(negative="")] = None,
    threads: Integer | None = None,
    config: Path | None = None,
) -> int:
    """Complete one prompt, or a JSONL file of prompts, without a server.

    One prompt, streamed to standard output (reasoning goes to standard error; `-` reads the prompt
    from standard input):

        headrace generate tiny "What is 27 + 58?" --temperature 0
        headrace generate my-model "Once upon a time" --raw --temperature 0

    An answer that has a form (with reasoning, what follows it; docs/structured-output.md):

        headrace generate tiny "Is 7 odd?" --choice yes --choice no
        headrace generate tiny "What is 27 + 58?" --regex "[0-9]+"
        headrace generate my-model "Ada, 36" --json-schema person.json

    A file of prompts:

        headrace generate my-model --input prompts.jsonl --output answers.jsonl

    Each input line is one JSON object with `prompt`, `messages` or `token_ids`:

        {"id": "a", "prompt": "Why is the sky blue?", "max_tokens": 200}
        {"id": "b", "messages": [{"role": "user", "content": "Hello"}]}
        {"token_ids": [0, 72, 105], "temperature": 0}

    `id` is optional (default: line-N). A line may also set temperature, top_p, top_k, seed,
    max_tokens, stop_token_ids, ignore_eos, coupling, speculation and thinking, beside `messages`
    also tools and tool_choice (auto or none), as a chat request has them. Each output line is

        {"id": "a", "prompt_tokens": 9, "text": "...", "token_ids": [...],
         "finish_reason": "stop", "usage": {...}}

    with `reasoning` and `tool_calls` where there are any, or

        {"id": "a", "error": {"line": 1, "code": "...", "message": "..."}}

    for a line that cannot be answered; then the exit code is 1. Lines appear as they finish, not in
    input order.

    After Ctrl-C, a crash or a full disk, run the same command again: ids that the output file
    already has are skipped. Delete the output file to start anew.

    Parameters
    ----------
    checkpoint: Path
        Directory in the official layout: config.json, tokenizer.json, *.safetensors; or `tiny`, the
        embedded model (unless there is a directory of that name).
    prompt: str
        The prompt; `-` reads it from standard input.
    input_path: Path
        JSONL file of prompts, instead of a prompt.
    output_path: Path
        JSONL file of answers (default: standard output, which cannot be resumed).
    raw: bool
        Continue the text as it is; --chat (the default) asks it as a user's message.
    system: str
        System message in front of each `prompt` (not of `messages`).
    thinking: bool
        Let the model think before it answers (a server does unless told not to).
    max_tokens: int
        Tokens of an answer at most (default: 8192, thinking 65536, or the room in the context).
    temperature: float
        0 (always the most likely token) to 2.
    top_p: float
        Draw from the most likely tokens that make up this share.
    top_k: int
        Draw from this many most likely tokens; 0 or -1: from all.
    seed: int
        Makes draws repeatable (but for --coupling maximal with adaptive drafts). In a file each
        line gets its own seed from this one and its number.
    ignore_eos: bool
        Go on to max_tokens even if the model ends its answer (for measurements).
    json_schema: str
        The answer is JSON that fits this schema: a file, or the schema itself.
    regex: str
        The whole answer matches this expression.
    choice: list[str]
        The answer is this text, or that of another --choice.
    grammar: Path
        The answer fits the grammar in this file: Lark (rule `start`), or GBNF (`root ::= ...`).
    batch: int
        Requests computed at once (32).
    speculation: str
        Drafts of the model's draft module that a step verifies: off, adaptive (as many as pay) or
        fixed:K (default: adaptive if the model has a draft module).
    coupling: str
        How drafts and draws share random numbers: gumbel (default with a seed: the same tokens with
        and without drafts) or maximal (default without one: most drafts accepted).
    max_model_len: int
        Tokens of prompt plus answer (default: what the model and the memory allow).
    device: str
        Where the model runs: cpu, cuda (the first card), cuda:N, or auto (a card if there is one
        and the model is not small).
    dtype: str
        Arithmetic of the model (bfloat16 on a card, else float32).
    batch_invariant: bool
        Bit-equal answers whatever runs beside them (slower).
    threads: int
        CPU threads of the operators (default: 1 for small models, else all physical cores).
    config: Path
        TOML file with more settings in [engine] (also: HEADRACE_CONFIG).
    """
    from headrace.cli.answer_form import FormOptions, form_of
    from headrace.cli.checkpoint import checkpoint_path
    from headrace.cli.generate_run import GenerateOptions, generate
    from headrace.cli.prompt_file import PromptOptions
    from headrace.config import flags_of, naming_flags
    from headrace.core.sampling import Coupling, SamplingParams

    shared = None if coupling is None else Coupling(coupling)
    sampling = SamplingParams(temperature, top_p, top_k, seed, max_tokens, coupling=shared)
    sampling = replace(sampling, ignore_eos=ignore_eos)
    form = form_of(FormOptions(json_schema, regex, tuple(choice or ()), grammar))
    options = GenerateOptions(
        checkpoint=checkpoint_path(checkpoint),
        prompt=prompt,
        input_path=input_path,
        output_path=output_path,
        prompts=PromptOptions(sampling, raw=raw, thinking=thinking, system=system, form=form),
        config_path=config,
        overrides={
            "engine.max_num_seqs": batch,
            "engine.max_model_len": max_model_len,
            "engine.device": device,
            "engine.speculation": speculation,
            "engine.dtype": dtype,
            "engine.batch_invariant": batch_invariant,
            "engine.threads": threads,
        },
    )
    with naming_flags(flags_of(options.overrides, {"engine.max_num_seqs": "--batch"})):
        return generate(options)
