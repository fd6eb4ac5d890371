"""The scheduler as a policy: several choices, prefix hits, truncation, votes, snapshots."""

from __future__ import annotations

import numpy as np

from headrace.core.output import FinishReason, TokenChunk
from headrace.engine.plan import NO_TOKEN_DRAWN, Vote
from headrace.kv.resume import ResumeRules
from tests.unit.engine.scheduling import (
    BLOCK,
    EXACT,
    drawn,
    make,
    request,
    result,
    run,
    shape,
)

# --- several choices -------------------------------------------------------------------------


def test_choices_fork_from_the_computed_prompt() -> None:
    scheduler = make(rows=8)
    scheduler.enqueue(request("a", 10, 3, choices=3), 0.0)
    assert scheduler.stats(0.0).waiting_siblings == 2
    assert run(scheduler) == ([("a", 0, 8, False)], [])
    assert run(scheduler) == ([("a", 8, 2, True)], [TokenChunk("a", 0, (7,))])
    plan = scheduler.plan(0.0)
    # The last prompt token is computed again by each of them: its logits are theirs.
    assert shape(scheduler, plan) == [
        ("a", 10, 1, True),
        ("a/1", 9, 1, True),
        ("a/2", 9, 1, True),
    ]
    tables = scheduler.kv.block_tables
    parent, first, second = plan.rows.tolist()
    assert tables[first, :2].tolist() == tables[parent, :2].tolist()
    assert plan.slot_copies.tolist() == [[parent, first], [parent, second]]
    assert plan.block_copies.tolist() == [
        [tables[parent, 2], tables[first, 2]],
        [tables[parent, 2], tables[second, 2]],
    ]
    chunks = list(scheduler.commit(plan, drawn(plan, 5, 6, 8), 0.0))
    assert [(c.choice, c.index, c.tokens) for c in chunks] == [
        (0, 1, (5,)),
        (1, 0, (6,)),
        (2, 0, (8,)),
    ]
    plan = scheduler.plan(0.0)
    assert plan.slot_copies.size == plan.block_copies.size == 0
    ends = list(scheduler.commit(plan, result(plan), 0.0))
    assert [c.finish for c in ends] == [FinishReason.LENGTH, None, None]
    assert len(scheduler) == 1
    run(scheduler)
    assert len(scheduler) == 0
    assert scheduler.stats(0.0).free_blocks == 100


def test_copies_are_due_until_a_step_was_carried_out() -> None:
    scheduler = make()
    scheduler.enqueue(request("a", 6, 3, choices=2), 0.0)
    run(scheduler)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)  # the first one raised
    assert first.slot_copies.tolist() == second.slot_copies.tolist() != []
    scheduler.commit(second, result(second), 0.0)
    assert scheduler.plan(0.0).slot_copies.size == 0


def test_a_choice_that_ends_at_its_first_token_still_forks() -> None:
    scheduler = make()
    scheduler.enqueue(request("a", 6, 1, choices=3), 0.0)
    assert run(scheduler)[1] == [TokenChunk("a", 0, (7,), FinishReason.LENGTH)]
    shares, chunks = run(scheduler)
    assert shares == [("a/1", 5, 1, True), ("a/2", 5, 1, True)]
    assert [chunk.choice for chunk in chunks] == [1, 2]
    assert len(scheduler) == 0


def test_choices_without_a_slot_queue_up() -> None:
    scheduler = make(seqs=2, resume=EXACT)
    scheduler.enqueue(request("a", 9, 2, choices=4), 0.0)
    seen = [run(scheduler)[0] for _ in range(2)]
    assert seen[1] == [("a", 9, 1, True), ("a/1", 8, 1, True)]
    # a's slot is free: a/2 finds the prompt's full blocks in the cache.
    assert run(scheduler)[0] == [("a/1", 9, 1, True), ("a/2", 8, 1, True)]
    while len(scheduler):
        run(scheduler)
    assert scheduler.stats(0.0).free_blocks == 100


