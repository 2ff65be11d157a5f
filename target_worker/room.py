"""Which sessions have KV slots: admission in order, shared prefixes, growth, preemption, release.

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

    What was computed of a session is remembered once a row of it was seen to be free of NaN: with its first commit, and
    all of it when it gives its slots back. Others with the same prefix begin there. A session that fails adds nothing.
    """

    def __init__(
        self,
        pool: SlotPool,
        clear_slots: Callable[[Sequence[int]], None],
        on_preempted: Callable[[Session], None],
    ) -> None:
        self.running: list[Session] = []  # in order of arrival
        self.queued: list[Session] = []  # in order of arrival
        self.num_preempted = 0
        self._pool = pool
        self._seen_version = pool.version
        self._clear_slots = clear_slots
        self._on_preempted = on_preempted

    @property
    def pool(self) -> SlotPool:
        """To look at."""
        return self._pool

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def enter(self, session: Session) -> None:
        _insert(self.queued, session)

    def admit(self, paused_links: Collection[int]) -> None:
        """Give slots to queued sessions, oldest first, until one does not fit. Those of paused links stand aside.

        What others have computed of a session's tokens by now, it shares: those admitted before included.
        """
        for session in [waiting for waiting in self.queued if waiting.link not in paused_links]:
            margin = min(MARGIN, session.stops.max_length - 1 - len(session.tokens)) if self.running else 0
            num_wanted = self._pool.num_wanted(session.tokens, session.opened.adapter)
            if not self._pool.can_allocate(num_wanted + max(0, margin)):
                break
            session.slots = self._pool.share(session.tokens, session.opened.adapter)
            session.num_computed = session.num_shared = len(session.slots)
            session.slots += self._pool.allocate(len(session.tokens) - len(session.slots))
            session.phase = Phase.RUNNING
            self.queued.remove(session)
            _insert(self.running, session)
        if self._seen_version != self._pool.version:
            self._seen_version = self._pool.version
            for session in self.running:
                self._share_more(session)

    def remember(self, session: Session) -> None:
        """Let others share what is computed of a session that is known to be free of NaN.

        NOTE: the last token may have been computed as a node that ended the answer, whose row nobody looked at.
        """
        length = min(session.num_computed, len(session.tokens) - 1)
        self._pool.remember(session.tokens[:length], session.slots[:length], session.opened.adapter)

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
        if poisoned:  # one of them may be of the last committed token, whose row nobody looked at
            self._clear_slots(poisoned)
        self._pool.release(rejected)

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

    def _share_more(self, session: Session) -> None:
        """Take over what another session has computed of this one's prompt since it was admitted."""
        if session.num_pending <= 1:
            return
        shared = self._pool.share(session.tokens, session.opened.adapter, more_than=session.num_computed)
        if shared:
            self._release(session.slots[: len(shared)], poisoned=session.slots[: session.num_computed])
            session.slots[: len(shared)] = shared
            session.num_computed = session.num_shared = len(shared)

    def _preempt_newest(self) -> Session:
        victim = self.running.pop()
        self._give_back(victim, is_poisoned=False)
        victim.num_computed = 0
        victim.phase = Phase.QUEUED
        victim.is_cold = True
        _insert(self.queued, victim)
        self.num_preempted += 1
        self._on_preempted(victim)
        return victim

    def _give_back(self, session: Session, *, is_poisoned: bool) -> None:
        if not (is_poisoned or session.is_cold):
            self.remember(session)
        slots, session.slots = session.slots, []
        if is_poisoned:
            self._release(slots, poisoned=slots)
        elif session.is_cold:
            # A prompt's rows have no logits, so what a half-computed prompt left is not known to be free of NaN.
            self._release(slots, poisoned=slots[session.num_shared : session.num_computed])
        else:
            self._pool.release(slots)

    def _release(self, slots: Sequence[int], *, poisoned: Sequence[int]) -> None:
        """Zero those of the slots that may hold NaN, before anybody can have them.

        What others hold, or what is cached, is left alone: it was sound when it came to be shared, and nobody has
        written to it since.
        """
        suspects = set(poisoned)
        suspects.intersection_update(self._pool.release(slots))
        if suspects:
            self._clear_slots(sorted(suspects))


def _insert(sessions: list[Session], session: Session) -> None:
    sessions.append(session)
    sessions.sort(key=lambda other: other.serial)
