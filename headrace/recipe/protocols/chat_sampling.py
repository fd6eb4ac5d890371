"""Sampling fields of a Chat Completions request -> `SamplingParams`.

Contract: OpenAI's fields and those by which clients of vLLM ask for more (top_k, min_p,
repetition_penalty, min_tokens, stop_token_ids, ignore_eos, allowed_token_ids, logprobs_mode).
Limits of the protocol are checked here, those of sampling itself by `SamplingParams`; every
InvalidRequest names the field. Called by `recipe/protocols/chat.py`.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from headrace.core.sampling import (
    MAX_STOP_STRINGS,
    LogprobsMode,
    SamplingParams,
)
from headrace.errors import InvalidRequest

MAX_TOP_LOGPROBS = 20
_EMPTY_STOP = (
    "empty string. Expected a string with minimum length 1, but got an empty string instead."
)
_Value = TypeVar("_Value")


class SamplingFields(msgspec.Struct):
    """The fields as clients send them; null means absent."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logprobs_mode: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    allowed_token_ids: list[int] | None = None


def chat_sampling(wire: SamplingFields) -> SamplingParams:
    """The parameters that a request asks for; `max_tokens` is None where it names none."""
    # 0 and -1 both mean "off" among clients.
    top_k = -1 if wire.top_k in (None, 0) else wire.top_k
    allowed = wire.allowed_token_ids
    return SamplingParams(
        temperature=_or(wire.temperature, 1.0),
        top_p=_or(wire.top_p, 1.0),
        top_k=_or(top_k, -1),
        min_p=_or(wire.min_p, 0.0),
        seed=wire.seed,
        n=_or(wire.n, 1),
        max_tokens=_max_tokens(wire),
        min_tokens=_or(wire.min_tokens, 0),
        stop=_stop(wire.stop),
        stop_token_ids=tuple(wire.stop_token_ids or ()),
        ignore_eos=bool(wire.ignore_eos),
        repetition_penalty=_or(wire.repetition_penalty, 1.0),
        presence_penalty=_or(wire.presence_penalty, 0.0),
        frequency_penalty=_or(wire.frequency_penalty, 0.0),
        logit_bias=_logit_bias(wire.logit_bias),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        logprobs=_logprobs(wire),
        logprobs_mode=_logprobs_mode(wire.logprobs_mode),
    )


def _or(value: _Value | None, default: _Value) -> _Value:
    return default if value is None else value


def _max_tokens(wire: SamplingFields) -> int | None:
    limit = wire.max_tokens
    if wire.max_completion_tokens is None:
        return limit
    if limit not in (None, wire.max_completion_tokens):
        raise InvalidRequest(
            f"max_completion_tokens ({wire.max_completion_tokens}) and max_tokens ({limit}) "
            "are the same limit; give one of them.",
            param="max_completion_tokens",
        )
    limit = wire.max_completion_tokens
    if not 1 <= limit < 2**31:
        raise InvalidRequest(
            f"max_completion_tokens must be in [1, {2**31 - 1}], got {limit}.",
            param="max_completion_tokens",
        )
    return limit


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        if not stop:
            raise InvalidRequest(f"Invalid 'stop': {_EMPTY_STOP}", param="stop")
        return (stop,)
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"Stop string array too long: {len(stop)}", param="stop")
    for index, text in enumerate(stop):
        if not text:
            raise InvalidRequest(f"Invalid 'stop[{index}]': {_EMPTY_STOP}", param="stop")
    return tuple(stop)


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    result: dict[int, float] = {}
    for key, value in bias.items():
        # int() would also take "1_0", " 1" and digits of other scripts.
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest(
                f"logit_bias: keys are token ids, got {key[:40]!r}.", param="logit_bias"
            )
        result[int(key)] = value
    return result


def _logprobs(wire: SamplingFields) -> int | None:
    top = wire.top_logprobs
    if not wire.logprobs:
        if top:
            raise InvalidRequest(
                "Invalid top_logprobs and logprobs value, logprobs must be set to true if "
                "top_logprobs is used.",
                param="top_logprobs",
            )
        return None
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            "Invalid top_logprobs value, the valid range of top_logprobs is "
            f"[0, {MAX_TOP_LOGPROBS}].",
            param="top_logprobs",
        )
    return top or 0


def _logprobs_mode(mode: str | None) -> LogprobsMode:
    if mode is None:
        return LogprobsMode.RAW
    if mode not in tuple(LogprobsMode):
        raise InvalidRequest(
            f'logprobs_mode must be "raw" or "processed", got "{mode[:40]}".',
            param="logprobs_mode",
        )
    return LogprobsMode(mode)
