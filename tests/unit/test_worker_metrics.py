"""A worker's numbers from what its loop tells: rows by kind, idle time by cause, what is held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpipe.telemetry.instruments import Instruments, Labels
from specpipe.telemetry.observer import WorkerLoad
from specpipe.telemetry.worker_metrics import IdleTime, WorkerMetrics


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Loop:
    held: WorkerLoad

    def load(self) -> WorkerLoad:
        return self.held


def readings(instruments: Instruments, name: str) -> Mapping[Labels, Any]:
    for observed in instruments.observed:
        if observed.description.name == f"specpipe.{name}":
            return observed.read()
    return next(h.read() for about, h in instruments.histograms if about.name == f"specpipe.{name}")


@pytest.fixture
def instruments() -> Instruments:
    return Instruments()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(instruments: Instruments, clock: Clock) -> WorkerMetrics:
    return WorkerMetrics("target", instruments, clock)


def test_rows_are_prefill_nodes_or_decode(metrics: WorkerMetrics, instruments: Instruments) -> None:
    metrics.step(0.006, num_sessions=3, num_rows=20, num_prefill_rows=8, num_nodes=10)
    metrics.step(0.006, num_sessions=1, num_rows=1, num_prefill_rows=0, num_nodes=0)
    rows = readings(instruments, "step.rows")
    assert rows == {("target", "prefill"): 8, ("target", "node"): 10, ("target", "decode"): 3}
    assert readings(instruments, "step.sessions") == {("target",): 4}
    tokens = readings(instruments, "step.tokens")[("target",)]
    assert (sum(tokens.counts), tokens.total) == (2, 21)
    assert readings(instruments, "step.duration")[("target",)].total == pytest.approx(0.012)


def test_idle_time_is_counted_by_cause_while_it_lasts_and_ends_where_the_next_step_began(
    metrics: WorkerMetrics, instruments: Instruments, clock: Clock
) -> None:
    metrics.idle("no sessions")
    clock.now_s += 5
    assert readings(instruments, "idle_time")[("target", "no sessions")] == 5
    metrics.idle("extension")
    clock.now_s += 1.5
    metrics.step(0.5, num_sessions=1, num_rows=1, num_prefill_rows=0, num_nodes=0)
    clock.now_s += 7
    idle = readings(instruments, "idle_time")
    assert (idle[("target", "no sessions")], idle[("target", "extension")]) == (5, 1.0)
    assert sum(idle.values()) == 6.0


@given(
    st.lists(
        st.tuples(st.sampled_from(["no sessions", "extension", "step", "look"]), st.floats(min_value=0, max_value=10))
    )
)
def test_idle_time_never_falls_and_is_never_more_than_the_time_that_passed(events: list[tuple[Any, float]]) -> None:
    clock = Clock()
    idle = IdleTime(clock)
    before: Mapping[Labels, float] = idle.read()
    busy_s = 0.0
    for what, seconds in events:
        clock.now_s += seconds
        if what == "step":
            idle.end_before(seconds)
            busy_s += seconds
        elif what != "look":
            idle.begin(what)
        now = idle.read()
        assert all(now[labels] >= value for labels, value in before.items())
        before = now
    assert sum(before.values()) <= clock.now_s - 100.0 + 1e-6


def test_a_scrape_during_a_step_is_not_taken_back(
    metrics: WorkerMetrics, instruments: Instruments, clock: Clock
) -> None:
    metrics.idle("extension")
    clock.now_s += 3  # of which the last second is a step that still runs
    assert readings(instruments, "idle_time")[("target", "extension")] == 3
    metrics.step(1.0, num_sessions=1, num_rows=1, num_prefill_rows=0, num_nodes=0)
    assert readings(instruments, "idle_time")[("target", "extension")] == 3
    metrics.idle("extension")
    clock.now_s += 0.5
    assert readings(instruments, "idle_time")[("target", "extension")] == 3, "it catches up first"
    clock.now_s += 1.5
    assert readings(instruments, "idle_time")[("target", "extension")] == 4


def test_extensions_and_their_lag(metrics: WorkerMetrics, instruments: Instruments) -> None:
    metrics.extension("grafted", num_nodes=4, lag_s=0.004)
    metrics.extension("late", num_nodes=2)
    metrics.extension("stale", num_nodes=1)
    assert readings(instruments, "extensions") == {
        ("target", "grafted"): 1,
        ("target", "late"): 1,
        ("target", "stale"): 1,
    }
    assert sum(readings(instruments, "extension.nodes").values()) == 7
    assert sum(readings(instruments, "extension.lag")[("target",)].counts) == 1


def test_prefixes_and_preemptions(metrics: WorkerMetrics, instruments: Instruments) -> None:
    metrics.prefix(num_cached=0, num_computed=9)
    metrics.prefix(num_cached=8, num_computed=1)
    metrics.preempted()
    assert readings(instruments, "prefix_cache.lookups") == {("target", "hit"): 1, ("target", "miss"): 1}
    assert readings(instruments, "prefix_cache.tokens") == {("target", "cached"): 8, ("target", "computed"): 10}
    assert readings(instruments, "preemptions") == {("target",): 1}


def test_what_is_held_is_asked_of_the_loop_when_somebody_looks(
    metrics: WorkerMetrics, instruments: Instruments
) -> None:
    assert set(readings(instruments, "sessions").values()) == {0}, "there is no loop yet"
    metrics.watch(
        Loop(WorkerLoad(num_running=2, num_queued=1, num_used_slots=30, num_cached_slots=5, num_free_slots=7))
    )
    assert readings(instruments, "sessions") == {
        ("target", "running"): 2,
        ("target", "queued"): 1,
        ("target", "paused"): 0,
        ("target", "finished"): 0,
    }
    assert readings(instruments, "slots") == {("target", "used"): 30, ("target", "cached"): 5, ("target", "free"): 7}
