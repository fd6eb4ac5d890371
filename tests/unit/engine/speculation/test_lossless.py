"""Streams drawn with drafts have exactly the distribution of streams drawn without.

Chi-square tests of single tokens and of pairs of consecutive ones against the exact distributions,
at 0.001 for all of them together (Bonferroni), seeds fixed by the setting's name. Wrong acceptance
rules must fail the same tests. The sweep draws 200,000 streams of every case (a line each in
docs/bench/lossless.jsonl), other runs 5,000 of two drafters per setting and coupling.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.rng import Purpose
from headrace.core.sampling import Coupling, SamplingParams
from headrace.engine import gumbel
from headrace.engine.speculation import draft_picker, rejection
from tests.bench_records import write_record
from tests.unit.engine.speculation.lossless import (
    DRAFTERS,
    SETTINGS,
    Policy,
    Result,
    Streams,
    exact_pairs,
    p_values_of,
)

CASES = [
    (setting, drafter, coupling)
    for setting in SETTINGS
    for drafter in DRAFTERS
    for coupling in Coupling
]
# Every drafter meets every coupling, every setting two drafters.
SHORT_CASES = [
    (setting, DRAFTERS[(number + step) % len(DRAFTERS)], coupling)
    for number, setting in enumerate(SETTINGS)
    for step in (0, 2)
    for coupling in Coupling
]
ALPHA = 0.001 / (3 * len(CASES))
DRAWS = 10_000
SWEEP_DRAWS = 200_000


@functools.cache
def pairs_of(setting: str) -> tuple[np.ndarray, np.ndarray]:
    return exact_pairs(SamplingParams(**SETTINGS[setting]))


def result_of(
    setting: str,
    drafter: str,
    coupling: Coupling,
    draws: int = DRAWS,
    policy: Policy | None = None,
) -> Result:
    params = SamplingParams(**SETTINGS[setting], coupling=coupling)
    streams = Streams(params, f"{setting}, {drafter}, {coupling}", draws)
    p_values = p_values_of(streams.run(drafter, policy), pairs_of(setting))
    return Result(p_values, streams.drafts_accepted / max(1, streams.drafts_verified))


@pytest.mark.parametrize(("setting", "drafter", "coupling"), SHORT_CASES)
def test_streams_have_the_exact_distribution(
    setting: str, drafter: str, coupling: Coupling
) -> None:
    result = result_of(setting, drafter, coupling, 5_000)
    assert result.holds(ALPHA), result
    if drafter == "perfect":
        assert result.acceptance == 1.0


@pytest.mark.sweep
@pytest.mark.parametrize(("setting", "drafter", "coupling"), CASES)
def test_200_000_streams_have_the_exact_distribution(
    setting: str, drafter: str, coupling: Coupling
) -> None:
    result = result_of(setting, drafter, coupling, SWEEP_DRAWS)
    assert result.holds(ALPHA), result
    write_record(
        "lossless.jsonl",
        f"lossless.{SWEEP_DRAWS}.{setting}-{drafter}-{coupling}",
        draws=SWEEP_DRAWS,
        alpha=ALPHA,
        p_values=result.p_values,
        acceptance=result.acceptance,
    )


def by_first_draft(drafts: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Lets a draft decide whether it is verified itself."""
    return np.where(drafts[:, 0] % 2 == 0, 2, 0)


def by_second_draft(drafts: np.ndarray, before: np.ndarray) -> np.ndarray:
    return np.where(drafts[:, 1] % 2 == 0, 2, 1)


def by_round_before(drafts: np.ndarray, before: np.ndarray) -> np.ndarray:
    """What may decide: the drafts of the round before, as their confidences do in serving."""
    return np.where(before.max(axis=1) < 0, 2, np.where(before[:, 1] % 2 == 0, 2, 0))


@pytest.mark.parametrize("coupling", list(Coupling))
@pytest.mark.parametrize("drafter", ["uniform", "adversarial"])
def test_earlier_rounds_may_decide_how_much_is_verified(drafter: str, coupling: Coupling) -> None:
    result = result_of("temperature 1", drafter, coupling, policy=by_round_before)
    assert result.holds(ALPHA), result


@pytest.mark.parametrize("policy", [by_first_draft, by_second_draft])
def test_a_draft_that_decides_about_itself_is_caught(policy: Policy) -> None:
    """Wrong under `maximal`; in the `gumbel` coupling it costs speed only."""
    several = {c: result_of("temperature 1", "uniform", c, 40_000, policy) for c in Coupling}
    assert not several[Coupling.MAXIMAL].holds(ALPHA), several
    assert several[Coupling.GUMBEL].holds(ALPHA), several


def accept_always(p: Any, drafts: Any, q: Any, seeds: Any, positions: Any) -> Any:
    return drafts, np.ones(len(drafts))


