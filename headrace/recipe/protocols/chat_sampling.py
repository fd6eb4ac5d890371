"""Sampling fields of Chat Completions -> `InferenceOptions`.

Contract: the fields of OpenAI are resolved by `sampling.py`; those that level `clients` knows
besides (penalties, logit_bias, top_k, min_p, ... of vLLM) go into `extra` under the names that
`SamplingParams` has for them, checked by it. Called by `chat.py`.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from headrace.core.sampling import LogprobsMode, SamplingParams
from headrace.errors import InvalidRequest
from headrace.recipe.converted import InferenceOptions
from headrace.recipe.options import ConvertOptions, ModelVersion
from headrace.recipe.protocols.chat_wire import ClientRequest, OfficialRequest
from headrace.recipe.protocols.json_body import U8, U32, U64, check_unsigned
from headrace.recipe.protocols.sampling import draft_fields, resolve_sampling, to_f32

_NUMBERS = ("repetition_penalty", "min_p", "min_tokens", "ignore_eos")
_PENALTIES = ("presence_penalty", "frequency_penalty")
_values = attrgetter(
    *_NUMBERS,
    *_PENALTIES,
    "top_k",
    "stop_token_ids",
    "allowed_token_ids",
    "logit_bias",
    "logprobs_mode",
    "coupling",
    "speculation",
)
_NOTHING = (None,) * 13


def check_numbers(wire: OfficialRequest | ClientRequest) -> None:
    """InvalidBody for integers that do not fit their types."""
    if wire.n is not None:
        check_unsigned(wire.n, U8, "n")
    if wire.top_logprobs is not None:
        check_unsigned(wire.top_logprobs, U8, "top_logprobs")
    if wire.max_tokens is not None:
        check_unsigned(wire.max_tokens, U32, "max_tokens")
    if wire.seed is not None:
        check_unsigned(wire.seed, U64, "seed")
    if wire.thinking is not None and wire.thinking.budget_tokens is not None:
        check_unsigned(wire.thinking.budget_tokens, U64, "thinking.budget_tokens")
    if isinstance(wire, ClientRequest) and wire.max_completion_tokens is not None:
        check_unsigned(wire.max_completion_tokens, U32, "max_completion_tokens")


def chat_sampling(
    wire: OfficialRequest | ClientRequest,
    *,
    version: ModelVersion,
    thinking: bool,
    with_tools: bool,
    options: ConvertOptions,
) -> InferenceOptions:
    """The parameters that a request asks for; the constraint is the caller's to add."""
    max_tokens = wire.max_tokens
    if isinstance(wire, ClientRequest) and wire.max_completion_tokens is not None:
        # clients: max-completion-tokens. Of two limits the lower one satisfies both.
        limit = wire.max_completion_tokens
        max_tokens = limit if max_tokens is None else min(limit, max_tokens)
    return resolve_sampling(
        version=version,
        thinking=thinking,
        with_tools=with_tools,
        options=options,
        temperature=wire.temperature,
        top_p=wire.top_p,
        max_tokens=max_tokens,
        seed=wire.seed,
        logprobs=bool(wire.logprobs),
        top_logprobs=wire.top_logprobs,
        n=wire.n,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
    )


def extra_sampling(wire: ClientRequest, max_tokens: int | None) -> dict[str, Any]:
    """Fields that the official codec ignores, by their names in `SamplingParams`."""
    if _values(wire) == _NOTHING:
        return {}
    extra: dict[str, Any] = {
        name: value for name in _NUMBERS if (value := getattr(wire, name)) is not None
    }
    extra |= {
        name: to_f32(value) for name in _PENALTIES if (value := getattr(wire, name)) is not None
    }
    if wire.top_k is not None:
        # 0 and -1 both mean "off" among clients.
        extra["top_k"] = wire.top_k or -1
    if wire.stop_token_ids:
        extra["stop_token_ids"] = tuple(wire.stop_token_ids)
    if wire.allowed_token_ids is not None:
        extra["allowed_token_ids"] = tuple(wire.allowed_token_ids)
    if wire.logit_bias:
        extra["logit_bias"] = _logit_bias(wire.logit_bias)
    if wire.logprobs_mode is not None:
        extra["logprobs_mode"] = _logprobs_mode(wire.logprobs_mode)
    extra |= draft_fields(wire.coupling, wire.speculation)
    if extra:
        SamplingParams(max_tokens=max_tokens, **extra)  # raises for what is out of range
    return extra


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, value in bias.items():
        # int() would also take "1_0", " 1" and digits of other scripts.
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest(
                f"logit_bias: keys are token ids, got {key[:40]!r}.", param="logit_bias"
            )
        result[int(key)] = value
    return result


def _logprobs_mode(mode: str) -> LogprobsMode:
    if mode not in tuple(LogprobsMode):
        raise InvalidRequest(
            f'logprobs_mode must be "raw" or "processed", got "{mode[:40]}".',
            param="logprobs_mode",
        )
    return LogprobsMode(mode)
