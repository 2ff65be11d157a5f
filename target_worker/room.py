"""Which sessions have KV slots: admission in order, growth, preemption, release.

Owns: the slot pool of a target worker and the order of arrival. Must not know: clocks, messages, what a model computes.
Slot lists change only here and only between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from specpipe.engine.slots import SlotPool
from specpipe.errors import InvariantError
from specpipe.tree import Node
from target_worker.session import Phase, Session

MARGIN = 32  # slots beyond its tokens that must be free before a session is admitted


class Room:
    """Sessions queue for slots in order of arrival; when slots run out, the newest one gives its own back.

    A preempted session keeps its tokens and is computed again later. As no session is taken that could not run alone,
    the oldest one always goes on.
    """

    def __init__(self, num_slots: int, clear_slots: Callable[[Sequence[int]], None]) -> None:
        self.running: list[Session] = []  # in order of arrival
        self.queued: list[Session] = []  # in order of arrival
        self.num_preempted = 0
        self._pool = SlotPool(num_slots)
        self._clear_slots = clear_slots

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def enter(self, session: Session) -> None:
        _insert(self.queued, session)

    def admit(self, paused_links: Collection[int]) -> None:
        """Give slots to queued sessions, oldest first, until one does not fit. Those of paused links stand aside."""
        for session in [waiting for waiting in self.queued if waiting.link not in paused_links]:
            margin = min(MARGIN, session.stops.max_length - 1 - len(session.tokens)) if self.running else 0
            if not self._pool.can_allocate(len(session.tokens) + max(0, margin)):
                return
            session.slots = self._pool.allocate(len(session.tokens))
            session.phase = Phase.RUNNING
            self.queued.remove(session)
            _insert(self.running, session)

    def grow(self, session: Session) -> bool:
        """See that every committed token of a running session has a slot. False: the session was preempted itself."""
        while len(session.slots) < len(session.tokens):
            if self._pool.can_allocate(1):
                session.slots.extend(self._pool.allocate(1))
            elif self._preempt_newest() is session:
                return False
        return True

    def lend(self, nodes: Sequence[Node]) -> None:
        """Give each node a slot for one step. Raises CapacityError if `num_free` was not heeded."""
        for node, slot in zip(nodes, self._pool.allocate(len(nodes)), strict=True):
            node.slot = slot

    def take_back(self, nodes: Sequence[Node], path: Collection[Node], *, poisoned: Sequence[int] = ()) -> None:
        """End the loan: nodes on the committed path leave their slots to the session, the others to the pool."""
        rejected = [node.slot for node in nodes if node not in path and node.slot is not None]
        for node in nodes:
            node.slot = None
        self._release(rejected, poisoned=poisoned)

    def leave(self, session: Session, *, is_poisoned: bool = False) -> None:
        """A session ends or is finished: its slots are free from now on, zeroed if they may hold NaN."""
        for sessions in (self.running, self.queued):
            if session in sessions:
                sessions.remove(session)
        self._give_back(session, is_poisoned=is_poisoned)

    def check(self) -> None:
        """Raise InvariantError unless free and referenced slots are all slots, and each session holds what it must."""
        self._pool.check(slot for session in (*self.running, *self.queued) for slot in session.slots)
        for session in self.running:
            num_slots, length = len(session.slots), len(session.tokens)
            if not (length - 1 <= num_slots <= length and 0 <= session.num_computed <= num_slots):
                raise InvariantError(
                    f"session {session.session}: {num_slots} slots, {session.num_computed} computed, {length} tokens"
                )
        for sessions in (self.running, self.queued):
            if [s.serial for s in sessions] != sorted(s.serial for s in sessions):
                raise InvariantError("sessions stand out of order")

    def _preempt_newest(self) -> Session:
        victim = self.running.pop()
        self._give_back(victim, is_poisoned=False)
        victim.num_computed = 0
        victim.phase = Phase.QUEUED
        victim.is_cold = True
        _insert(self.queued, victim)
        self.num_preempted += 1
        return victim

    def _give_back(self, session: Session, *, is_poisoned: bool) -> None:
        # A prompt's rows have no logits, so what a half-computed prompt left is not known to be free of NaN.
        is_suspect = is_poisoned or (session.is_cold and session.num_computed > 0)
        slots, session.slots = session.slots, []
        self._release(slots, poisoned=slots if is_suspect else ())

    def _release(self, slots: Sequence[int], *, poisoned: Sequence[int]) -> None:
        if poisoned:
            self._clear_slots(poisoned)
        self._pool.release(slots)


def _insert(sessions: list[Session], session: Session) -> None:
    sessions.append(session)
    sessions.sort(key=lambda other: other.serial)
