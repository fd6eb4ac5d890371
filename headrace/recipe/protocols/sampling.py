"""Sampling parameters of a request, as every protocol resolves them (spec recipe 6.2, 6.4).

Contract: the checks run in the order of the official codec and raise its texts; floats are rounded
to f32. Level `official` forces temperature and top_p in thinking mode and takes one choice; level
`clients` does what the request says. Called by every protocol module; `resolve_max_tokens` once
the prompt is counted.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from headrace.core.sampling import MAX_CHOICES, SamplingParams
from headrace.errors import ContextTooLong, InvalidRequest
from headrace.recipe.conversation import Conversation
from headrace.recipe.converted import InferenceOptions
from headrace.recipe.options import ConvertOptions, ModelVersion

MAX_SEED = 2**63 - 1
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
_F32 = struct.Struct("<f")
_LEAST_TOP_P: float = _F32.unpack(_F32.pack(0.95))[0]
# Members of an enumeration are slow to look up before Python 3.12.
_V41 = ModelVersion.V41
_EMPTY = "empty string. Expected a string with minimum length 1, but got an empty string instead."


def resolve_sampling(
    *,
    version: ModelVersion,
    thinking: bool,
    with_tools: bool,
    options: ConvertOptions,
    temperature: float | None = None,
    top_p: float | None = None,
    max_tokens: int | None = None,
    max_tokens_clamped: bool = False,
    seed: int | None = None,
    logprobs: bool = False,
    top_logprobs: int | None = None,
    n: int | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
) -> InferenceOptions:
    """Checked parameters; constraint and extra are the caller's to add.

    with_tools: tools are kept and the choice is not none. max_tokens_clamped: lower the limit to
    the bound instead of refusing it.
    """
    count = 1 if n is None else _choices(n, options)
    if presence_penalty is not None:
        _check_penalty("presence_penalty", presence_penalty)
    if frequency_penalty is not None:
        _check_penalty("frequency_penalty", frequency_penalty)
    if temperature is not None:
        temperature = to_f32(temperature)
        if not 0.0 <= temperature <= 2.0:
            raise InvalidRequest(
                "Invalid temperature value, the valid range of temperature is [0, 2]",
                param="temperature",
            )
    if top_p is not None:
        top_p = to_f32(top_p)
        if not 0.0 < top_p <= 1.0:
            raise InvalidRequest(
                "Invalid top_p value, the valid range of top_p is (0, 1.0]", param="top_p"
            )
    if top_logprobs is not None:
        _check_logprobs(logprobs, top_logprobs, options)
    if max_tokens is not None:
        max_tokens = _bounded(max_tokens, thinking, max_tokens_clamped, options)
    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise InvalidRequest(
            "Invalid seed value, the valid range of seed is [0, 2^63)", param="seed"
        )
    honoured = not options.official  # clients: sampling-honoured
    if temperature is None or (thinking and not honoured):
        temperature = 1.0
    if top_p is None or not honoured:
        top_p = _official_top_p(version, thinking, with_tools, top_p)
    return InferenceOptions(max_tokens, temperature, top_p, logprobs, top_logprobs, seed, n=count)


def check_stops(stop: str | list[str] | None, name: str = "stop") -> tuple[str, ...]:
    """Stop sequences. name: the request field, for `param`; the texts always say `stop`."""
    if not stop:
        if stop == "":
            raise InvalidRequest(f"Invalid 'stop': {_EMPTY}", param=name)
        return ()
    if isinstance(stop, str):
        return (stop,)
    if len(stop) > MAX_STOPS:
        raise InvalidRequest(f"Stop string array too long: {len(stop)}", param=name)
    for index, text in enumerate(stop):
        if not text:
            raise InvalidRequest(f"Invalid 'stop[{index}]': {_EMPTY}", param=f"{name}[{index}]")
    return tuple(stop)


def draft_fields(coupling: object, speculation: object) -> dict[str, Any]:
    """clients: sampling-fields. How drafts are used, in all protocols; what is not given is left
    out. Raises InvalidRequest naming the field and its values."""
    if coupling is None and speculation is None:
        return {}
    params: Any = SamplingParams(coupling=coupling, speculation=speculation)  # type: ignore[arg-type]  # checked there
    given = {"coupling": params.coupling, "speculation": params.speculation}
    return {name: value for name, value in given.items() if value is not None}


def resolve_max_tokens(
    conversation: Conversation, requested: int | None, prompt_tokens: int, context_limit: int
) -> int:
    """Answer length in tokens that fits the context; ContextTooLong says limit and length."""
    total = prompt_tokens + (requested or 0)
    if total > context_limit:
        raise ContextTooLong(
            f"This model's maximum context length is {context_limit} tokens. However, you "
            f"requested {total} tokens ({prompt_tokens} in the messages, {requested or 0} in the "
            "completion). Please reduce the length of the messages or completion.",
            param="messages",
        )
    wanted = conversation.default_max_tokens if requested is None else requested
    return max(1, min(wanted, context_limit - prompt_tokens))


def to_f32(value: float) -> float:
    """Rounded to single precision, as the official codec keeps floats; huge ones are infinite."""
    try:
        rounded: float = _F32.unpack(_F32.pack(value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


def shortest_f32(value: float) -> float:
    """The float with the fewest digits that is the same in single precision."""
    single = to_f32(value)
    for digits in range(6, 9):
        short = float(f"{single:.{digits}g}")
        if to_f32(short) == single:
            return short
    return float(f"{single:.9g}")


def _bounded(max_tokens: int, thinking: bool, clamped: bool, options: ConvertOptions) -> int:
    bound = options.thinking_max_tokens_bound if thinking else options.non_thinking_max_tokens_bound
    if clamped:
        max_tokens = min(max_tokens, bound)
    if not 1 <= max_tokens <= bound:
        if options.context_limit is not None:
            # Between the two the prompt counts as well: `resolve_max_tokens`.
            bound = min(bound, options.context_limit)
        raise InvalidRequest(
            f"Invalid max_tokens value, the valid range of max_tokens is [1, {bound}]",
            param="max_tokens",
        )
    return max_tokens


def _official_top_p(
    version: ModelVersion, thinking: bool, with_tools: bool, given: float | None
) -> float:
    if version is _V41:
        return 1.0 if given is None or not thinking else max(given, _LEAST_TOP_P)
    if thinking:
        return _LEAST_TOP_P if with_tools else 1.0
    return 1.0 if given is None else given


def _choices(n: int, options: ConvertOptions) -> int:
    if n == 1:
        return 1
    if options.official:
        raise InvalidRequest("Invalid n value (currently only n = 1 is supported)", param="n")
    # clients: n
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(
            f"Invalid n value, the valid range of n is [1, {MAX_CHOICES}]", param="n"
        )
    return n


def _check_penalty(name: str, value: float) -> None:
    if not -2.0 <= to_f32(value) <= 2.0:
        raise InvalidRequest(
            f"Invalid {name} value, the valid range of {name} is [-2, 2]", param=name
        )


def _check_logprobs(logprobs: bool, top_logprobs: int, options: ConvertOptions) -> None:
    if not logprobs:
        if top_logprobs == 0 and not options.official:
            return  # clients: top-logprobs-zero
        raise InvalidRequest(
            "Invalid top_logprobs and logprobs value, logprobs must be set to true if "
            "top_logprobs is used.",
            param="top_logprobs",
        )
    if not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            "Invalid top_logprobs value, the valid range of top_logprobs is "
            f"[0, {MAX_TOP_LOGPROBS}].",
            param="top_logprobs",
        )
