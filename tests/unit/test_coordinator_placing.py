"""Placement: load, prefixes computed before, nearness, and that no worker is chosen that may not be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.events import Kind
from coordinator.placing import (
    BLOCK_TOKENS,
    MAX_BLOCKS,
    MAX_EXCESS,
    MIN_TO_BEGIN,
    Candidate,
    Levelling,
    Prefixes,
    choose,
)
from coordinator.pools import Connection, Pool
from specpipe.types import Heartbeat, Hello, ProcessInfo, SessionMessage

LONG = tuple(range(10 * BLOCK_TOKENS))
OTHER = (9_999, *LONG[1:])


def worker(number: int, num_sessions: int = 0, **facts: object) -> Candidate:
    return Candidate(number=number, num_sessions=num_sessions, num_free_slots=10_000, **facts)  # type: ignore[arg-type]


def chosen(
    *candidates: Candidate, prefixes: Prefixes | None = None, tokens: tuple[int, ...] = LONG, host: str = ""
) -> int:
    found = choose(candidates, tokens, prefixes or Prefixes(), host=host)
    return 0 if found is None else found.number


def served(tokens: tuple[int, ...], number: int) -> Prefixes:
    prefixes = Prefixes()
    prefixes.note(tokens, number)
    return prefixes


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([], 0),
        ([worker(1, 2), worker(2, 1), worker(3, 3)], 2),
        ([worker(2, 1), worker(1, 1)], 1),
        ([worker(1, 3, max_sessions=4), worker(2, 6, max_sessions=16)], 2),
        ([Candidate(number=1, num_sessions=0, num_free_slots=len(LONG) - 1), worker(2, 5)], 2),
        ([Candidate(number=1, num_sessions=0), Candidate(number=2, num_sessions=0)], 1),
    ],
    ids=["nobody", "fewest sessions", "longest connected", "part of its room", "too few slots", "too few anywhere"],
)
def test_without_a_known_beginning_load_decides(candidates: list[Candidate], expected: int) -> None:
    assert chosen(*candidates) == expected


def test_of_equals_one_on_the_same_host_is_taken() -> None:
    near, far, busy = worker(3, 1, host="a"), worker(1, 1, host="b"), worker(2, 2, host="a")
    assert chosen(far, busy, near, host="a") == 3
    assert chosen(far, busy, near) == 1
    assert chosen(worker(4, 0, host="b"), near, host="a") == 4


def test_the_worker_that_served_the_longest_common_beginning_is_preferred() -> None:
    prefixes = served(LONG, 2)
    prefixes.note(LONG[: 4 * BLOCK_TOKENS], 3)
    candidates = (worker(1), worker(2, 1), worker(3, 1))
    assert chosen(*candidates, prefixes=prefixes) == 2
    assert chosen(*candidates, prefixes=prefixes, tokens=(*LONG[: 6 * BLOCK_TOKENS], 7, 7)) == 2
    assert chosen(*candidates, prefixes=prefixes, tokens=(*LONG[: 4 * BLOCK_TOKENS + 5], *OTHER)) == 3
    assert chosen(*candidates, prefixes=prefixes, tokens=OTHER) == 1
    assert chosen(*candidates, prefixes=prefixes, tokens=LONG[: BLOCK_TOKENS - 1]) == 1


def test_a_worker_with_clearly_more_sessions_is_not_preferred() -> None:
    prefixes = served(LONG, 2)
    assert chosen(worker(1), worker(2, MAX_EXCESS), prefixes=prefixes) == 2
    assert chosen(worker(1), worker(2, MAX_EXCESS + 1), prefixes=prefixes) == 1


def test_a_worker_that_is_gone_or_has_no_room_leaves_it_to_who_served_less() -> None:
    prefixes = served(LONG, 2)
    prefixes.note(LONG[: 2 * BLOCK_TOKENS], 3)
    assert chosen(worker(1), worker(3, 1), prefixes=prefixes) == 3
    assert chosen(worker(1), prefixes=prefixes) == 1


def test_the_book_is_bounded_and_forgets_what_was_not_asked_for_longest() -> None:
    prefixes = Prefixes(max_entries=20)
    prefixes.note(LONG, 1)
    prefixes.note(OTHER, 2)
    prefixes.note(LONG, 1)
    prefixes.note(tuple(range(50_000, 50_000 + 10 * BLOCK_TOKENS)), 3)
    assert len(prefixes) == 20
    among = {number: worker(number) for number in (1, 2, 3)}
    assert prefixes.find(LONG, among) is among[1]
    assert prefixes.find(OTHER, among) is None


def test_what_lies_beyond_the_bound_of_a_text_plays_no_part() -> None:
    prefixes = Prefixes()
    prefixes.note(range((MAX_BLOCKS + 5) * BLOCK_TOKENS), 1)
    assert len(prefixes) == MAX_BLOCKS


# Levelling


def moves(sessions: list[int], rooms: list[int] | None = None, limit: int = 1000) -> list[tuple[int, int]]:
    """All moves between workers, numbered from 1, with so many sessions; these change by nothing else."""
    levelling, sessions = Levelling(), list(sessions)
    made: list[tuple[int, int]] = []
    while len(made) < limit:
        workers = [
            worker(number, held, max_sessions=rooms[number - 1] if rooms else 0)
            for number, held in enumerate(sessions, 1)
        ]
        found = levelling.find(workers, workers)
        if found is None:
            return made
        giver, taker = found
        sessions[giver - 1] -= 1
        sessions[taker - 1] += 1
        made.append(found)
    raise AssertionError(f"it never ends: {made[-4:]}")


@pytest.mark.parametrize(
    ("sessions", "rooms", "expected"),
    [
        ([], None, []),
        ([5], None, []),
        ([3, 0], None, []),
        ([4, 0], None, [(1, 2), (1, 2)]),
        ([0, 5], None, [(2, 1), (2, 1)]),
        ([6, 1, 6], None, [(1, 2), (3, 2), (1, 2)]),
        ([8, 4], [16, 8], []),
        ([4, 8], [4, 16], []),
        ([4, 0], [4, 64], [(1, 2), (1, 2)]),
    ],
    ids=[
        "nobody",
        "one",
        "too little",
        "two move",
        "either way",
        "from most",
        "full alike",
        "more room",
        "little room",
    ],
)
def test_sessions_move_from_most_to_least_until_they_are_level(
    sessions: list[int], rooms: list[int] | None, expected: list[tuple[int, int]]
) -> None:
    assert moves(sessions, rooms) == expected


@given(workers=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 64)), min_size=1, max_size=8))
def test_levelling_ends_and_no_worker_both_gives_and_takes(workers: list[tuple[int, int]]) -> None:
    sessions, rooms = [held for held, _ in workers], [room for _, room in workers]
    made = moves(sessions, rooms)
    assert not {giver for giver, _ in made} & {taker for _, taker in made}
    assert len(made) <= sum(sessions)


@given(sessions=st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_workers_of_one_size_differ_by_one_at_most_once_levelling_has_begun(sessions: list[int]) -> None:
    made = moves(sessions)
    assert bool(made) == (max(sessions) - min(sessions) >= 2 * MIN_TO_BEGIN)
    for giver, taker in made:
        sessions[giver - 1] -= 1
        sessions[taker - 1] += 1
    assert not made or max(sessions) - min(sessions) <= 1


def test_a_difference_that_would_not_begin_levelling_ends_it_only_when_it_is_gone() -> None:
    levelling = Levelling()

    def finds(one: int, other: int) -> bool:
        pair = [worker(1, one), worker(2, other)]
        return levelling.find(pair, pair) is not None

    assert [finds(3, 0), finds(4, 0), finds(3, 0), finds(2, 0), finds(1, 0), finds(2, 0), finds(3, 0)] == [
        *(False, True, True, True),
        *(False, False, False),
    ]


def test_a_session_goes_only_where_one_may_be_placed() -> None:
    levelling, workers = Levelling(), [worker(1, 9), worker(2, 0), worker(3, 1)]
    assert levelling.find(workers, workers[2:]) == (1, 3)
    assert levelling.find(workers, workers[:1]) is None
    assert levelling.find(workers, []) is None


@given(texts=st.lists(st.sampled_from([LONG, OTHER, LONG[:40], ()]), max_size=40), num_workers=st.integers(2, 5))
def test_what_placement_itself_makes_unequal_moves_nothing(texts: list[tuple[int, ...]], num_workers: int) -> None:
    sessions, prefixes, levelling = [0] * num_workers, Prefixes(), Levelling()
    for text in texts:
        workers = [worker(number, held) for number, held in enumerate(sessions, 1)]
        assert levelling.find(workers, workers) is None
        placed = choose(workers, text, prefixes)
        assert placed is not None
        prefixes.note(text, placed.number)
        sessions[placed.number - 1] += 1


class FakeLink:
    def __init__(self, hello: Hello, heartbeat: Heartbeat) -> None:
        self.hello, self.heartbeat = hello, heartbeat
        self.num_dropped_extensions = 0

    async def read_vocabulary(self, num_ids: int) -> None: ...

    def send(self, message: SessionMessage) -> None: ...


@st.composite
def connections(draw: st.DrawFn) -> list[Connection]:
    """Workers in any state, numbered from 1."""
    made = []
    for number in range(1, draw(st.integers(1, 6)) + 1):
        hello = Hello(
            protocol_version=1,
            incarnation=number,
            max_sessions=draw(st.integers(0, 4)),
            process=ProcessInfo(host=draw(st.sampled_from("ab"))),
        )
        heartbeat = Heartbeat(num_free_slots=draw(st.integers(0, 1000)), is_draining=draw(st.booleans()))
        connection = Connection(number, Kind.TARGET, f"host:{number}", FakeLink(hello, heartbeat))
        connection.sessions = set(range(draw(st.integers(0, 5))))
        connection.is_suspect, connection.is_leaving = draw(st.booleans()), draw(st.booleans())
        connection.avoided_until_ms = draw(st.sampled_from([0.0, 2000.0]))
        made.append(connection)
    return made


@given(
    made=connections(),
    texts=st.lists(st.sampled_from([LONG, OTHER, LONG[:40], ()]), max_size=8),
    host=st.sampled_from(["", "a"]),
)
def test_no_worker_is_chosen_that_is_suspect_leaving_draining_full_or_avoided(
    made: list[Connection], texts: list[tuple[int, ...]], host: str
) -> None:
    pool = Pool(Kind.TARGET)
    for connection in made:
        pool.add(connection)
    for session, text in enumerate(texts, 1000):
        allowed = [c for c in made if not (c.is_suspect or c.is_leaving or c.link.heartbeat.is_draining)]
        allowed = [c for c in allowed if not c.link.hello.max_sessions or len(c.sessions) < c.link.hello.max_sessions]
        allowed = [c for c in allowed if c.avoided_until_ms <= 1000.0]
        placed = pool.place(1000.0, text, host=host)
        assert pool.can_place(1000.0) == bool(allowed)
        assert (placed in allowed) if allowed else placed is None
        if placed is not None:
            placed.sessions.add(session)
