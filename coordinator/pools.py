"""Which workers there are, and which one takes the next session.

Owns: the book of live connections of a kind, which of them may be used, back-off. Must not know: asyncio, gRPC,
requests, which one is best (`coordinator.placing`). `coordinator.links` dials; this module only decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from coordinator.events import Cause, Kind
from coordinator.fit import VocabularyLink
from coordinator.placing import Candidate, Levelling, Prefixes, choose
from specpipe.spans import Process, Role
from specpipe.types import Heartbeat, SessionMessage

MAX_BACKOFF_S = 4.0  # a dial costs little, a worker that is back and not used costs more
AVOID_MS = 1_000.0  # a worker that refused a session for now is asked again after this
AVOID_ENDING_MS = 30_000.0  # ... and one that refused it because it ends, should it still be there
CLOSING_MS = 30_000.0  # a session that was closed this long ago is forgotten, answered or not


class Link(VocabularyLink, Protocol):
    """What is needed of a `specpipe.worker_client.WorkerLink`."""

    heartbeat: Heartbeat

    @property
    def num_dropped_extensions(self) -> int: ...

    def send(self, message: SessionMessage) -> None: ...


class Backoff:
    """Seconds to wait before dialling again: 1, 2, 4, 4 ..., and 1 again after a success."""

    def __init__(self) -> None:
        self._next_s = 1.0

    def next_s(self) -> float:
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, MAX_BACKOFF_S)
        return wait_s

    def reset(self) -> None:
        self._next_s = 1.0


@dataclass(slots=True, eq=False)
class Connection:
    """One stream to one incarnation of a worker, and the sessions that it holds."""

    number: int  # never used twice
    kind: Kind
    address: str
    link: Link
    sessions: set[int] = field(default_factory=set)  # opened and not yet Closed
    closing_since_ms: dict[int, float] = field(default_factory=dict)  # of those: Close was sent
    num_others: int = 0  # sessions that it holds for other coordinators, by its last heartbeat
    silent_s: float = 0.0  # since it was heard last
    is_suspect: bool = False  # silent, or hangs in a step: gets no new sessions
    is_leaving: bool = False  # its name does not stand for it any more: gets no new sessions
    avoided_until_ms: float = 0.0  # it refused a session

    @property
    def has_room(self) -> bool:
        max_sessions = self.link.hello.max_sessions
        return not max_sessions or len(self.sessions) + self.num_others < max_sessions

    def count_others(self, heartbeat: Heartbeat) -> None:
        """By the sessions that are ours as the heartbeat comes, before any that are Closed by what comes with it.

        It may lack some of them, opened just now or closed there: then too few others are counted until the next one.
        That costs a refusal; one too many would be room that nobody takes.
        """
        self.num_others = max(0, heartbeat.num_sessions - len(self.sessions))

    @property
    def candidate(self) -> Candidate:
        """What counts where a session is placed."""
        hello, heartbeat = self.link.hello, self.link.heartbeat
        return Candidate(
            number=self.number,
            num_sessions=len(self.sessions) + self.num_others,
            max_sessions=hello.max_sessions,
            num_free_slots=heartbeat.num_free_slots,
            host=hello.process.host,
        )

    @property
    def may_be_used(self) -> bool:
        """Now, or when it has room."""
        return self.cause_to_leave is None

    @property
    def cause_to_leave(self) -> Cause | None:
        """Why it gets nothing new, and what it has is better off elsewhere."""
        if self.is_suspect:
            return Cause.SILENT
        if self.is_draining:
            return Cause.DRAINS
        return Cause.LEAVES if self.is_leaving else None

    def can_take(self, now_ms: float) -> bool:
        """A session, now."""
        return self.may_be_used and self.has_room and self.avoided_until_ms <= now_ms

    @property
    def is_draining(self) -> bool:
        """It says that it ends: it would refuse new sessions."""
        return self.link.heartbeat.is_draining

    def refuse(self, now_ms: float, *, is_ending: bool) -> None:
        """It has not taken a session: for now, or because it ends."""
        self.avoided_until_ms = now_ms + (AVOID_ENDING_MS if is_ending else AVOID_MS)

    @property
    def process(self) -> Process:
        """The worker, as traces name it."""
        told = self.link.hello.process
        return Process(
            role=Role.TARGET_WORKER if self.kind is Kind.TARGET else Role.DRAFT_WORKER,
            address=self.address,
            host=told.host,
            pid=told.pid,
            version=told.version,
            incarnation=self.link.hello.incarnation,
        )

    @property
    def stalled_ms(self) -> float:
        """How long the worker has got nothing done, as far as is known: it is silent, or hangs in a step."""
        return 1000 * self.silent_s + self.link.heartbeat.step_running_ms

    def close(self, session: int, now_ms: float) -> None:
        self.closing_since_ms[session] = now_ms

    def forget(self, session: int) -> None:
        self.sessions.discard(session)
        self.closing_since_ms.pop(session, None)

    def overdue(self, now_ms: float) -> list[int]:
        """Sessions whose Closed should have come long ago."""
        return [session for session, since_ms in self.closing_since_ms.items() if now_ms - since_ms > CLOSING_MS]


class Pool:
    """The live connections to workers of one kind."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._connections: dict[int, Connection] = {}
        self._prefixes = Prefixes()
        self._levelling = Levelling()
        self._unready_since_ms: float | None = None

    def __iter__(self) -> Iterator[Connection]:
        return iter(tuple(self._connections.values()))

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: Connection) -> None:
        self._connections[connection.number] = connection

    def remove(self, connection: Connection) -> None:
        self._connections.pop(connection.number, None)

    def get(self, number: int) -> Connection | None:
        return self._connections.get(number)

    @property
    def is_ready(self) -> bool:
        """Some worker may be given sessions, now or when others end."""
        return any(connection.may_be_used for connection in self._connections.values())

    @property
    def is_full(self) -> bool:
        """Ready, and without room until sessions end, of whichever coordinator."""
        return self.is_ready and not any(connection.may_be_used and connection.has_room for connection in self)

    def unready_ms(self, now_ms: float) -> float | None:
        """For how long none has been; None: one is. To be asked regularly. Silence counts: nobody was there then."""
        if self.is_ready:
            self._unready_since_ms = None
            return None
        if self._unready_since_ms is None:
            silent_s = min((connection.silent_s for connection in self), default=0.0)
            self._unready_since_ms = now_ms - 1000 * silent_s
        return now_ms - self._unready_since_ms

    def can_place(self, now_ms: float) -> bool:
        return any(connection.can_take(now_ms) for connection in self)

    def place(self, now_ms: float, tokens: Sequence[int] = (), *, host: str = "") -> Connection | None:
        """The worker that takes a session of this text, near `host` where that is known; None: none can now."""
        candidates = [connection.candidate for connection in self if connection.can_take(now_ms)]
        chosen = choose(candidates, tokens, self._prefixes, host=host)
        if chosen is None:
            return None
        self._prefixes.note(tokens, chosen.number)
        return self._connections[chosen.number]

    def level(self, now_ms: float, num_staying: Mapping[int, int]) -> tuple[Connection, Connection] | None:
        """A worker that is to give one session to another one, for balance; see `coordinator.placing`.

        `num_staying`: sessions of each worker, by its number, once those that move have moved.
        """
        usable = {
            connection.number: replace(connection.candidate, num_sessions=num_staying.get(connection.number, 0))
            for connection in self
            if connection.may_be_used
        }
        takers = [candidate for number, candidate in usable.items() if self._connections[number].can_take(now_ms)]
        found = self._levelling.find(tuple(usable.values()), takers)
        return None if found is None else (self._connections[found[0]], self._connections[found[1]])