def test_a_cancelled_choice_takes_its_copies_along() -> None:
    scheduler = make()
    scheduler.enqueue(request("a", 6, 3, choices=2), 0.0)
    scheduler.enqueue(request("b", 6, 3), 0.0)
    run(scheduler)
    ends = list(scheduler.cancel("a", 0.0))
    assert [(c.choice, c.index, c.finish) for c in ends] == [
        (0, 1, FinishReason.ABORT),
        (1, 0, FinishReason.ABORT),
    ]
    plan = scheduler.plan(0.0)
    assert plan.slot_copies.size == plan.block_copies.size == 0


def test_a_prompt_of_one_token_and_one_on_the_border_fork() -> None:
    for length in (1, BLOCK, BLOCK + 1):
        scheduler = make()
        scheduler.enqueue(request("a", length, 3, choices=2), 0.0)
        run(scheduler)
        plan = scheduler.plan(0.0)
        assert shape(scheduler, plan)[1] == ("a/1", length - 1, 1, True)
        scheduler.commit(plan, result(plan), 0.0)
        while len(scheduler):
            run(scheduler)
        assert scheduler.stats(0.0).free_blocks == 100


# --- prefix cache and truncation -------------------------------------------------------------


def test_a_prompt_finds_its_blocks_again() -> None:
    scheduler = make(resume=EXACT, rows=64)
    scheduler.enqueue(request("a", 18, 1), 0.0)
    run(scheduler)
    scheduler.enqueue(request("b", [*range(17), 50], 1), 0.0)
    assert run(scheduler)[0] == [("b", 16, 2, True)]
    stats = scheduler.stats(0.0)
    assert (stats.prefix_hit_tokens, stats.prefix_miss_tokens) == (16, 18 + 2)


def test_rows_before_a_hit_are_replayed_and_write_nothing() -> None:
    rules = ResumeRules("bounded", keep=1, replay_rows=3, windows_suffice=False, block_tokens=BLOCK)
    scheduler = make(resume=rules, rows=64)
    scheduler.enqueue(request("a", 18, 1), 0.0)
    run(scheduler)
    scheduler.enqueue(request("b", 18, 2), 0.0)
    plan = scheduler.plan(0.0)
    assert shape(scheduler, plan) == [("b", 13, 5, True)]
    assert (plan.window_floor.tolist(), plan.write_from.tolist()) == ([13], [16])
    scheduler.commit(plan, result(plan), 0.0)
    plan = scheduler.plan(0.0)  # the floor stays with the request
    assert (plan.window_floor.tolist(), plan.write_from.tolist()) == ([13], [16])
    assert scheduler.stats(0.0).replayed_rows == 3


def test_output_blocks_are_found_by_the_next_turn() -> None:
    scheduler = make(resume=EXACT, rows=64)
    scheduler.enqueue(request("a", 6, 7), 0.0)
    while len(scheduler):
        run(scheduler)
    scheduler.enqueue(request("b", [*range(6), *[7] * 7, 3, 3], 1), 0.0)
    assert run(scheduler)[0] == [("b", 12, 3, True)]


def test_a_broken_request_leaves_nothing_to_find() -> None:
    scheduler = make(resume=EXACT, rows=64)
    scheduler.enqueue(request("a", 18, 1), 0.0)
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, drawn(plan, NO_TOKEN_DRAWN), 0.0)
    scheduler.enqueue(request("b", 18, 1), 0.0)
    assert run(scheduler)[0] == [("b", 0, 18, True)]


