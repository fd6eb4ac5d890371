"""The state of confidence-scheduled verification in one engine: what the engine calls.

    controller = Controller(num_rows, draft_length, cost)
    each step:
        decision = controller.decide(rows, wanted, limits, ...)      # plan: the number of drafts
        lengths = decision.lengths(newest survivals [R, G])          # launch: whose drafts
        if a draft pass follows (decision.draft, or a request of fixed length):
            controller.launch(rows drafted for)
    when its results come back, in this order:
        controller.outcome(rows, verified, accepted)
        controller.arrive(rows drafted for, features)
        controller.cost.observe(rows of the step, seconds, ...)
    when a row is given up, preempted or computed again:
        controller.clear(rows)

Contract: no torch, no clock, nothing waits. The newest survivals are `controller.newest(rows)` in
a blocking loop; an overlapped one computes `survivals(controller.confidences(features))` where the
drafts are. Results of void shares are not passed on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from headrace.core.speculation import ADAPTIVE
from headrace.engine.speculation.confidence import LEAST_TEMPERATURE, Survivals
from headrace.engine.speculation.cost import StepCost
from headrace.engine.speculation.curve import Floats, Ints
from headrace.engine.speculation.estimator import HEAD_START, ConfidenceEstimator
from headrace.engine.speculation.policy import StepDecision, StepLoad, budget
from headrace.engine.speculation.rounds import Flags, Rounds

PROBE_SHARE = 0.002  # of the time that probes may take while drafting does not pay


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Counts by place in the draft, int64 [G] each: verified; judged (verified, and all before it
    accepted); accepted. predicted: float64 [G], sum of the confidences of the judged ones, so
    predicted / judged beside accepted / judged shows the calibration."""

    verified: Ints
    judged: Ints
    accepted: Ints
    predicted: Floats


class Controller:
    """num_rows: table rows of the engine. draft_length: G. cost: None where it was not measured;
    everything is verified then. temperatures: of the confidence head, one or G (checkpoint).
    estimator: turns features into confidences; default: trusts the head and corrects what it gets
    wrong. Features are the head's raw outputs z, or `top_logit`s for a checkpoint without a head.
    """

    def __init__(
        self,
        num_rows: int,
        draft_length: int,
        cost: StepCost | None,
        *,
        temperatures: ArrayLike = 1.0,
        estimator: ConfidenceEstimator | None = None,
    ) -> None:
        self.cost = cost
        self.estimator = estimator or ConfidenceEstimator(draft_length, HEAD_START)
        self.draft_length = draft_length
        self._temperatures = np.maximum(temperatures, LEAST_TEMPERATURE)
        self.rounds = Rounds(num_rows, draft_length)
        self._features = np.zeros((num_rows, draft_length))  # of each row's latest arrived round
        self._since_probe_s = 0.0
        self._counts = np.zeros((3, draft_length), dtype=np.int64)
        self._predicted = np.zeros(draft_length)

    def confidences(self, features: Floats) -> Floats:
        """c [R, G] in [0, 1] of features [R, G]. May be called from another thread."""
        return self.estimator.confidences(features / self._temperatures)

    def launch(self, rows: Ints) -> None:
        """A draft pass for table rows [R] was launched."""
        self.rounds.launch(rows)

    def arrive(self, rows: Ints, features: Floats) -> None:
        """Features [R, G] of each row's oldest draft pass that has not arrived."""
        scaled = features / self._temperatures
        self.rounds.arrive(rows, self.estimator.confidences(scaled))
        self._features[rows] = scaled

    def outcome(self, rows: Ints, verified: Ints, accepted: Ints) -> None:
        """How many drafts of the round that arrived last were verified [R], and accepted [R].

        Call it before `arrive` brings the next one. Leave out requests in which acceptance was cut
        by something else (a stop token, the length limit).
        """
        judged, confidence = self.estimator.observe(self._features[rows], verified, accepted)
        places = np.arange(self.draft_length)
        self._counts[0] += (places < verified[:, None]).sum(axis=0)
        self._counts[1] += judged.sum(axis=0)
        self._counts[2] += (places < accepted[:, None]).sum(axis=0)
        self._predicted += (confidence * judged).sum(axis=0)

    def clear(self, rows: Ints) -> None:
        """Table rows [R] are given up or computed again: no drafts, nothing under way."""
        self.rounds.clear(rows)

    def newest(self, rows: Ints) -> Survivals:
        """Survivals [R, G] of the newest drafts, 1 where they have not arrived."""
        return self.rounds.newest(rows)

    def stats(self) -> DraftStats:
        """Counts since the start."""
        verified, judged, accepted = self._counts.copy()
        return DraftStats(verified, judged, accepted, self._predicted.copy())

    def decide(
        self,
        rows: Ints,
        wanted: Ints,
        limits: Ints,
        *,
        other_rows: int = 0,
        room: int | None = None,
    ) -> StepDecision:
        """What the next step verifies. rows int64 [R]: table rows of its decoding requests, the
        rest as in `StepLoad`. `draft` holds for all adaptive requests that draw a token in this
        step, also for those whose prompt ends in it.

        Drafting stops while a step with it is expected to be slower than one without speculation;
        what is expected of requests whose survivals are not known is the mean of the others.
        Meanwhile a draft pass is made now and then, for at most `PROBE_SHARE` of the time, to see
        whether drafts have become better; its drafts are not verified unless drafting pays again.
        """
        previous, known = self.rounds.previous(rows)
        load = StepLoad(previous, wanted, limits, other_rows, room)
        if ((known & (limits > 0)) | (wanted == 0)).all():
            decision = budget(load, self.cost)
        else:
            decision = self._decide_unknown(load, known)
        self.rounds.plan(rows)
        if not (wanted == ADAPTIVE).any():
            return replace(decision, draft=self._pays_for_newcomer())
        if decision.draft:
            self._since_probe_s = 0.0
            return decision
        return self._probed(decision, load)

    def _decide_unknown(self, load: StepLoad, known: Flags) -> StepDecision:
        """Some requests have no draft yet, or nobody has judged their drafts."""
        outlook = np.where(known[:, None], load.previous, self.rounds.profile)
        pays = budget(self._all_drafted(load, outlook), self.cost).draft
        # Unjudged drafts count 1: verifying them is how they get judged. Where drafting does not
        # pay they come from a probe, which only wants their confidence.
        load = replace(load, previous=np.where(known[:, None], load.previous, float(pays)))
        return budget(load, self.cost, draft=pays)

    def _pays_for_newcomer(self) -> bool:
        """Whether drafting pays for an adaptive request whose prompt ends in a step that has no
        other adaptive ones."""
        one, whole = np.array([ADAPTIVE]), np.array([self.draft_length])
        return budget(StepLoad(self.rounds.profile[None, None], one, whole), self.cost).draft

    def _probed(self, decision: StepDecision, load: StepLoad) -> StepDecision:
        self._since_probe_s += decision.step_s
        probe_s = 0.0 if self.cost is None else self.cost.draft_s(len(load.wanted))
        if probe_s > PROBE_SHARE * self._since_probe_s:
            return decision
        self._since_probe_s = 0.0
        perfect = self._all_drafted(load, np.ones_like(load.previous))
        return replace(decision, draft=budget(perfect, self.cost).draft)

    def _all_drafted(self, load: StepLoad, survival: Survivals) -> StepLoad:
        """The same load if every request had a whole draft with these survivals."""
        limits = np.full_like(load.limits, self.draft_length)
        return replace(load, previous=survival, limits=limits)
