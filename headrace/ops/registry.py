"""What an operator implementation declares, and how an engine's table is resolved from the list.

Resolution happens once per engine; the result is frozen and the hot path holds no other dispatch.
The choice with the highest priority among those that qualify wins; for every other implementation
the reason is kept, so that `headrace ops` can print it and a failed start can say what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import ConfigError, UnsupportedError
from headrace.ops.numerics import Numerics
from headrace.ops.signatures import OPS, OpTable


@dataclass(frozen=True, slots=True)
class Implementation:
    """One implementation of one operator.

    platforms and dtypes: where it runs ("*" = everywhere). batch_invariant: a row's result does not
    depend, bit for bit, on the other rows of the call; it holds on the platforms `invariant_on`,
    since how a library adds up is its own business. deterministic: equal calls give equal bits (no
    sums in order of arrival). Among those that qualify the highest `priority` is chosen. tolerance:
    largest allowed difference to the reference, relative to the largest magnitude of its result,
    per dtype. probe: a reason why it cannot run here, or None. why_lower: what people are told
    where it would qualify and another one has a higher priority. waits: whether the host waits for
    the device in a call, so that it cannot become part of a graph. numbers_only: whether the
    weights it multiplies with must be numbers, not `StoredWeight`.
    """

    op: str
    name: str
    function: Callable[..., Any]
    platforms: tuple[str, ...] = ("*",)
    dtypes: tuple[str, ...] = ("*",)
    batch_invariant: bool = False
    invariant_on: tuple[str, ...] = ("*",)
    deterministic: bool = True
    priority: int = 0
    tolerance: Mapping[str, float] | None = None
    probe: Callable[[], str | None] | None = None
    why_lower: str | None = None
    waits: bool = False
    numbers_only: bool = False


@dataclass(frozen=True, slots=True)
class Resolution:
    """How one operator was resolved: the choice and why each other implementation was not it."""

    op: str
    chosen: Implementation
    rejected: tuple[tuple[Implementation, str], ...]


def _objection(impl: Implementation, platform: str, numerics: Numerics, stored: bool) -> str | None:
    if "*" not in impl.platforms and platform not in impl.platforms:
        return f"runs on {', '.join(impl.platforms)}, not on {platform}"
    if "*" not in impl.dtypes and numerics.dtype not in impl.dtypes:
        return f"takes {', '.join(impl.dtypes)}, not {numerics.dtype}"
    if numerics.batch_invariant and not impl.batch_invariant:
        return "is not batch-invariant"
    if numerics.batch_invariant and not {"*", platform}.intersection(impl.invariant_on):
        return f"is not known to be batch-invariant on {platform}"
    if numerics.batch_invariant and not impl.deterministic:
        return "is not deterministic, as batch_invariant needs"
    if stored and impl.numbers_only:
        return "takes weights as numbers, not as they are stored"
    return impl.probe() if impl.probe is not None else None


def _resolve_one(
    op: str,
    candidates: Sequence[Implementation],
    platform: str,
    numerics: Numerics,
    override: str | None,
    stored: bool,
) -> Resolution:
    objections = {impl.name: _objection(impl, platform, numerics, stored) for impl in candidates}
    if override is not None:
        if override not in objections:
            raise ConfigError(
                f"ops.{op}: there is no implementation {override!r}, known: "
                f"{', '.join(objections)}.",
                param=f"ops.{op}",
            )
        if objections[override] is not None:
            raise UnsupportedError(
                f"ops.{op}: {override!r} {objections[override]}.", param=f"ops.{op}"
            )
    usable = [impl for impl in candidates if objections[impl.name] is None]
    if not usable:
        reasons = "; ".join(f"{name} {why}" for name, why in objections.items())
        advice = "" if platform == "cpu" else " The CPU has one: set engine.device to cpu."
        raise UnsupportedError(
            f"No implementation of operator {op!r} fits (platform {platform}, dtype "
            f"{numerics.dtype}, batch_invariant {numerics.batch_invariant}): {reasons}.{advice}"
        )
    named = [impl for impl in usable if impl.name == override]
    chosen = named[0] if named else max(usable, key=lambda impl: impl.priority)
    rejected = tuple(
        (impl, objections[impl.name] or _passed_over(impl, chosen))
        for impl in candidates
        if impl is not chosen
    )
    return Resolution(op, chosen, rejected)


def _passed_over(impl: Implementation, chosen: Implementation) -> str:
    """Why `impl` was not chosen although it qualifies."""
    if chosen.priority > impl.priority:
        return impl.why_lower or f"{chosen.name} is preferred where both qualify"
    return f"{chosen.name} was asked for by name"


def explain(
    implementations: Sequence[Implementation],
    platform: str,
    numerics: Numerics,
    overrides: Mapping[str, str] | None = None,
    *,
    stored: bool = False,
) -> list[Resolution]:
    """One `Resolution` per operator; stored: whether weights may be as a checkpoint stores them.

    Raises ConfigError for an unknown operator or name in `overrides` (operator -> implementation),
    UnsupportedError where nothing fits.
    """
    chosen = dict(overrides or {})
    unknown = sorted(set(chosen) - set(OPS))
    if unknown:
        raise ConfigError(
            f"ops.{unknown[0]}: there is no such operator, see `headrace ops`.",
            param=f"ops.{unknown[0]}",
        )
    return [
        _resolve_one(
            op,
            [impl for impl in implementations if impl.op == op],
            platform,
            numerics,
            chosen.get(op),
            stored,
        )
        for op in OPS
    ]


def resolve(
    implementations: Sequence[Implementation],
    platform: str,
    numerics: Numerics,
    overrides: Mapping[str, str] | None = None,
) -> OpTable:
    """The frozen table of an engine; raises as `explain`."""
    return table(explain(implementations, platform, numerics, overrides))


def table(resolutions: Sequence[Resolution]) -> OpTable:
    """Of what was chosen for every operator."""
    return OpTable(**{r.op: r.chosen.function for r in resolutions})
