"""Where a worker's steps lie on the coordinator's clock: in their true order, whatever the clocks of hosts say."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trace_story import Story

from coordinator.events import Kind
from coordinator.trace_layout import SessionClock
from specpipe.spans import Span


def test_the_origin_lies_between_what_was_sent_and_what_was_heard() -> None:
    clock = SessionClock(100.0)
    clock.before(150.0, 40.0)
    assert clock.origin_ms == 105.0
    clock.before(206.0, 100.0)
    assert clock.origin_ms == 103.0


def test_what_a_worker_knew_bounds_it_from_the_other_side() -> None:
    clock = SessionClock(100.0)
    clock.before(210.0, 100.0)
    clock.after(158.0, 50.0)
    assert clock.origin_ms == 109.0


def test_steps_follow_one_another_wherever_the_origin_moves() -> None:
    clock = SessionClock(0.0)
    clock.before(30.0, 10.0)
    assert clock.place(1, 0.0, 10.0) == (10.0, 20.0)
    clock.before(20.0, 20.0)  # the origin was 0
    assert clock.place(2, 10.0, 10.0) == (20.0, 30.0)
    assert clock.place(3, 35.0, 5.0) == (35.0, 40.0)


def test_a_step_that_is_told_twice_lies_in_one_place() -> None:
    clock = SessionClock(0.0)
    assert clock.place(4, 2.0, 3.0) == clock.place(4, 2.0, 3.0) == (2.0, 5.0)


def test_clocks_that_drift_apart_are_followed() -> None:
    """A worker's clock that loses a thousandth for an hour: 3.6 s that would be in every step of the last minutes."""
    clock = SessionClock(0.0)
    for second in range(1, 3601):
        told_ms = 999.0 * second
        clock.after(1000.0 * second - 1.0, told_ms)
        clock.before(1000.0 * second + 1.0, told_ms)
        start_ms, _ = clock.place(second, told_ms, 10.0)
        assert abs(start_ms - 1000.0 * second) <= 2.0


# A whole request, its workers at any distance and with any clock


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.3, 5.0, 40.0]),
    st.sampled_from([0.0, 0.5, 3_000.0, 86_400_000.0]),
)
@example(1, 40.0, 3_000.0)
def test_overlap_and_order_are_the_true_ones_whatever_the_skew(seed: int, max_hop_ms: float, shift_ms: float) -> None:
    """Draft steps end before the rounds that verified their nodes begin; steps of a worker keep their order and
    length; nothing lies before its request or after what proves it. `shift_ms`: the worker's clock runs ahead."""
    random = Random(seed)
    story = Story(hop_ms=lambda: random.uniform(0.0, max_hop_ms), shift_ms=shift_ms)
    story.admit()
    told_ms = 3.0 + max_hop_ms
    base, drafts, lengths = 3, [], []
    for _ in range(12):
        forward_ms = random.uniform(0.1, 12.0)
        drafts.append(story.draft(told_ms, forward_ms / 3, base=base))
        story.run(told_ms + forward_ms / 3 + 2 * max_hop_ms)
        start_ms = story.now_ms + max_hop_ms  # when the extension has been passed on
        known = tuple(draft for draft in drafts[-2:] if draft in story.relayed)
        story.verify(start_ms, forward_ms, base=base, num_tokens=2, drafts=known)
        lengths.append(forward_ms)
        story.run(start_ms + forward_ms + max_hop_ms)
        base, told_ms = base + 2, story.now_ms + max_hop_ms
    story.cancel()
    story.close()
    by_id = {span.span_id: span for span in story.spans}
    for verify in story.named("verify"):
        for link in verify.links:
            assert by_id[link].end_unix_nanos <= verify.start_unix_nanos
    for name in ("verify", "draft"):
        check_order(story.named(name))
    assert [span.end_unix_nanos - span.start_unix_nanos for span in story.named("verify")] == pytest.approx(
        [1e6 * length for length in lengths], abs=2
    )
    (generate,) = story.named("generate")
    for span in story.spans:
        assert generate.start_unix_nanos <= span.start_unix_nanos <= span.end_unix_nanos <= generate.end_unix_nanos


def check_order(spans: list[Span]) -> None:
    """`spans` are by start."""
    for earlier, later in itertools.pairwise(spans):
        assert earlier.end_unix_nanos <= later.start_unix_nanos
        assert earlier.attributes["specpipe.step"] < later.attributes["specpipe.step"]  # type: ignore[operator]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([0.3, 5.0, 40.0]))
def test_no_step_is_further_from_the_truth_than_a_hop(seed: int, max_hop_ms: float) -> None:
    random = Random(seed)
    story = Story(hop_ms=lambda: random.uniform(0.0, max_hop_ms))
    story.admit()
    target = story.of(Kind.TARGET)
    true_ms = [target.origin_ms + 10.0 * i for i in range(20)]
    for i, start_ms in enumerate(true_ms):
        story.verify(start_ms, 8.0, base=3 + i)
    story.run(1_000.0)
    found_ms = [story.ms(span.start_unix_nanos) for span in story.named("verify")]
    assert all(abs(found - true) <= max_hop_ms for found, true in zip(found_ms, true_ms, strict=True))


def test_a_first_report_that_waited_long_moves_nothing() -> None:
    hops_ms = iter([1.0, 1.0, 8.0, 3.0, *[1.0] * 40])  # two Opens, the first two reports, all others
    story = Story(hop_ms=lambda: next(hops_ms))
    story.admit()
    true_ms = [3.0 + 5.0 * i for i in range(12)]
    for i, start_ms in enumerate(true_ms):
        story.verify(start_ms, 5.0, base=3 + i)
    story.run(100.0)
    assert [story.ms(span.start_unix_nanos) for span in story.named("verify")] == pytest.approx(true_ms, abs=0.01)
