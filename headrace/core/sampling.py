"""How a request wants its tokens drawn.

`SamplingParams` is validated once, where it is built; every later layer may trust it. Order of the
transforms, per row: repetition penalty (prompt + output), frequency and presence penalty (output),
logit_bias, the grammar's mask, banned / allowed ids and the ids that min_tokens forbids,
temperature, top_k (logit descending, id ascending), top_p (renormalised after top_k), min_p, draw.
Ids are checked against the vocabulary by the engine (`engine/sampling_state.py`), which alone knows
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum

from headrace.core.grammar import GrammarSpec
from headrace.core.plain import is_huge, plain, plain_ids, shown
from headrace.core.speculation import Policy
from headrace.errors import InvalidRequest

MAX_SEED = 2**64 - 1
MAX_STOP_TOKEN_IDS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024  # of one stop string
MAX_CHOICES = 128
# A list of ids (logit_bias, banned, allowed) is never longer than any vocabulary in use.
MAX_LISTED_IDS = 2**18
MAX_LOGIT_BIAS = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_TOP_LOGPROBS = 2**18  # the engine allows at most its vocabulary, HTTP at most 20
# Below this a temperature is treated as 0 (greedy): dividing logits by it would overflow fp32.
GREEDY_TEMPERATURE = 1e-5


class Coupling(StrEnum):
    """How drafts and drawn tokens share random numbers (docs/decisions/0010-two-couplings.md)."""

    GUMBEL = "gumbel"  # the same noise: tokens are a function of (seed, prompt) alone
    MAXIMAL = "maximal"  # rejection: most drafts accepted, tokens depend on what was drafted


class LogprobsMode(StrEnum):
    """Which distribution log probabilities are of."""

    RAW = "raw"  # the model's: log-softmax of its unmodified logits
    PROCESSED = "processed"  # the one that is drawn from: after penalties, masks, top_k, ...


@dataclass(frozen=True, slots=True)
class StopScope:
    """The part of an answer in which stop strings are looked for. Default: all of it, as it is.

    border_token: a control token (the end of thinking) that is no text, and across which no stop
    string is found. after_border: only behind the first one. skip_newlines: newlines at the start
    of that part are no text. end_token: a control token (the markup of tool calls) that ends that
    part, up to the next border if one follows.
    """

    border_token: int | None = None
    after_border: bool = False
    skip_newlines: bool = False
    end_token: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request. Raises InvalidRequest naming the field.

    temperature: 0 (greedy) .. 2. top_p: (0, 1]. top_k: -1 or 0 (off, kept as -1) or >= 1. min_p:
    [0, 1], tokens below min_p * the highest probability are dropped. seed: 0 .. 2^64-1, or None for
    one drawn by the engine. n: choices, 1 .. 128; choice k draws with `rng.choice_seed(seed, k)`.
    coupling: "gumbel" or "maximal"; None: "gumbel" with a seed or in a deterministic engine, else
    "maximal". Without drafts both draw from the same distribution, by different numbers. Numbers
    may be NumPy's; they become Python's.

    max_tokens: >= 1, or None for "up to the context limit". min_tokens: no EOS, stop token or stop
    string ends the answer before it has this many tokens. stop: strings that end the answer; text
    is cut before them, the token in which one completes is the last one. stop_scope: where they
    count. stop_token_ids: ids that end the answer besides EOS. ignore_eos: EOS ends nothing.

    repetition_penalty: (0, 100], 1 = off; positive logits of known tokens are divided by it,
    negative ones multiplied. presence_penalty, frequency_penalty: [-2, 2]. logit_bias: id -> added
    to its logit, [-100, 100]. banned_token_ids are never drawn; allowed_token_ids, unless None, are
    the only ones that are (EOS is not implied).

    logprobs: log probabilities of each drawn token and of this many best ids (0 .. vocabulary), or
    None. logprobs_mode: "raw" or "processed". prompt_logprobs: the same for each prompt token but
    the first, always raw; the prompt is then computed without prefix cache and truncation.

    speculation: drafts that a step verifies, "off", "fixed:K" or "adaptive"; None: what the engine
    is set to.
    grammar: what the answer must look like; EOS ends it where the grammar allows an end. Where the
    grammar allows nothing but the end, min_tokens yields.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    n: int = 1
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_scope: StopScope = StopScope()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    banned_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    prompt_logprobs: int | None = None
    speculation: str | None = None
    coupling: Coupling | None = None
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        self._make_plain()
        self._check_shaping()
        self._check_penalties()
        self._check_ids()
        self._check_end()
        self._check_logprobs()
        self._check_coupling()
        if self.speculation is not None:
            Policy.parse(self.speculation, param="speculation", error=InvalidRequest)
        if self.grammar is not None and not isinstance(self.grammar, GrammarSpec):
            raise InvalidRequest("grammar must be a GrammarSpec.", param="grammar")

    def _make_plain(self) -> None:
        for field in fields(self):
            value = plain(getattr(self, field.name))
            if field.name.endswith("_ids") and (value is not None or field.default is not None):
                value = plain_ids(value)
                if value is None:
                    raise InvalidRequest(
                        f"{field.name} must be a list of token ids.", param=field.name
                    )
            elif field.name == "top_k" and value == 0 and not isinstance(value, bool):
                value = -1
            if any(map(is_huge, value if isinstance(value, tuple) else (value,))):
                raise InvalidRequest(f"{field.name} is too large a number.", param=field.name)
            object.__setattr__(self, field.name, value)

    @property
    def greedy(self) -> bool:
        """Whether the highest logit is taken (ties to the lowest id) instead of a draw."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def shaped(self) -> bool:
        """Whether top_k, top_p or min_p drop tokens."""
        return self.top_k != -1 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the known tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    # --- checks ------------------------------------------------------------------------------

    def _check_shaping(self) -> None:
        _number("temperature", self.temperature, 0.0, 2.0)
        if not 0.0 < _finite("top_p", self.top_p) <= 1.0:
            raise InvalidRequest(f"top_p must be in (0, 1], got {self.top_p}.", param="top_p")
        if self.top_k != -1:
            _integer("top_k", self.top_k, 1, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        _integer("n", self.n, 1, MAX_CHOICES)

    def _check_penalties(self) -> None:
        penalty = _finite("repetition_penalty", self.repetition_penalty)
        if not 0.0 < penalty <= MAX_REPETITION_PENALTY:
            raise InvalidRequest(
                f"repetition_penalty must be in (0, {MAX_REPETITION_PENALTY:g}], got {penalty:g}.",
                param="repetition_penalty",
            )
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)

    def _check_ids(self) -> None:
        _ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _ids("banned_token_ids", self.banned_token_ids, MAX_LISTED_IDS)
        if self.allowed_token_ids is not None:
            _ids("allowed_token_ids", self.allowed_token_ids, MAX_LISTED_IDS)
            if not set(self.allowed_token_ids) - set(self.banned_token_ids):
                raise InvalidRequest(
                    "allowed_token_ids leaves no token to draw.", param="allowed_token_ids"
                )
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest("logit_bias must map token ids to numbers.", param="logit_bias")
        _ids("logit_bias", self.logit_bias, MAX_LISTED_IDS)
        for token, bias in self.logit_bias.items():
            if not -MAX_LOGIT_BIAS <= _finite("logit_bias", bias) <= MAX_LOGIT_BIAS:
                raise InvalidRequest(
                    f"logit_bias of token {token} must be in [-{MAX_LOGIT_BIAS:g}, "
                    f"{MAX_LOGIT_BIAS:g}], got {bias}.",
                    param="logit_bias",
                )

    def _check_end(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest("ignore_eos must be true or false.", param="ignore_eos")
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).",
                param="min_tokens",
            )
        stop: object = self.stop
        if not isinstance(stop, (tuple, list)) or len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop must be a list of at most {MAX_STOP_STRINGS} strings.", param="stop"
            )
        for text in stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise InvalidRequest(
                    f"A stop string must have 1 to {MAX_STOP_CHARACTERS} characters.", param="stop"
                )
        for token in (self.stop_scope.border_token, self.stop_scope.end_token):
            if token is not None:
                _integer("stop_scope", token, 0, 2**31 - 1)

    def _check_logprobs(self) -> None:
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _integer(name, count, 0, MAX_TOP_LOGPROBS)
        if self.logprobs_mode not in tuple(LogprobsMode):
            raise InvalidRequest(
                f'logprobs_mode must be "raw" or "processed", got {self.logprobs_mode!r}.',
                param="logprobs_mode",
            )

    def _check_coupling(self) -> None:
        if self.coupling is None:
            return
        if self.coupling not in tuple(Coupling):
            raise InvalidRequest(
                f'coupling must be "gumbel", "maximal" or left out, got {shown(self.coupling)}.',
                param="coupling",
            )
        object.__setattr__(self, "coupling", Coupling(self.coupling))


def _finite(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, got {value!r}.", param=name)
    return float(value)


def _number(name: str, value: object, low: float, high: float) -> None:
    if not low <= _finite(name, value) <= high:
        raise InvalidRequest(f"{name} must be in [{low:g}, {high:g}], got {value}.", param=name)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}.", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be in [{low}, {high}], got {value}.", param=name)


def _ids(name: str, ids: Iterable[int], limit: int) -> None:
    listed = tuple(ids)
    if len(listed) > limit:
        raise InvalidRequest(
            f"{name} holds {len(listed)} ids, at most {limit} are allowed.", param=name
        )
    for token in listed:
        _integer(name, token, 0, 2**31 - 1)
