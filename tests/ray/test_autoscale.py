"""How many workers there should be: specpipe.cluster.autoscale."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpipe.cluster.autoscale import (
    AutoscaleConfig,
    Decision,
    DraftBounds,
    Load,
    Memory,
    TargetBounds,
    decide_drafts,
    decide_targets,
    wish_for_drafts,
    wish_for_targets,
)

DRAFTS = DraftBounds(min=1, max=6)
TARGETS = TargetBounds(min=1, max=6)
PACE = AutoscaleConfig(every_s=5, up_after_s=10, down_after_s=60, settle_s=30)
STARVED = Load(exposed_share=0.6, hit_rate=0.4, draft_busy_share=0.95)
IDLE = Load()

shares = st.one_of(st.none(), st.floats(0, 1))
known_loads = st.builds(
    Load,
    exposed_share=shares,
    hit_rate=shares,
    draft_busy_share=shares,
    num_undrafted=st.integers(0, 3),
    queue_s=st.one_of(st.none(), st.floats(0, 20)),
    num_queued=st.integers(0, 3),
    tokens_per_s=st.floats(0, 5000),
)
loads = st.one_of(st.none(), known_loads)


@pytest.mark.parametrize(
    ("load", "count", "step"),
    [
        (STARVED, 2, 1),
        (Load(exposed_share=0.6, hit_rate=0.9, draft_busy_share=0.95), 2, 1),  # it waits for them
        (Load(exposed_share=0.0, hit_rate=0.4, draft_busy_share=0.95), 2, 1),  # it goes on without them
        (Load(exposed_share=0.6, hit_rate=0.4, draft_busy_share=0.2), 2, 0),  # they guess badly: no matter of number
        (Load(num_undrafted=1), 2, 1),
        (Load(exposed_share=0.05, hit_rate=0.9, draft_busy_share=0.5), 2, 0),
        (Load(exposed_share=0.05, hit_rate=0.9, draft_busy_share=0.1), 2, -1),
        (IDLE, 2, -1),
        (IDLE, 1, 0),
        (IDLE, 0, 0),
        (Load(exposed_share=0.6, hit_rate=0.4, draft_busy_share=None), 2, 0),  # busy or not: who knows?
        (Load(draft_busy_share=None), 2, 0),
        (Load(draft_busy_share=None, num_undrafted=1), 2, 1),  # as a coordinator says
    ],
)
def test_draft_workers_follow_exposed_time_hit_rate_and_how_busy_they_are(load: Load, count: int, step: int) -> None:
    wish = wish_for_drafts(DRAFTS, load, count)
    assert wish.step == step
    assert bool(wish.reason) == bool(step), "a change is explained"


@pytest.mark.parametrize(
    ("load", "count", "step"),
    [
        (Load(queue_s=2.0, num_queued=5, tokens_per_s=100), 2, 1),
        (Load(queue_s=None, num_queued=5), 2, 1),  # none has had its turn
        (Load(queue_s=0.1, num_queued=5, tokens_per_s=100), 2, 0),
        (Load(queue_s=0.01, tokens_per_s=60), 2, -1),  # one alone has been seen to commit 100 a second
        (Load(queue_s=0.01, tokens_per_s=90), 2, 0),
        (IDLE, 2, -1),
        (IDLE, 1, 0),
    ],
)
def test_target_workers_follow_queue_time_and_tokens_a_second(load: Load, count: int, step: int) -> None:
    wish = wish_for_targets(TARGETS, load, 100.0, count)
    assert wish.step == step
    assert bool(wish.reason) == bool(step)


def run_drafts(seen: Sequence[Load | None], count: int = 2, pace: AutoscaleConfig = PACE) -> list[Decision]:
    """One decision each `every_s`; what is decided is done at once."""
    decisions: list[Decision] = []
    memory = Memory()
    for number, load in enumerate(seen):
        decision = decide_drafts(DRAFTS, pace, memory, load, count=count, now_s=1000.0 + number * pace.every_s)
        decisions.append(decision)
        memory, count = decision.memory, decision.count
    return decisions


def test_a_wish_for_more_must_last() -> None:
    counts = [decision.count for decision in run_drafts([STARVED] * 3)]
    assert counts == [2, 2, 3]
    interrupted = [STARVED, STARVED, Load(exposed_share=0.0, hit_rate=0.9, draft_busy_share=0.9), STARVED, STARVED]
    assert [decision.count for decision in run_drafts(interrupted)] == [2] * 5


def test_a_change_settles_before_the_next_one() -> None:
    counts = [decision.count for decision in run_drafts([STARVED] * 12)]
    assert counts == [2, 2, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4]


def test_fewer_are_wanted_for_longer_than_more() -> None:
    counts = [decision.count for decision in run_drafts([IDLE] * 14)]
    assert counts[:12] == [2] * 12
    assert counts[12:] == [1, 1]


def test_a_load_that_is_not_known_is_not_taken_for_idleness() -> None:
    unknown = Load(exposed_share=0.1, hit_rate=0.9, draft_busy_share=None)
    for unknown_load in (None, unknown):
        assert [decision.count for decision in run_drafts([unknown_load] * 40)] == [2] * 40
    memory = Memory(fewer_since_s=0.0, best_tokens_per_s=70.0)
    decision = decide_targets(TARGETS, PACE, memory, None, count=2, now_s=1000.0)
    assert decision == Decision(count=2, memory=Memory(best_tokens_per_s=70.0)), "what was learnt is kept"


def test_a_wish_begins_anew_after_a_load_that_was_not_known() -> None:
    assert [decision.count for decision in run_drafts([STARVED, STARVED, None, STARVED, STARVED])] == [2] * 5
    counts = [decision.count for decision in run_drafts([*[IDLE] * 12, None, *[IDLE] * 13])]
    assert counts == [2] * 25 + [1]


def test_a_number_out_of_bounds_is_mended_at_once() -> None:
    unknown = decide_targets(TARGETS, PACE, Memory(), None, count=0, now_s=0.0)
    assert (unknown.count, unknown.reason) == (1, "the bounds say so")
    decision = decide_drafts(DRAFTS, PACE, Memory(), IDLE, count=9, now_s=0.0)
    assert (decision.count, decision.reason) == (6, "the bounds say so")


def test_what_a_target_worker_can_do_is_learnt_while_requests_wait() -> None:
    busy = Load(queue_s=0.1, num_queued=4, tokens_per_s=300)
    memory = decide_targets(TARGETS, PACE, Memory(), busy, count=2, now_s=0.0).memory
    assert memory.best_tokens_per_s == 150
    calm = Load(queue_s=0.0, tokens_per_s=300)
    assert decide_targets(TARGETS, PACE, memory, calm, count=3, now_s=5.0).memory.best_tokens_per_s == 150


@given(seen=st.lists(loads, max_size=60), count=st.integers(0, 9))
def test_numbers_stay_within_bounds_and_change_by_one_once_a_while(seen: list[Load | None], count: int) -> None:
    drafts_memory = targets_memory = Memory()
    drafts = targets = count
    changed_s: dict[str, float] = {}
    for number, load in enumerate(seen):
        now_s = number * PACE.every_s
        by_drafts = decide_drafts(DRAFTS, PACE, drafts_memory, load, count=drafts, now_s=now_s)
        by_targets = decide_targets(TARGETS, PACE, targets_memory, load, count=targets, now_s=now_s)
        for kind, before, decision in (("draft", drafts, by_drafts), ("target", targets, by_targets)):
            assert 1 <= decision.count <= 6
            if decision.count == before:
                continue
            assert decision.reason
            if 1 <= before <= 6:
                assert abs(decision.count - before) == 1
                assert now_s - changed_s.get(kind, -1e9) >= PACE.settle_s
            changed_s[kind] = now_s
        drafts_memory, drafts = by_drafts.memory, by_drafts.count
        targets_memory, targets = by_targets.memory, by_targets.count


@given(work=st.floats(0, 8), count=st.integers(1, 6), seconds=st.integers(100, 200))
def test_steady_work_is_answered_by_a_number_that_stays(work: float, count: int, seconds: int) -> None:
    """`work`: of how many draft workers. They share it evenly, and the target waits where they are too few."""
    memory, counts = Memory(), []
    for number in range(seconds):
        busy = min(1.0, work / count)
        is_short = work > count
        load = Load(exposed_share=0.6 if is_short else 0.1, hit_rate=0.4 if is_short else 0.9, draft_busy_share=busy)
        decision = decide_drafts(DRAFTS, PACE, memory, load, count=count, now_s=number * PACE.every_s)
        memory, count = decision.memory, decision.count
        counts.append(count)
    steps = [after - before for before, after in itertools.pairwise(counts) if after != before]
    assert len(set(steps)) <= 1, f"it went up and down: {counts}"
    assert count == 6 or work <= count


@given(work=st.floats(0, 1000), seconds=st.integers(150, 250))
def test_target_workers_that_came_for_a_queue_do_not_flap(work: float, seconds: int) -> None:
    """`work`: tokens a second that are asked for; a worker commits 100 of them."""
    memory, count, counts = Memory(), 1, []
    for number in range(seconds):
        is_short = work > 100 * count
        load = Load(
            queue_s=5.0 if is_short else 0.0, num_queued=9 if is_short else 0, tokens_per_s=min(work, 100.0 * count)
        )
        decision = decide_targets(TARGETS, PACE, memory, load, count=count, now_s=number * PACE.every_s)
        memory, count = decision.memory, decision.count
        counts.append(count)
    assert counts == sorted(counts)
