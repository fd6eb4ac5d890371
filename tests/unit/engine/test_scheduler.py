"""The scheduler as a policy: rows of a step, admission, preemption, cancel, ends."""

from __future__ import annotations

import pytest

from headrace.core.output import FinishReason, TokenChunk
from headrace.engine.plan import NO_TOKEN_DRAWN, StepResult
from headrace.engine.stops import Ended
from headrace.errors import ContextTooLong, InvalidRequest, Overloaded
from tests.unit.engine.scheduling import (
    STOP,
    drawn,
    make,
    names,
    planned,
    request,
    result,
    run,
    shape,
)

# --- rows of a step --------------------------------------------------------------------------


def test_a_long_prompt_is_cut_into_chunks() -> None:
    scheduler = make(rows=10)
    scheduler.enqueue(request("a", 25, 2), 0.0)
    assert run(scheduler) == ([("a", 0, 10, False)], [])
    assert run(scheduler) == ([("a", 10, 10, False)], [])
    assert run(scheduler) == ([("a", 20, 5, True)], [TokenChunk("a", 0, (7,))])
    assert run(scheduler) == (
        [("a", 25, 1, True)],
        [TokenChunk("a", 1, (7,), FinishReason.LENGTH)],
    )
    assert scheduler.plan(0.0) is None


def test_decode_rows_come_first_and_prefill_fills_the_rest() -> None:
    scheduler = make(rows=10)
    scheduler.enqueue(request("a", 3, 5), 0.0)
    run(scheduler)
    scheduler.enqueue(request("b", 4, 5), 0.0)
    scheduler.enqueue(request("c", 20, 5), 0.0)
    assert run(scheduler)[0] == [("a", 3, 1, True), ("b", 0, 4, True), ("c", 0, 5, False)]
    assert run(scheduler)[0] == [("a", 4, 1, True), ("b", 4, 1, True), ("c", 5, 8, False)]


def test_short_prompts_do_not_wait_behind_a_long_one() -> None:
    scheduler = make(rows=20)
    scheduler.enqueue(request("long", 60, 2), 0.0)
    assert run(scheduler)[0] == [("long", 0, 20, False)]
    scheduler.enqueue(request("longer", 90, 2), 0.0)
    scheduler.enqueue(request("short", 12, 2), 0.0)
    # The shortest goes first, the earliest has a quarter and what is left.
    assert run(scheduler)[0] == [("short", 0, 12, True), ("long", 20, 8, False)]
    scheduler.enqueue(request("middle", 20, 2), 0.0)
    assert run(scheduler)[0][1:] == [("middle", 0, 15, False), ("long", 28, 4, False)]
    assert planned(scheduler) == ["middle", "long"]


def test_the_earliest_prompt_gets_on_beside_any_number_of_short_ones() -> None:
    scheduler = make(rows=20, seqs=6, blocks=1000)
    scheduler.enqueue(request("long", 100, 2), 0.0)
    steps = 0
    while "long" in scheduler.request_ids and steps < 100:
        for number in range(5):
            if scheduler.stats(0.0).waiting < 20:
                scheduler.enqueue(request(f"{steps}.{number}", 15, 1), 0.0)
        assert "long" in planned(scheduler)
        steps += 1
    assert 10 < steps <= 100 // 5 + 2


def test_prompts_that_got_no_row_for_long_go_before_shorter_ones() -> None:
    scheduler = make(rows=20, seqs=8, blocks=1000, ageing=4)
    scheduler.enqueue(request("long", 900, 2), 0.0)
    run(scheduler)
    scheduler.enqueue(request("middle", 50, 2), 0.0)
    assert run(scheduler)[0] == [("middle", 0, 15, False), ("long", 20, 5, False)]
    waited = 0
    while True:
        scheduler.enqueue(request(f"short {waited}", 15, 1), 0.0)
        if "middle" in planned(scheduler):
            break
        waited += 1
    assert waited == 3  # ageing steps have passed since its last row


