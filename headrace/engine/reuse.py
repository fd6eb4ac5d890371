"""What of a prompt need not be computed: rules of prefix hits and of decoder truncation.

Contract: `plan_reuse` turns the two switches of the config and the facts of a model into one value;
what a model cannot do is refused if it was asked for and left off with the reason if it was only
the default. Rows of two engines are comparable if their `namespace` is equal. Called by
`engine/engine.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, cast

from headrace.config import EngineConfig
from headrace.core.hashing import namespace_key, root_key, salt_key
from headrace.core.kv import KVGroupSpec
from headrace.errors import ConfigError
from headrace.kv.resume import ReplayMode, ResumeRules
from headrace.ops.numerics import Numerics

# One circle of users until requests carry a tenant; the secret only matters for shared stores.
_DOMAIN = "tenant:default"


class ReuseSpec(Protocol):
    """What a model says about its windows; `ModelSpec` has it."""

    def truncation_refusal(self) -> str | None:
        """Why the decoder prefill cannot be truncated; None where it can."""
        ...

    def replay_refusal(self) -> str | None:
        """Why windows cannot be rebuilt after a prefix hit; None where they can."""
        ...

    def keep(self, truncate: bool) -> int:
        """Last rows of a prompt that run through every layer."""
        ...

    def replay_rows(self, mode: str, truncate: bool) -> int:
        """Rows to recompute before a hit."""
        ...


@dataclass(frozen=True, slots=True)
class Reuse:
    """keep: last prompt rows that run through all layers, 0: all rows do. resume: rules of hits,
    None: there are none, for `no_hits_because`. root: key before the first block.
    """

    keep: int
    resume: ResumeRules | None
    no_hits_because: str
    root: bytes


def plan_reuse(
    config: EngineConfig, spec: ReuseSpec, groups: Sequence[KVGroupSpec], numerics: Numerics
) -> Reuse:
    """Rules of an engine. Raises ConfigError for a truncation that the model does not allow."""
    refusal = spec.truncation_refusal()
    if config.truncate == "on" and refusal is not None:
        raise ConfigError(
            f'engine.truncate "on" does not fit the model: {refusal}. Leave it out or set "off".',
            param="engine.truncate",
        )
    truncate = config.truncate != "off" and refusal is None
    profile = {
        "model": config.served_model_name or "",
        "groups": [asdict(group) for group in groups],
        "numerics": asdict(numerics),
        "replay": config.replay_mode,
        "truncate": truncate,
    }
    reason = ""
    if not config.prefix_cache:
        reason = "engine.prefix_cache is off"
    elif config.replay_mode == "off":
        reason = "engine.replay is off and no window records are stored"
    else:
        reason = spec.replay_refusal() or ""
    resume = None
    if not reason:
        resume = ResumeRules(
            mode=cast(ReplayMode, config.replay_mode),
            keep=spec.keep(truncate),
            replay_rows=spec.replay_rows(config.replay_mode, truncate),
            windows_suffice=truncate,
        )
    return Reuse(
        keep=spec.keep(True) if truncate else 0,
        resume=resume,
        no_hits_because=reason,
        root=root_key(namespace_key(profile), salt_key(b"", _DOMAIN)),
    )
