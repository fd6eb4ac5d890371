"""How a request wants its tokens drawn.

`SamplingParams` is validated once, where it is built; every later layer may trust it. Order of the
transforms: temperature, top_k, top_p (spec: top_k keeps the best by (logit desc, id asc); top_p is
taken on the distribution renormalised after top_k; at least one token survives).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from headrace.core.plain import is_huge, plain, plain_ids
from headrace.errors import InvalidRequest

MAX_SEED = 2**64 - 1
MAX_STOP_TOKEN_IDS = 64
# Below this a temperature is treated as 0 (greedy): dividing logits by it would overflow fp32.
GREEDY_TEMPERATURE = 1e-5


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, got {value!r}.", param=name)
    return float(value)


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}.", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be in [{low}, {high}], got {value}.", param=name)
    return value


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request.

    temperature: 0 (greedy) .. 2. top_p: (0, 1]. top_k: -1 or 0 (off, kept as -1) or >= 1. seed: 0
    .. 2^64-1, or None for one drawn by the engine. max_tokens: >= 1, or None for "up to the context
    limit". Numbers may be NumPy's; they become Python's.
    stop_token_ids: ids that end the answer besides EOS. Raises InvalidRequest naming the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._make_plain()
        if not 0.0 <= _number("temperature", self.temperature) <= 2.0:
            raise InvalidRequest(
                f"temperature must be in [0, 2], got {self.temperature}.", param="temperature"
            )
        if not 0.0 < _number("top_p", self.top_p) <= 1.0:
            raise InvalidRequest(f"top_p must be in (0, 1], got {self.top_p}.", param="top_p")
        if self.top_k != -1:
            _integer("top_k", self.top_k, 1, 2**31 - 1)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids holds {len(self.stop_token_ids)} ids, at most "
                f"{MAX_STOP_TOKEN_IDS} are allowed.",
                param="stop_token_ids",
            )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest("ignore_eos must be true or false.", param="ignore_eos")

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