def test_the_budget_of_a_step_can_be_smaller() -> None:
    scheduler = make(rows=16)
    scheduler.enqueue(request("a", 30, 2), 0.0)
    plan = scheduler.plan(0.0, budget=5)
    assert shape(scheduler, plan) == [("a", 0, 5, False)]


def test_with_fewer_rows_than_requests_all_take_turns() -> None:
    scheduler = make(seqs=4, ageing=100)
    for name in "abcd":
        scheduler.enqueue(request(name, 2, 50), 0.0)
    run(scheduler)
    seen = []
    for _ in range(6):
        plan = scheduler.plan(0.0, budget=2)
        assert plan.total_rows == 2
        seen.append("".join(names(scheduler, plan)))
        scheduler.commit(plan, result(plan), 0.0)
    assert seen == ["ab", "cd", "ab", "cd", "ab", "cd"]


def test_a_prompt_among_decoders_gets_a_row_when_it_has_waited_long_enough() -> None:
    scheduler = make(seqs=4, ageing=5)
    for name in "ab":
        scheduler.enqueue(request(name, 2, 50), 0.0)
    run(scheduler)
    scheduler.enqueue(request("prompt", 6, 2), 0.0)
    plan = scheduler.plan(0.0, budget=3)
    scheduler.commit(plan, result(plan), 0.0)
    assert names(scheduler, plan) == ["a", "b", "prompt"]
    waited = 0
    while "prompt" not in names(scheduler, plan := scheduler.plan(0.0, budget=2)):
        scheduler.commit(plan, result(plan), 0.0)
        waited += 1
    assert waited == 4  # then 5 steps have passed since its last row


# --- admission -------------------------------------------------------------------------------


def test_slots_limit_running_requests() -> None:
    scheduler = make(seqs=2)
    for name in "abc":
        scheduler.enqueue(request(name, 2, 2), 0.0)
    assert planned(scheduler) == ["a", "b"]
    assert scheduler.stats(3.0).waiting == scheduler.stats(3.0).waiting_blocks == 1
    assert scheduler.stats(3.0).oldest_waiting_s == 3.0
    run(scheduler)
    assert planned(scheduler) == ["c"]


def test_lower_priority_numbers_come_first() -> None:
    scheduler = make(seqs=1)
    scheduler.enqueue(request("first", 2, 1), 0.0)
    scheduler.enqueue(request("late", 2, 1, priority=5), 0.0)
    scheduler.enqueue(request("soon", 2, 1, priority=-1), 0.0)
    assert [planned(scheduler) for _ in range(3)] == [["soon"], ["first"], ["late"]]


def test_a_head_that_is_too_large_lets_smaller_ones_pass() -> None:
    scheduler = make(blocks=6)
    scheduler.enqueue(request("a", 8, 8), 0.0)
    scheduler.enqueue(request("large", 20, 1), 0.0)
    scheduler.enqueue(request("small", 1, 1), 0.0)
    assert planned(scheduler) == ["small", "a"]
    stats = scheduler.stats(0.0)
    assert (stats.waiting, stats.waiting_blocks) == (1, 1)


def test_nobody_passes_one_that_has_aged() -> None:
    scheduler = make(blocks=6, ageing=3)
    scheduler.enqueue(request("a", 8, 8), 0.0)
    scheduler.enqueue(request("large", 20, 1), 0.0)
    for _ in range(3):
        assert "a" in planned(scheduler)
    scheduler.enqueue(request("small", 1, 1, priority=-9), 0.0)
    seen = []
    while len(scheduler):
        seen += planned(scheduler)
    assert seen == ["a"] * 5 + ["large", "large", "small"]


def test_room_is_kept_for_the_growth_of_those_that_run() -> None:
    scheduler = make(blocks=5)
    scheduler.enqueue(request("a", 4, 8), 0.0)
    run(scheduler)
    scheduler.enqueue(request("b", 16, 1), 0.0)  # four free blocks, but a needs its second now
    assert planned(scheduler) == ["a"]


