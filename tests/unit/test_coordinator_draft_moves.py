"""Whose drafting moves, where to and how often, with any number of workers and requests."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest
from coordinator_world import PROMPT, a_commit, a_machine, a_request

from coordinator.answer_stream import AnswerStream
from coordinator.draft_moves import DraftMoves
from coordinator.events import Admitted, Cause, Kind, Moving, Placed, Received
from coordinator.pools import Connection, Pool
from specpipe.types import Extension, Heartbeat, Hello, SessionMessage

EVERY_MS = 250.0


@dataclass
class FakeLink:
    hello: Hello
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(num_free_slots=10_000))
    num_dropped_extensions: int = 0

    async def read_vocabulary(self, num_ids: int) -> None: ...

    def send(self, message: SessionMessage) -> None: ...


class Service:
    """Draft workers and requests that are drafted, and what a driver does with them."""

    def __init__(self, *num_requests: int) -> None:
        """So many requests on each worker."""
        self.ids = itertools.count(100)
        self.pool = Pool(Kind.DRAFT)
        self.streams: list[AnswerStream] = []
        self.moves = DraftMoves(self.pool, lambda stream: self.pool.place(self.now_ms), level_every_ms=EVERY_MS)
        self.now_ms = 1000.0
        for number, count in enumerate(num_requests, 1):
            self.join(number)
            for _ in range(count):
                self.ask(number)

    def join(self, number: int, max_sessions: int = 64) -> Connection:
        hello = Hello(protocol_version=1, incarnation=number, max_sessions=max_sessions)
        connection = Connection(number, Kind.DRAFT, f"host:{number}", FakeLink(hello))
        self.pool.add(connection)
        return connection

    def ask(self, number: int, num_tokens: int = 1) -> AnswerStream:
        """A request that streams, and is drafted by that worker."""
        machine = a_machine(a_request(1000))
        stream = AnswerStream(machine, lambda _: None)
        machine.handle(Admitted(), 0.0)
        machine.handle(Placed(Kind.TARGET, 900, next(self.ids)), 0.0)
        assert machine.target is not None
        machine.handle(Placed(Kind.DRAFT, number, self._open(number)), 0.0)
        tokens = list(range(10, 10 + num_tokens))
        machine.handle(Received(Kind.TARGET, a_commit(len(PROMPT), tokens, session=machine.target.session)), 0.0)
        self.draft(stream)
        self.streams.append(stream)
        return stream

    def draft(self, stream: AnswerStream) -> None:
        """Its newest draft session says something, and so takes over; the one before is closed."""
        before, latest = stream.machine.draft, stream.machine.latest_draft
        assert before is not None
        assert latest is not None
        extension = Extension(session=latest.session, base=3, parents=(0,), tokens=(7,), confidences=(0.5,))
        stream.machine.handle(Received(Kind.DRAFT, extension), self.now_ms)
        if before != latest and (connection := self.pool.get(before.worker)) is not None:
            connection.forget(before.session)

    def tick(self, ms: float = 50.0) -> list[tuple[int, int, Cause]]:
        """What moves, and from where to where."""
        self.now_ms += ms
        made = []
        for stream, connection, cause in self.moves.due(tuple(self.streams), self.now_ms):
            assert stream.machine.draft is not None
            made.append((stream.machine.draft.worker, connection.number, cause))
            stream.machine.handle(Moving(connection.number, self._open(connection.number), cause), self.now_ms)
        return made

    def settle(self, num_ticks: int = 200) -> list[tuple[int, int, Cause]]:
        """All that moves until nothing does; every successor drafts at once."""
        made = []
        for _ in range(num_ticks):
            made += self.tick()
            for stream in self.streams:
                self.draft(stream)
        return made

    @property
    def num_drafted(self) -> dict[int, int]:
        """Requests by the worker that drafts them."""
        return dict(Counter(stream.machine.draft.worker for stream in self.streams if stream.machine.draft))

    def _open(self, number: int) -> int:
        session = next(self.ids)
        connection = self.pool.get(number)
        assert connection is not None
        connection.sessions.add(session)
        return session


def test_what_a_worker_has_that_ends_moves_at_once_and_to_all_others_alike() -> None:
    service = Service(6, 0, 0, 0)
    leaving = service.pool.get(1)
    assert leaving is not None
    leaving.link.heartbeat = Heartbeat(num_free_slots=10_000, is_draining=True)
    assert [(origin, cause) for origin, _, cause in service.tick()] == [(1, Cause.DRAINS)] * 6
    assert service.tick() == [], "they are under way"
    service.settle()
    assert service.num_drafted == {2: 2, 3: 2, 4: 2}


@pytest.mark.parametrize("max_sessions", [0, 1])
def test_without_another_worker_that_has_room_nothing_moves(max_sessions: int) -> None:
    service = Service(5)
    alone = service.pool.get(1)
    assert alone is not None
    alone.is_suspect = True
    assert service.tick() == []
    if max_sessions:
        service.join(2, max_sessions)
        assert service.tick() == [(1, 2, Cause.SILENT)]
        assert service.tick() == []


def test_a_worker_that_joins_is_told_once_and_gets_its_part_one_session_after_the_other() -> None:
    service = Service(9)
    assert service.moves.has_joined()
    assert not service.moves.has_joined()
    service.join(2)
    assert service.moves.has_joined()
    first = [service.tick() for _ in range(10)]
    assert sum(map(len, first)) == 2, "one each quarter of a second"
    assert set(service.settle()) == {(1, 2, Cause.LOAD)}
    assert service.num_drafted == {1: 5, 2: 4}
    assert service.settle() == [], "and nothing flaps"


def test_many_workers_with_many_requests_end_level_whatever_joins() -> None:
    service = Service(20, 3, 0)
    service.join(4)
    service.settle(600)
    counts = service.num_drafted.values()
    assert len(counts) == 4
    assert max(counts) - min(counts) <= 1


def test_the_shortest_text_moves_first_and_none_that_the_other_has_no_slots_for() -> None:
    service = Service(0, 0)
    long, short = [service.ask(1, num_tokens) for num_tokens in (50, 2, 50, 50)][:2]
    cramped = service.pool.get(2)
    assert cramped is not None
    cramped.link.heartbeat = Heartbeat(num_free_slots=4)
    assert service.tick(EVERY_MS) == []
    cramped.link.heartbeat = Heartbeat(num_free_slots=40)
    assert service.tick(EVERY_MS) == [(1, 2, Cause.LOAD)]
    assert short.machine.latest_draft != short.machine.draft
    assert service.tick(EVERY_MS) == []
    assert long.machine.latest_draft == long.machine.draft
