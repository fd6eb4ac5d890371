"""Results -> the table: how many answers are right, by family and part, against the gates.

Pure; used by `headrace eval tiny`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.eval.run import Result

# Largest perplexity allowed, as a multiple of that at the best length.
FLAT = 1.10
# (family, part or None for all parts, what is counted) -> least share.
GATES: tuple[tuple[str, str | None, str, float | None], ...] = (
    ("tools", "call", "right", 0.95),
    ("tools", "answer", "right", None),
    ("tools", "no call", "right", None),
    ("json", None, "valid", 0.99),
    ("json", None, "right", 0.95),
    ("arithmetic", None, "right", 0.90),
    ("sorting", None, "right", 0.90),
    ("counting", None, "right", 0.90),
    ("copying", None, "right", 0.98),
    ("recall", "1k", "right", 0.97),
    ("recall", "4k", "right", 0.92),
    ("recall", "8k", "right", 0.85),
    ("followups", None, "right", 0.90),
    ("definitions", None, "right", None),
    ("small_talk", None, "right", None),
)


@dataclass(frozen=True, slots=True)
class Score:
    """One line of the table. share, thinking, direct: 0 .. 1, None where nothing was asked.

    reached: items that are as long, answer included, as the ablation needs to change anything (all
    of them without one).
    """

    family: str
    part: str
    counted: str
    items: int
    share: float
    gate: float | None
    thinking: float | None
    direct: float | None
    reached: int

    @property
    def passed(self) -> bool:
        """Whether the gate is reached; without a gate nothing can be missed."""
        return self.gate is None or self.share >= self.gate

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "passed": self.passed}


def scores(results: Sequence[Result], reach: int | None = 0) -> list[Score]:
    """The lines of all families that were asked. reach: see `ablation.reach`."""
    lines = []
    for family, part, counted, gate in GATES:
        chosen = [r for r in results if r.family == family and part in (None, r.part)]
        if chosen:
            lengths = [r.prompt_tokens + r.tokens for r in chosen]
            reached = 0 if reach is None else sum(length >= reach for length in lengths)
            lines.append(
                Score(
                    family=family,
                    part=part or "all",
                    counted=counted,
                    items=len(chosen),
                    share=_share(chosen, counted) or 0.0,
                    gate=gate,
                    thinking=_share((r for r in chosen if r.thinking), counted),
                    direct=_share((r for r in chosen if not r.thinking), counted),
                    reached=reached,
                )
            )
    return lines


def _share(results: Iterable[Result], counted: str) -> float | None:
    values = [bool(getattr(result, counted)) for result in results]
    return sum(values) / len(values) if values else None


def flat(perplexity: dict[int, float]) -> bool:
    """Whether no length is more than 10 % worse than the best one."""
    return max(perplexity.values()) <= FLAT * min(perplexity.values())


def table(lines: Sequence[Score], perplexity: dict[int, float]) -> str:
    """For people."""
    shown = [
        f"{'family':<12} {'part':<8} {'':<6} {'items':>5} {'score':>7} {'gate':>6}      "
        f"{'thinking':>8} {'direct':>7}"
    ]
    for line in lines:
        gate = "" if line.gate is None else _percent(line.gate, 0)
        verdict = "" if line.gate is None else "ok" if line.passed else "MISS"
        shown.append(
            f"{line.family:<12} {line.part:<8} {line.counted:<6} {line.items:>5} "
            f"{_percent(line.share):>7} {gate:>6} {verdict:<4} "
            f"{_percent(line.thinking):>8} {_percent(line.direct):>7}"
        )
    if perplexity:
        best = min(perplexity.values())
        shown += ["", f"{'English':<12} {'context':>8} {'perplexity':>11} {'of best':>8}"]
        for length, value in perplexity.items():
            verdict = "ok" if value <= FLAT * best else "MISS"
            shown.append(f"{'':<12} {length:>8} {value:>11.2f} {value / best:>8.3f} {verdict}")
    return "\n".join(shown)


def _percent(share: float | None, digits: int = 1) -> str:
    return "" if share is None else f"{100 * share:.{digits}f} %"