def test_an_event_is_waited_for_outside_the_queue() -> None:
    scheduler = make()
    scheduler.enqueue(request("grammar", 2, 1, waits_for=("grammar", "image")), 0.0)
    scheduler.enqueue(request("plain", 2, 1), 0.0)
    assert planned(scheduler) == ["plain"]
    assert scheduler.plan(0.0) is None and len(scheduler) == 1
    assert scheduler.stats(0.0).waiting_events == 1
    scheduler.ready("grammar", "grammar", 0.0)
    scheduler.ready("unknown", "grammar", 0.0)
    assert scheduler.plan(0.0) is None
    scheduler.ready("grammar", "image", 5.0)
    assert planned(scheduler) == ["grammar"]
    assert scheduler.stats(0.0).queue_wait_s == -5.0  # it joined the queue at 5, ran at 0


def test_requests_that_cannot_be_taken() -> None:
    scheduler = make(blocks=4, waiting=2)
    with pytest.raises(ContextTooLong, match=r"17 tokens.*5 blocks.*limit is 4 blocks"):
        scheduler.enqueue(request("a", 10, 7), 0.0)
    scheduler.enqueue(request("a", 10, 6), 0.0)
    with pytest.raises(InvalidRequest, match="'a' is already in use"):
        scheduler.enqueue(request("a", 1, 1), 0.0)
    with pytest.raises(Overloaded, match="1 requests are waiting"):
        scheduler.enqueue(request("pair", 1, 1, choices=2), 0.0)
    scheduler.enqueue(request("b", 1, 1), 0.0)
    with pytest.raises(Overloaded, match="2 requests are waiting") as caught:
        scheduler.enqueue(request("c", 1, 1), 0.0)
    assert caught.value.retry_after_s > 0


def test_requests_that_come_and_go_leave_nothing_in_the_queues() -> None:
    scheduler = make()
    for number in range(2000):
        scheduler.enqueue(request(f"r{number}", 2 + number % 90, 1), 0.0)
        scheduler.cancel(f"r{number}", 0.0)
    queues = scheduler.queues
    assert sum(map(len, queues._by_need.values())) + len(queues._deadlines) < 200


# --- preemption ------------------------------------------------------------------------------


def test_the_victim_is_recomputed_with_its_output() -> None:
    scheduler = make(blocks=4)
    scheduler.enqueue(request("a", 4, 8), 0.0)
    scheduler.enqueue(request("b", 4, 8), 0.0)
    scheduler.enqueue(request("c", 4, 2), 0.0)
    seen = [run(scheduler)[0] for _ in range(5)]
    assert seen[0] == [("a", 0, 4, True), ("b", 0, 4, True)]
    assert seen[4] == [("a", 7, 1, True), ("b", 7, 1, True)]
    assert scheduler.stats(0.0).free_blocks == 0
    # a needs a third block: b gives way; c is smaller, so it may go first.
    assert run(scheduler)[0] == [("a", 8, 1, True)]
    assert scheduler.stats(0.0).preemptions == 1
    assert [run(scheduler)[0] for _ in range(2)] == [[("a", 9, 1, True)], [("a", 10, 1, True)]]
    rows, chunks = run(scheduler)
    assert rows == [("b", 0, 9, True)]
    assert chunks == [TokenChunk("b", 5, (7,))]


def test_the_victim_has_most_blocks_among_the_lowest_priority() -> None:
    scheduler = make(blocks=13, seqs=4, rows=64)
    scheduler.enqueue(request("first", 4, 20), 0.0)
    scheduler.enqueue(request("big", 15, 9), 0.0)
    scheduler.enqueue(request("small", 4, 9), 0.0)
    scheduler.enqueue(request("urgent", 19, 9, priority=-1), 0.0)
    gone = []
    for _ in range(4):
        before = set(planned(scheduler))
        plan = scheduler.plan(0.0)
        gone += sorted(before - set(names(scheduler, plan)))
        scheduler.commit(plan, result(plan), 0.0)
    assert gone == ["big"]  # not the urgent one, which holds more, nor the first


