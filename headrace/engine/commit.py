"""What a step brought: tokens into the table, requests that end, choices that start.

Contract: `commit_shares` takes the result of any plan, shares that are void by now included;
`finish` is the end of every commit. A request may get several tokens at once (accepted drafts):
the first of them that ends its answer is the last one that counts. Called by
`engine/scheduler.py`, over the table and queues of `engine/admission.py`. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.engine.admission import Admission
from headrace.engine.outputs import ERROR, LENGTH, RUNNING, STOP, Codes, StepOutput
from headrace.engine.plan import Flags, Ints, StepPlan, StepResult, selected
from headrace.engine.stops import Ended
from headrace.engine.tables import PREFILL, RequestTable
from headrace.errors import is_refusal

_NEVER = 2**62  # place of the end in a run that goes on


def valid_shares(table: RequestTable, plan: StepPlan) -> Flags:
    """Which shares of a plan still count, bool [B].

    The row must have its epoch (else it was cancelled or preempted), and the share must start
    where the row is now (else another plan was committed instead). Where it starts is not known of
    shares that were planned while the one before was in flight: those are committed in order.
    """
    valid: Flags = table.computed[plan.rows] == plan.q_start
    if plan.carried is not None:
        valid |= plan.carried
    valid &= table.epoch[plan.rows] == plan.epochs
    return valid


def commit_shares(
    desk: Admission, plan: StepPlan, result: StepResult, valid: Flags, now: float
) -> StepOutput:
    """Take the tokens of the shares that are `valid` (bool [B])."""
    table = desk.table
    sampled = plan.rows[plan.samples]
    if result.forced is not None:
        counted = valid[plan.samples]
        table.forced[sampled[counted]] = result.forced[counted]
    counts = np.ones(sampled.size, dtype=np.int64) if result.counts is None else result.counts
    owner = np.arange(sampled.size).repeat(counts)
    place = np.arange(owner.size) - (counts.cumsum() - counts)[owner]
    position = table.length[sampled][owner] + place
    codes = end_codes(table, sampled[owner], position, result.tokens, result.ended)
    last = np.full(sampled.size, _NEVER)
    ending = codes != RUNNING
    np.minimum.at(last, owner[ending], place[ending])
    kept = np.flatnonzero(valid[plan.samples][owner] & (place <= last[owner]))
    if result.drafts is not None:
        in_answer = np.bincount(owner[kept], minlength=sampled.size)
        verified = np.where(valid[plan.samples], result.drafts.verified, 0)
        table.verified_drafts[sampled] += verified
        # What follows an end in its run was accepted, but is in no answer.
        table.accepted_drafts[sampled] += np.clip(
            in_answer - result.drafts.forced, 0, result.drafts.accepted
        )
    if kept.size < owner.size:
        result = selected(result, kept)
        owner, position, codes = owner[kept], position[kept], codes[kept]
    _advance(desk, plan, valid, sampled[owner], position, result)
    rows = sampled[owner]
    output = StepOutput(
        table.number[rows],
        list(map(table.names.__getitem__, rows.tolist())),
        position - table.prompt_length[rows],
        result.tokens.astype(np.int32, copy=False),
        np.zeros(rows.size, dtype=np.int8),
        None,
        result.ended,
        result.logprobs,
        result.prompt_logprobs,
    )
    output.put_errors(result.errors or {})
    finish(desk, output, rows, position, codes, now)
    return output


def _advance(
    desk: Admission,
    plan: StepPlan,
    valid: Flags,
    rows: Ints,
    position: Ints,
    result: StepResult,
) -> None:
    """Move the rows on; rows, position: int64 [T], of the tokens that are kept."""
    table = desk.table
    tokens = result.tokens.astype(np.int32, copy=False)
    table.tokens[rows, position] = tokens
    np.add.at(table.length, rows, tokens >= 0)
    shares, draws = plan.rows[valid], plan.samples[valid]
    chunks, drawing = shares[~draws], shares[draws]
    table.computed[chunks] = (plan.q_start + plan.q_len)[valid][~draws]
    # The newest token is computed by the next share, all before it have been.
    table.computed[drawing] = table.length[drawing] - 1
    table.planned[shares] = table.computed[shares]
    prefills = shares[table.state[shares] == PREFILL]
    for row in prefills.tolist():
        desk.bind(row)
    desk.count_step(int(plan.q_len[valid].sum()), rows.size)
    desk.start_decoding(drawing[table.state[drawing] == PREFILL])


def finish(
    desk: Admission, output: StepOutput, rows: Ints, position: Ints, codes: Codes, now: float
) -> None:
    """First tokens, forks and ends of a step; sets what its output says of them.

    rows, position, codes: [n], of the entries of the output.
    """
    firsts = np.flatnonzero(output.index == 0)
    desk.note_first_tokens(rows[firsts], now)
    hits = zip(firsts.tolist(), map(desk.table.sequence, rows[firsts].tolist()), strict=True)
    output.cached = {i: one.resumed_at for i, one in hits if one.resumed_at > 0} or None
    ending = np.flatnonzero(codes)
    for row in rows[(output.index == 0) & (output.tokens >= 0)].tolist():
        desk.fork_siblings(row, now)
    if ending.size == 0:
        return
    output.finish = codes
    output.drafts = _drafts_of(desk.table, rows, ending)
    for entry in ending.tolist():
        code = int(codes[entry])
        if code == ERROR and entry not in (output.errors or {}):
            text = f"The logits at position {position[entry] - 1} are not finite."
            output.errors = {**(output.errors or {}), entry: text}
        refused = code == ERROR and is_refusal((output.error_codes or {}).get(entry, ""))
        desk.end(desk.table.sequence(int(rows[entry])), code, now, refused=refused)


def _drafts_of(table: RequestTable, rows: Ints, ending: Ints) -> dict[int, tuple[int, int]] | None:
    """Accepted and rejected drafts of the entries that end, [n]; None: nobody had any."""
    verified = table.verified_drafts[rows[ending]]
    accepted = table.accepted_drafts[rows[ending]]
    pairs = zip(accepted.tolist(), (verified - accepted).tolist(), strict=True)
    found = zip(ending.tolist(), pairs, strict=True)
    return {entry: pair for entry, pair in found if any(pair)} or None


def end_codes(
    table: RequestTable, rows: Ints, position: Ints, tokens: Any, ended: Mapping[int, Ended] | None
) -> Codes:
    """Why an answer ends with each of these tokens [n], or RUNNING; a stop wins over the length."""
    length = position + 1
    codes = np.where(length >= table.limit[rows], LENGTH, RUNNING).astype(np.int8)
    stops = (tokens == table.stops[1:, rows]).any(axis=0) & (tokens >= 0)
    codes[stops & (length >= table.stop_from[rows])] = STOP
    if ended:
        codes[list(ended)] = STOP
    codes[tokens < 0] = ERROR
    return codes