def no_subtraction(p: Any, drafts: Any, q: Any, seeds: Any, positions: Any) -> Any:
    """A rejected draft is replaced by a draw from p."""
    tokens, agreement = _accept_or_draw(p, drafts, q, seeds, positions)
    again = rejection.fresh(p, seeds, positions, Purpose.RESIDUAL)
    return np.where(tokens == drafts, tokens, again), agreement


def masses_of_other_rows(p: Any, drafts: Any, q: Any, seeds: Any, positions: Any) -> Any:
    """Rows are not normalised: rejected ones draw up to the mean mass of all rows."""

    def first_above(cumulative: torch.Tensor, numbers: np.ndarray) -> torch.Tensor:
        targets = torch.from_numpy(numbers)[:, None] * cumulative[:, -1:].mean()
        found = torch.searchsorted(cumulative, targets, right=True)[:, 0]
        return found.clamp(max=cumulative.shape[1] - 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejection, "_first_above", first_above)
        return _accept_or_draw(p, drafts, q, seeds, positions)


def one_number_for_both(p: Any, drafts: Any, q: Any, seeds: Any, positions: Any) -> Any:
    """The residual is drawn with the number that rejected the draft."""
    right = rejection.uniforms
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejection, "uniforms", lambda s, n, _: right(s, n, Purpose.ACCEPT))
        return _accept_or_draw(p, drafts, q, seeds, positions)


_accept_or_draw = rejection._accept_or_draw
WRONG_RULES = [
    accept_always,
    no_subtraction,
    masses_of_other_rows,
    one_number_for_both,
]


@pytest.mark.parametrize("rule", WRONG_RULES)
def test_a_wrong_rule_is_caught(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "_accept_or_draw", rule)
    result = result_of("temperature 1", "uniform", Coupling.MAXIMAL)
    assert not result.holds(ALPHA), result


# Under min_p this drafter is rejected outside of what the target allows only, so whatever number is
# drawn, and the number says nothing of the residual: the rule is right there.
CAUGHT = [
    (setting, rule)
    for setting in SETTINGS
    for rule in WRONG_RULES
    if (setting, rule) != ("min_p", one_number_for_both)
]


@pytest.mark.sweep
@pytest.mark.parametrize(("setting", "rule"), CAUGHT)
def test_a_wrong_rule_is_caught_in_every_setting(
    rule: Any, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection, "_accept_or_draw", rule)
    result = result_of(setting, "half", Coupling.MAXIMAL, SWEEP_DRAWS)
    assert not result.holds(ALPHA), result


def test_drafting_a_position_twice_with_the_same_numbers_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why `rng.draft_seed` has the anchor in it: the round before may decide (A4.2)."""
    monkeypatch.setattr(draft_picker, "draft_seeds", lambda seeds, anchors: seeds)
    wrong = result_of("temperature 1", "uniform", Coupling.MAXIMAL, policy=by_round_before)
    assert not wrong.holds(ALPHA)


def test_noise_that_is_not_of_each_id_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gumbel.noise
    monkeypatch.setattr(gumbel, "noise", lambda streams, ids: right(streams, ids // 2))
    assert not result_of("top_k", "uniform", Coupling.GUMBEL).holds(ALPHA)


@pytest.mark.parametrize("setting", ["temperature 1", "top_p"])
@pytest.mark.parametrize("drafter", ["uniform", "half", "adversarial"])
def test_acceptance_is_within_its_bounds(setting: str, drafter: str) -> None:
    """maximal: 1 - TV; gumbel: between (1 - TV) / (1 + TV) and that. TV is measured per row."""

    def run(coupling: Coupling) -> Streams:
        params = SamplingParams(**SETTINGS[setting], coupling=coupling)
        streams = Streams(params, f"{setting}, {drafter}", 6_000)
        # Only the first draft is verified: every verified draft counts.
        streams.run(drafter, lambda drafts, before: np.ones(len(drafts), dtype=np.int64))
        return streams

    maximal, noisy = run(Coupling.MAXIMAL), run(Coupling.GUMBEL)
    agreement = np.concatenate(maximal.agreement)
    assert len(agreement) == maximal.drafts_verified
    rate = maximal.drafts_accepted / maximal.drafts_verified
    error = 2 / np.sqrt(maximal.drafts_verified)  # four standard deviations or more
    assert abs(rate - agreement.mean()) < error
    low = (agreement / (2 - agreement)).mean()
    noisy_rate = noisy.drafts_accepted / noisy.drafts_verified
    assert low - error < noisy_rate < agreement.mean() + error
    assert np.isnan(np.concatenate(noisy.agreement)).all()


@pytest.mark.parametrize("drafter", ["uniform", "half"])
def test_drafts_of_an_unknown_distribution_may_pass_as_certain(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepting x with p(x), else drawing from p without x, is right for any x; it accepts less."""
    right = result_of("temperature 1", drafter, Coupling.MAXIMAL)
    monkeypatch.setattr(draft_picker.DraftPicker, "weights", None)
    result = result_of("temperature 1", drafter, Coupling.MAXIMAL)
    assert result.holds(ALPHA), result
    assert result.acceptance < right.acceptance