def test_the_first_one_never_gives_way() -> None:
    scheduler = make(blocks=4)
    scheduler.enqueue(request("a", 8, 8), 0.0)
    scheduler.enqueue(request("b", 3, 8), 0.0)
    while len(scheduler):
        assert "a" in planned(scheduler) or "a" not in scheduler.request_ids
    assert scheduler.stats(0.0).preemptions > 0


# --- cancel, void results, ends --------------------------------------------------------------


def test_results_of_preempted_and_cancelled_shares_are_void() -> None:
    scheduler = make()
    for name in "ab":
        scheduler.enqueue(request(name, 2, 4), 0.0)
    plan = scheduler.plan(0.0)
    assert list(scheduler.cancel("a", 0.0)) == [TokenChunk("a", 0, (), FinishReason.ABORT)]
    scheduler.enqueue(request("a", 3, 4), 0.0)  # the id again, but another request
    assert list(scheduler.commit(plan, drawn(plan, 5, 6), 0.0)) == [TokenChunk("b", 0, (6,))]
    assert scheduler.cancel("unknown", 0.0) is None
    assert run(scheduler)[0] == [("b", 2, 1, True), ("a", 0, 3, True)]


def test_a_row_that_has_a_new_owner_ignores_the_old_result() -> None:
    scheduler = make(seqs=1)
    scheduler.enqueue(request("old", 2, 4), 0.0)
    plan = scheduler.plan(0.0)
    scheduler.cancel("old", 0.0)
    scheduler.enqueue(request("new", 2, 4), 0.0)
    second = scheduler.plan(0.0)
    assert second.rows.tolist() == plan.rows.tolist()
    assert len(scheduler.commit(plan, drawn(plan, 5), 0.0)) == 0
    assert list(scheduler.commit(second, drawn(second, 6), 0.0)) == [TokenChunk("new", 0, (6,))]


def test_a_plan_that_was_made_twice_counts_once() -> None:
    scheduler = make()
    scheduler.enqueue(request("a", 2, 4), 0.0)
    run(scheduler)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert [len(scheduler.commit(p, drawn(p, 5), 0.0)) for p in (first, second)] == [1, 0]
    assert run(scheduler)[1] == [TokenChunk("a", 2, (7,))]


def test_preempted_twice_with_a_step_in_flight_keeps_the_stream() -> None:
    scheduler = make(blocks=6, seqs=3)
    scheduler.enqueue(request("a", 4, 12), 0.0)
    scheduler.enqueue(request("b", 4, 12), 0.0)
    received: dict[str, list[int]] = {"a": [], "b": []}
    preempted = 0
    while len(scheduler):
        plan = scheduler.plan(0.0)
        tokens = plan.q_start + plan.q_len  # the token of a position
        result = StepResult(tokens[plan.samples])
        if "b" in names(scheduler, plan) and preempted < 2 and len(received["b"]) > 1:
            preempted += 1
            scheduler.preempt("b", 0.0)
        for chunk in scheduler.commit(plan, result, 0.0):
            assert chunk.index == len(received[chunk.request_id])
            received[chunk.request_id] += chunk.tokens
    assert scheduler.stats(0.0).preemptions >= 2
    assert received == {"a": list(range(4, 16)), "b": list(range(4, 16))}


def test_cancel_frees_at_once() -> None:
    scheduler = make(blocks=8)
    scheduler.enqueue(request("a", 9, 4), 0.0)
    run(scheduler)
    assert scheduler.stats(0.0).free_blocks == 5
    assert list(scheduler.cancel("a", 0.0)) == [TokenChunk("a", 1, (), FinishReason.ABORT)]
    stats = scheduler.stats(0.0)
    assert (stats.free_blocks, stats.running, stats.aborted, stats.finished) == (8, 0, 1, 1)


