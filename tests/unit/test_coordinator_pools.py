"""Placement by load, back-off, and what a silent worker has not done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from coordinator.events import Cause, Kind
from coordinator.pools import AVOID_ENDING_MS, AVOID_MS, CLOSING_MS, Backoff, Connection, Pool
from specpipe.types import Heartbeat, Hello, ModelInfo, SessionMessage

MODEL = ModelInfo(
    name="m", fingerprint="f", tokenizer_fingerprint="t", vocab_size=100, max_context=50, eos_token_ids=(1,)
)


@dataclass
class FakeLink:
    hello: Hello
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    def send(self, message: SessionMessage) -> None: ...


def connection(number: int, sessions: int = 0, max_sessions: int = 4, **changes: Any) -> Connection:
    hello = Hello(protocol_version=1, incarnation=number, model=MODEL, max_sessions=max_sessions)
    made = Connection(number, Kind.TARGET, f"host:{number}", FakeLink(hello), set(range(sessions)))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def placed(*connections: Connection) -> int | None:
    pool = Pool(Kind.TARGET)
    for made in connections:
        pool.add(made)
    best = pool.place(1000.0)
    return None if best is None else best.number


def test_the_least_loaded_worker_with_room_takes_the_session() -> None:
    assert placed() is None
    assert placed(connection(1, 2), connection(2, 1), connection(3, 3)) == 2
    assert placed(connection(1, 1), connection(2, 1)) == 1
    assert placed(connection(1, 4), connection(2, 4)) is None
    assert placed(connection(1, 4), connection(2, 9, max_sessions=0)) == 2
    assert placed(connection(1, 0, is_suspect=True), connection(2, 3)) == 2
    assert placed(connection(1, 0, avoided_until_ms=1001.0), connection(2, 3)) == 2
    assert placed(connection(1, 0, avoided_until_ms=1000.0), connection(2, 3)) == 1


def test_sessions_of_other_coordinators_are_load_too() -> None:
    busy, idle = connection(1, 1, max_sessions=20), connection(2, 2, max_sessions=20)
    assert placed(busy, idle) == 1
    busy.count_others(Heartbeat(num_sessions=4))
    idle.count_others(Heartbeat(num_sessions=2))
    assert placed(busy, idle) == 2
    busy.sessions.update(range(10, 15))  # opened since: no heartbeat has counted them
    assert busy.candidate.num_sessions == 9
    busy.count_others(Heartbeat(num_sessions=5))  # one of ours has not arrived there yet
    assert busy.candidate.num_sessions == 6


def test_a_worker_that_is_full_of_sessions_of_others_has_no_room_until_its_next_heartbeat_says_so() -> None:
    pool, made = Pool(Kind.TARGET), connection(1, 1)
    pool.add(made)
    made.count_others(Heartbeat(num_sessions=3))
    assert made.has_room
    made.count_others(Heartbeat(num_sessions=4))
    assert not made.has_room
    assert not pool.can_place(1000.0)
    assert pool.is_ready, "requests wait for room as long as it takes"
    made.forget(0)
    assert made.has_room, "ours are not counted twice"
    made.count_others(Heartbeat(num_sessions=4))
    assert not made.has_room
    made.count_others(Heartbeat())
    assert made.has_room
    unbounded = connection(2, 9, max_sessions=0)
    unbounded.count_others(Heartbeat(num_sessions=900))
    assert unbounded.has_room


def test_a_pool_is_full_if_room_is_all_that_lacks() -> None:
    pool = Pool(Kind.TARGET)
    assert not pool.is_full
    busy, other = connection(1, 4), connection(2, 3)
    pool.add(busy)
    assert pool.is_full
    pool.add(other)
    assert not pool.is_full
    other.refuse(0.0, is_ending=False)
    assert not pool.is_full, "it refuses though it has room: something is wrong there"
    other.is_suspect = True
    assert pool.is_full
    busy.is_leaving = True
    assert not pool.is_full


def test_a_worker_that_says_it_drains_gets_nothing_whatever_it_has_refused() -> None:
    draining = connection(1, 0)
    draining.link.heartbeat = Heartbeat(is_draining=True)
    assert placed(draining, connection(2, 3)) == 2
    assert placed(draining) is None
    pool = Pool(Kind.TARGET)
    pool.add(draining)
    assert not pool.is_ready


def test_for_how_long_no_worker_has_been_ready_counts_from_the_last_sign_of_life() -> None:
    pool = Pool(Kind.TARGET)
    assert pool.unready_ms(1000.0) == 0
    assert pool.unready_ms(1500.0) == 500
    silent, other = connection(1), connection(2)
    pool.add(silent)
    pool.add(other)
    assert pool.unready_ms(2000.0) is None
    other.link.heartbeat = Heartbeat(is_draining=True)
    other.silent_s = 3.5
    silent.is_suspect, silent.silent_s = True, 3.0
    assert pool.unready_ms(9000.0) == 3000
    pool.remove(silent)
    pool.remove(other)
    assert pool.unready_ms(9500.0) == 3500
    pool.add(connection(3))
    assert pool.unready_ms(9600.0) is None


def test_why_what_a_worker_has_is_better_off_elsewhere() -> None:
    made = connection(1, is_leaving=True)
    assert made.cause_to_leave is Cause.LEAVES
    made.link.heartbeat = Heartbeat(is_draining=True)
    assert made.cause_to_leave is Cause.DRAINS
    made.is_suspect = True
    assert made.cause_to_leave is Cause.SILENT, "it can be waited for least of all"
    assert connection(2).cause_to_leave is None


def test_levelling_counts_sessions_that_stay_and_takes_workers_that_may_be_used() -> None:
    pool = Pool(Kind.DRAFT)
    busy, suspect, full, free = (
        connection(1, 9, max_sessions=0),
        connection(2, is_suspect=True, max_sessions=0),
        connection(3, 4),
        connection(4, max_sessions=0),
    )
    for made in (busy, suspect, full, free):
        pool.add(made)
    assert pool.level(1000.0, {1: 9, 2: 0, 3: 0, 4: 1}) == (busy, free), "the third is full of sessions that close"
    assert pool.level(1000.0, {1: 5, 2: 0, 3: 4, 4: 4}) is None, "four of the first are on their way"
    pool.remove(free)
    assert pool.level(1000.0, {1: 9}) is None


def test_a_worker_that_refuses_because_it_ends_is_avoided_for_longer_than_one_that_is_full() -> None:
    full, ending = connection(1), connection(2)
    full.refuse(0.0, is_ending=False)
    ending.refuse(0.0, is_ending=True)
    assert full.avoided_until_ms == AVOID_MS
    assert ending.avoided_until_ms == AVOID_ENDING_MS > AVOID_MS


def test_a_pool_is_ready_while_a_worker_may_be_given_sessions_sooner_or_later() -> None:
    pool = Pool(Kind.DRAFT)
    assert not pool.is_ready
    full = connection(1, 4)
    pool.add(full)
    assert pool.is_ready
    full.is_suspect = True
    assert not pool.is_ready
    pool.remove(full)
    assert not len(pool)


def test_back_off_doubles_up_to_four_seconds() -> None:
    backoff = Backoff()
    assert [backoff.next_s() for _ in range(5)] == [1, 2, 4, 4, 4]
    backoff.reset()
    assert backoff.next_s() == 1


def test_sessions_whose_closed_never_comes_are_overdue() -> None:
    made = connection(1, 2)
    made.close(0, 100.0)
    assert made.overdue(100.0 + CLOSING_MS) == []
    assert made.overdue(101.0 + CLOSING_MS) == [0]
    made.forget(0)
    assert made.sessions == {1}
    assert made.overdue(1e9) == []


def test_a_worker_that_hangs_in_a_step_has_stalled_although_it_speaks() -> None:
    made = connection(1)
    assert made.stalled_ms == 0
    made.silent_s = 2.5
    assert made.stalled_ms == 2500
    made.link.heartbeat = Heartbeat(step=7, step_running_ms=4000.0)
    assert made.stalled_ms == 6500
