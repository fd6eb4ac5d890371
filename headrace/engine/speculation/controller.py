"""The state of confidence-scheduled verification in one engine: what the engine calls.

    controller = Controller(num_rows, draft_length, cost)
    each step:
        decision = controller.decide(rows, wanted, limits, ...)      # plan: the number of drafts
        lengths = decision.lengths(newest survivals [R, G])          # launch: whose drafts
        if a draft pass follows (decision.draft, or a request of fixed length):
            controller.rounds.launch(rows drafted for)
    when results come back:
        controller.rounds.arrive(rows, confidences [R, G])
        controller.cost.observe(rows of the step, seconds, ...)
    when a row is given up, preempted or computed again:
        controller.rounds.clear(rows)

Contract: no torch, no clock, nothing waits. The newest survivals may be taken from
`rounds.newest` (blocking loop) or be computed where the drafts are (overlapped loop).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headrace.core.speculation import ADAPTIVE
from headrace.engine.speculation.cost import StepCost
from headrace.engine.speculation.curve import Ints
from headrace.engine.speculation.policy import StepDecision, StepLoad, budget
from headrace.engine.speculation.rounds import Rounds

PROBE_SHARE = 0.002  # of the time that probes may take while drafting does not pay


class Controller:
    """num_rows: table rows of the engine. draft_length: G. cost: None until it is measured (or on
    machines where it never is): everything is verified then."""

    def __init__(self, num_rows: int, draft_length: int, cost: StepCost | None) -> None:
        self.cost = cost
        self.rounds = Rounds(num_rows, draft_length)
        self._draft_length = draft_length
        self._since_probe_s = 0.0

    def decide(
        self,
        rows: Ints,
        wanted: Ints,
        limits: Ints,
        *,
        other_rows: int = 0,
        other_tokens: int = 0,
        room: int | None = None,
    ) -> StepDecision:
        """What the next step verifies. rows int64 [R]: table rows of its decoding requests, the
        rest as in `StepLoad`.

        Drafting stops while a step with it is expected to be slower than one without speculation;
        what is expected of requests whose survivals are not known is the profile. Meanwhile a draft
        pass is made now and then, for at most `PROBE_SHARE` of the time, to see whether drafts have
        become better; its drafts are not verified unless drafting pays again.
        """
        previous, known = self.rounds.previous(rows)
        load = StepLoad(previous, wanted, limits, other_rows, other_tokens, room)
        adaptive = wanted == ADAPTIVE
        if np.all((known & (limits > 0)) | ~adaptive):
            decision = budget(load, self.cost)
        else:
            decision = self._decide_unknown(load, known)
        self.rounds.plan(rows)
        if decision.draft or not adaptive.any():
            self._since_probe_s = 0.0
            return decision
        return self._probed(decision, load)

    def _decide_unknown(self, load: StepLoad, known: np.ndarray) -> StepDecision:
        """Some adaptive requests have no draft yet, or nobody has judged their drafts."""
        everything = np.full_like(load.limits, self._draft_length)
        outlook = np.where(known[:, None], load.previous, self.rounds.profile)
        pays = budget(replace(load, previous=outlook, limits=everything), self.cost).draft
        # Unjudged drafts count 1: verifying them is how they get judged. Where drafting does not
        # pay they come from a probe, which only wants their confidence.
        load = replace(load, previous=np.where(known[:, None], load.previous, float(pays)))
        return budget(load, self.cost, draft=pays)

    def _probed(self, decision: StepDecision, load: StepLoad) -> StepDecision:
        assert self.cost is not None  # without costs drafting always pays
        self._since_probe_s += decision.step_s
        probe_s = self.cost.draft_s(len(load.wanted))
        if probe_s > PROBE_SHARE * self._since_probe_s:
            return decision
        self._since_probe_s = 0.0
        everything = np.full_like(load.limits, self._draft_length)
        perfect = replace(load, previous=np.ones_like(load.previous), limits=everything)
        return replace(decision, draft=budget(perfect, self.cost).draft)