def test_a_preempted_request_resumes_where_it_did_when_replay_approximates() -> None:
    rules = ResumeRules("bounded", keep=1, replay_rows=3, windows_suffice=False, block_tokens=BLOCK)
    for resume, start in ((rules, 0), (EXACT, 16)):
        scheduler = make(resume=resume, rows=64)
        scheduler.enqueue(request("a", 18, 9), 0.0)
        run(scheduler)
        scheduler.preempt("a", 0.0)
        assert run(scheduler)[0] == [("a", start, 19 - start, True)]
    scheduler = make(resume=rules, rows=64)
    scheduler.enqueue(request("first", 10, 1), 0.0)
    run(scheduler)
    scheduler.enqueue(request("a", 18, 9), 0.0)
    assert run(scheduler)[0] == [("a", 5, 13, True)]
    scheduler.preempt("a", 0.0)
    assert run(scheduler)[0] == [("a", 5, 14, True)]


def test_truncation_counts_from_the_end_of_the_prompt() -> None:
    scheduler = make(rows=64, keep=6)
    scheduler.enqueue(request("a", 18, 9), 0.0)
    scheduler.enqueue(request("short", 4, 9), 0.0)
    plan = scheduler.plan(0.0)
    assert plan.keep_from.tolist() == [0, 12] or plan.keep_from.tolist() == [12, 0]
    scheduler.commit(plan, result(plan), 0.0)
    scheduler.preempt("a", 0.0)
    plan = scheduler.plan(0.0)
    assert sorted(plan.keep_from.tolist()) == [0, 12]  # not 13: it must see what it saw


def test_prompt_logprobs_need_all_rows_once() -> None:
    scheduler = make(resume=EXACT, rows=8, keep=6)
    scheduler.enqueue(request("warm", 10, 1), 0.0)
    while len(scheduler):
        run(scheduler)
    scheduler.enqueue(request("a", 10, 9, all_logits=True), 0.0)
    plan = scheduler.plan(0.0)
    assert shape(scheduler, plan) == [("a", 0, 8, False)]
    assert plan.all_logits.tolist() == [True] and plan.keep_from.tolist() == [0]
    scheduler.commit(plan, result(plan), 0.0)
    run(scheduler)
    assert scheduler.plan(0.0).all_logits is None
    scheduler.preempt("a", 0.0)
    plan = scheduler.plan(0.0)
    assert shape(scheduler, plan) == [("a", 0, 8, False)] and plan.all_logits is None


# --- votes and state as a value --------------------------------------------------------------


def test_a_rank_without_work_takes_part_when_another_has_some() -> None:
    idle, busy = make(), make()
    busy.enqueue(request("a", 2, 2), 0.0)
    votes = [idle.vote(), busy.vote()]
    assert votes[0] == Vote(0, False, 0) and votes[1].wants_prefill and votes[1].rows == 1
    assert idle.plan(0.0) is None
    plan = idle.plan(0.0, votes=votes)
    assert plan.total_rows == 0 and len(idle.commit(plan, drawn(plan), 0.0)) == 0
    assert busy.plan(0.0, votes=votes).total_rows == 2
    assert idle.plan(0.0, votes=[idle.vote()]) is None


def test_a_snapshot_gives_the_same_again() -> None:
    scheduler = make(blocks=8, seqs=3, resume=EXACT)
    for name in "abcd":
        scheduler.enqueue(request(name, 5, 9), 0.0)
    run(scheduler)
    snapshot = scheduler.snapshot()
    old_plan = scheduler.plan(0.0)

    def rest() -> list[object]:
        steps = []
        while len(scheduler):
            steps.append(run(scheduler))
        return [*steps, scheduler.stats(0.0)]

    first = rest()
    scheduler.restore(snapshot)
    assert len(scheduler.commit(old_plan, result(old_plan), 0.0)) == 0
    assert rest() == first


def test_plans_own_their_arrays() -> None:
    scheduler = make()
    for name in "ab":
        scheduler.enqueue(request(name, 2, 9), 0.0)
    run(scheduler)
    plan = scheduler.plan(0.0)
    output = scheduler.commit(plan, drawn(plan, 5, 6), 0.0)
    kept = (plan.q_start.tolist(), list(output))
    for _ in range(3):
        run(scheduler, 8)
    assert (plan.q_start.tolist(), list(output)) == kept
    assert np.array_equal(plan.rows, plan.sampling_rows)
