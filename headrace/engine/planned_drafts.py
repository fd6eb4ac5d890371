"""Drafts and forced tokens of decode shares: how many a step takes, and what became of them.

Contract: `plan_drafts` reserves rows and cache memory, nobody is preempted for either;
`commit_drafts` tells counters and controller. A forced token is one that a grammar allows alone: it
is verified like a draft and cannot fail, so it comes before all drafts and with every policy, also
where nothing drafts. Called by `engine/scheduler.py`. No torch.
"""

from __future__ import annotations

import numpy as np

from headrace.engine.admission import Admission
from headrace.engine.plan import DraftReport, Flags, Ints, NoLengths, PlannedDrafts, StepPlan
from headrace.engine.speculation.controller import Controller


def plan_drafts(
    desk: Admission, controller: Controller | None, rows: Ints, waiting: int, left: int
) -> tuple[PlannedDrafts | None, int]:
    """What decode rows [n] verify in at most `left` rows, and how many rows it takes.

    controller: None: only forced tokens are. waiting: prompt rows that wait for this step.
    """
    table = desk.table
    room = np.maximum(table.room(rows) - 1, 0)
    forced = packed(np.clip(table.due[rows], 0, room), left)
    limits = np.zeros_like(forced)
    if controller is not None:
        limits = np.minimum(room, controller.draft_length)
        limits[~table.drafted[rows] | (table.wanted[rows] == 0)] = 0
    covered = _cover(desk, rows, np.maximum(forced, limits))
    forced, limits = np.minimum(forced, covered), np.minimum(limits, covered)
    taken = int(forced.sum())
    if controller is None:
        return (PlannedDrafts(forced, NoLengths(), forced), taken) if taken else (None, 0)
    left -= taken
    decision = controller.decide(
        rows, table.wanted[rows], limits, other_rows=min(waiting, left), room=left
    )
    most = np.maximum(decision.fixed + decision.limits, forced)
    taken += int(decision.fixed.sum()) + decision.total
    return PlannedDrafts(most, decision, forced), taken


def _cover(desk: Admission, rows: Ints, drafts: Ints) -> Ints:
    """Give rows the blocks for their drafts, int64 [n]; as many drafts as have some."""
    table, kv = desk.table, desk.kv
    needed = np.minimum(table.most[rows] + drafts, table.limit[rows])
    short = needed > kv.num_blocks[rows] * kv.block_tokens
    if short.any():
        desk.bind_newest(rows[short])
        if kv.grow(rows[short], needed[short]) is not None:
            room = kv.num_blocks[rows] * kv.block_tokens - table.most[rows]
            drafts = np.minimum(drafts, room)
    return drafts


def commit_drafts(
    desk: Admission,
    controller: Controller | None,
    plan: StepPlan,
    report: DraftReport,
    valid: Flags,
    drafting: Flags,
) -> None:
    """Count what was verified; tell the controller of it, and what the new drafts are worth.

    valid: bool [B], shares that count. drafting: bool [S], whose new drafts are expected.
    """
    count = valid[plan.samples]
    rows = plan.sampling_rows
    desk.count_forced(int(report.forced[count].sum()))
    if controller is None:
        return
    wanted = desk.table.wanted[rows[: plan.decodes]] != 0
    desk.count_drafts(
        int((wanted & count[: plan.decodes]).sum()),
        int(report.verified[count].sum()),
        report.drafted,
    )
    # Behind forced tokens a draft's place is not the one that its confidence was learnt at.
    judged = count & (report.verified > 0) & (report.forced == 0)
    controller.outcome(rows[judged], report.verified[judged], report.accepted[judged])
    arrived = count & drafting
    controller.arrive(rows[arrived], report.features[arrived])
    if controller.cost is not None and report.rows and plan.decodes == plan.rows.size:
        controller.cost.observe(
            report.rows, report.forward_s, requests=plan.decodes, sampler_s=report.sampler_s
        )


def packed(wanted: Ints, budget: int) -> Ints:
    """How much each gets when all are served in order until `budget` is used up."""
    before = np.cumsum(wanted) - wanted
    taken: Ints = np.clip(budget - before, 0, wanted)
    return taken
