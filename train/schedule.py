"""What a step does at a given share of the whole recipe's time."""

from __future__ import annotations

from dataclasses import dataclass

from train.forward import Mode

# Shares of the recipe at which phases begin.
SPARSE_FROM = 0.55
ROUNDED_FROM = 0.78
LONG_FROM = 0.08
DECAY_FROM = 0.65
WARMUP_STEPS = 100


@dataclass(frozen=True, slots=True)
class Stage:
    """mode: of the forward. long_every: every n-th step has long rows, 0 = none. cuts: shares of
    (replay, truncation) borders. rate: of the learning rates."""

    phase: int
    mode: Mode
    long_every: int
    cuts: tuple[float, float] | None
    rate: float


def phase_at(progress: float) -> int:
    """1 dense, 2 sparse, 3 sparse and rounded."""
    return 1 + (progress >= SPARSE_FROM) + (progress >= ROUNDED_FROM)


def stage(progress: float, since_start: int, phase: str) -> Stage:
    """progress: 0..1 of the recipe; since_start: steps since the optimiser was fresh;
    phase: "auto" or a fixed one."""
    number = phase_at(progress) if phase == "auto" else int(phase)
    rate = min(1.0, (since_start + 1) / WARMUP_STEPS)
    if progress > DECAY_FROM:
        rate *= max(0.01, (1.0 - progress) / (1.0 - DECAY_FROM))
    long_every = 0 if progress < LONG_FROM else (6 if number == 1 else 3)
    return Stage(
        phase=number,
        mode=Mode(sparse=number >= 2, rounded=number >= 3, index_rows=64),
        long_every=long_every,
        cuts=(0.05, 0.15) if number == 1 else (0.1, 0.3),
        rate=rate,
    )
