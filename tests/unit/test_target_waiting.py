"""Whether a wait for an extension is worth it."""

from __future__ import annotations

import math

import pytest

from specpipe.tree import GraftOutcome
from specpipe.types import Extension, Mode
from target_worker.waiting import MAX_SYNC_WAIT_MS, SYNC_WAIT_MS, DraftWatch, ExtensionTimes, Pace


def extension(*, is_exhausted: bool = False, draft_step_ms: float = 5.0) -> Extension:
    return Extension(
        session=1, base=3, parents=(), tokens=(), confidences=(), is_exhausted=is_exhausted, draft_step_ms=draft_step_ms
    )


def test_the_first_waits_are_as_long_as_they_are_worth() -> None:
    assert ExtensionTimes().limit_ms(5.0) == 5.0
    assert ExtensionTimes().limit_ms(0.0) == 0.0
    assert ExtensionTimes().limit_ms(-1.0) == 0.0


def test_a_wait_is_little_longer_than_those_that_were_answered() -> None:
    times = ExtensionTimes()
    for wait_ms in (2.0, 2.2, 1.9, 2.1):
        times.observe(wait_ms)
    assert times.limit_ms(8.0) == pytest.approx(1.25 * 2.2)


def test_waits_that_cost_more_than_they_are_worth_are_not_begun() -> None:
    times = ExtensionTimes()
    for wait_ms in (6.0, 7.0, 6.5):
        times.observe(wait_ms)
    assert times.limit_ms(5.0) == 0.0


def test_after_waits_in_vain_one_in_many_still_tries() -> None:
    times = ExtensionTimes()
    for _ in range(16):
        times.observe(math.inf)
    limits = [times.limit_ms(5.0) for _ in range(64)]
    assert 1 <= sum(limit > 0 for limit in limits) <= 6


def test_one_answer_among_many_waits_in_vain_does_not_pay() -> None:
    times = ExtensionTimes()
    for _ in range(15):
        times.observe(math.inf)
    times.observe(3.0)
    assert times.limit_ms(5.0) == 0.0


def test_a_draft_that_gives_nothing_is_worth_no_wait() -> None:
    pace = Pace()
    for _ in range(50):
        pace.observe(1, 10.0)
        pace.observe_guesses(1, 0)
    assert pace.worth_ms(10.0) == pytest.approx(0.0, abs=1e-9)


def test_the_better_the_draft_the_longer_a_wait_may_be() -> None:
    slow, fast = Pace(), Pace()
    for _ in range(50):
        slow.observe(2, 12.0)
        fast.observe(4, 12.0)
        for pace in (slow, fast):
            pace.observe_guesses(4, 3)
    assert 0 < slow.worth_ms(10.0) < fast.worth_ms(10.0) <= 10.0


def test_sync_waits_a_second_or_twenty_draft_steps() -> None:
    watch = DraftWatch(Mode.SYNC)
    assert watch.may_wait()
    assert watch.sync_limit_ms() == SYNC_WAIT_MS
    watch.on_extension(extension(draft_step_ms=200.0), GraftOutcome.GRAFTED)
    assert watch.sync_limit_ms() == 4000.0
    watch.on_extension(extension(draft_step_ms=1e9), GraftOutcome.GRAFTED)
    assert watch.sync_limit_ms() == MAX_SYNC_WAIT_MS


def test_sync_does_not_wait_again_until_the_draft_speaks() -> None:
    watch = DraftWatch(Mode.SYNC)
    watch.begin(10.0, 1000.0)
    assert watch.wait_until == 11.0
    watch.end(has_come=False)
    watch.on_commit()
    assert not watch.may_wait()
    watch.on_extension(extension(), GraftOutcome.STALE)
    assert watch.may_wait()


def test_a_miss_lasts_until_a_draft_comes_or_the_next_miss() -> None:
    watch = DraftWatch(Mode.PIPELINED)
    assert watch.take_miss_ms(came_at=1.0) is None
    watch.on_miss(2.0)
    assert watch.take_miss_ms(came_at=2.25) == 250.0
    assert watch.take_miss_ms(came_at=3.0) is None
    watch.on_miss(4.0)
    watch.on_miss(5.0)
    assert watch.take_miss_ms(came_at=5.5) == 500.0


def test_going_on_with_a_good_lookup_is_worth_no_wait() -> None:
    pace = Pace()
    for _ in range(50):
        pace.observe(3, 12.0)
    assert pace.worth_ms(10.0, 1.0) > 0 >= pace.worth_ms(10.0, 3.0)


def test_pipelined_waits_only_for_a_draft_that_has_spoken_lately() -> None:
    watch = DraftWatch(Mode.PIPELINED)
    assert not watch.may_wait()
    watch.on_extension(extension(), GraftOutcome.GRAFTED)
    assert watch.may_wait()
    for _ in range(4):
        watch.on_commit()
    assert not watch.may_wait()


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
def test_exhausted_counts_for_the_current_base_only(mode: Mode) -> None:
    watch = DraftWatch(mode)
    watch.on_extension(extension(is_exhausted=True), GraftOutcome.LATE)
    assert watch.may_wait()
    watch.on_extension(extension(is_exhausted=True), GraftOutcome.GRAFTED)
    assert not watch.may_wait()
    watch.on_commit()
    assert watch.may_wait()