def test_stop_token_and_broken_row_end_only_their_request() -> None:
    scheduler = make()
    for name in "abc":
        scheduler.enqueue(request(name, 2, 4), 0.0)
    for output_length in range(2):  # once while prompts are computed, once while decoding
        plan = scheduler.plan(0.0)
        tokens = [STOP, NO_TOKEN_DRAWN, 5] if output_length else [5, 5, 5]
        chunks = list(scheduler.commit(plan, drawn(plan, *tokens), 0.0))
    first, second, third = chunks
    assert first == TokenChunk("a", 1, (STOP,), FinishReason.STOP)
    assert (second.request_id, second.tokens, second.finish) == ("b", (), FinishReason.ERROR)
    assert "position 2" in second.error and second.error_code == "internal_error"
    assert third == TokenChunk("c", 1, (5,))
    assert scheduler.stats(0.0).failed == 1


def test_stop_tokens_count_from_min_tokens_on() -> None:
    scheduler = make()
    scheduler.enqueue(request("a", 2, 9, min_tokens=3), 0.0)
    chunks = [chunk for _ in range(3) for chunk in run(scheduler, STOP)[1]]
    assert [chunk.finish for chunk in chunks] == [None, None, FinishReason.STOP]


def test_many_stop_tokens_beside_few() -> None:
    scheduler = make()
    few = request("few", 2, 9)
    many = request("many", 2, 9)
    object.__setattr__(many, "stop_ids", tuple(range(100, 164)))
    scheduler.enqueue(few, 0.0)
    scheduler.enqueue(many, 0.0)
    run(scheduler)
    plan = scheduler.plan(0.0)
    few_end, many_end = scheduler.commit(plan, drawn(plan, 163, 163), 0.0)
    assert (few_end.finish, many_end.finish) == (None, FinishReason.STOP)


def test_what_the_sampler_ends_ends_here_too() -> None:
    scheduler = make()
    for name in "ab":
        scheduler.enqueue(request(name, 2, 9), 0.0)
    run(scheduler)
    plan = scheduler.plan(0.0)
    step = drawn(plan, 5, 6)
    step.ended = {1: Ended("stop string", 4)}
    first, second = scheduler.commit(plan, step, 0.0)
    assert first == TokenChunk("a", 1, (5,))
    assert second == TokenChunk("b", 1, (6,), FinishReason.STOP, stop="stop string", stop_cut=4)


def test_void_shares_take_their_part_of_the_result_with_them() -> None:
    scheduler = make()
    for name in "abc":
        scheduler.enqueue(request(name, 2, 9), 0.0)
    plan = scheduler.plan(0.0)
    scheduler.cancel("a", 0.0)
    step = drawn(plan, 5, 6, 7)
    step.ended = {0: Ended("x", 1), 2: Ended("y", 2)}
    step.prompt_logprobs = {0: (None,), 1: (None, None)}
    second, third = scheduler.commit(plan, step, 0.0)
    assert second == TokenChunk("b", 0, (6,), prompt_logprobs=(None, None))
    assert third == TokenChunk("c", 0, (7,), FinishReason.STOP, stop="y", stop_cut=2)


def test_waiting_times_are_counted() -> None:
    scheduler = make(seqs=1)
    scheduler.enqueue(request("a", 2, 1), 1.0)
    scheduler.enqueue(request("b", 2, 2), 2.0)
    for now in (4.0, 5.0, 6.0):
        plan = scheduler.plan(now)
        scheduler.commit(plan, result(plan), now + 0.5)
    stats = scheduler.stats(7.0)
    assert (stats.admissions, stats.queue_wait_s) == (2, 3.0 + 3.0)
    assert (stats.first_tokens, stats.first_token_s) == (2, 3.5 + 3.5)
    assert (stats.prefills, stats.prefill_s) == (2, 0.5 + 0.5)
    assert (stats.decodes, stats.decode_s) == (2, 0.0 + 1.0)
    assert (stats.steps, stats.computed_tokens, stats.drawn_tokens) == (3, 5, 3)
