"""The KV slots of a draft worker's sessions: whether one fits, shared prefixes, what is given back and to whom.

Owns: the slot pool. Must not know: clocks, messages, who is to give way when slots run out (draft_worker.scheduler).
Slot lists change only between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from draft_worker.scheduler import SessionWork
from draft_worker.session import DraftSession
from specpipe.engine.slots import SlotPool
from specpipe.types import Origin

ADMISSION_MARGIN = 64  # slots left for a session's tree and growth when it is admitted or taken up again


class Room:
    def __init__(self, pool: SlotPool, clear_slots: Callable[[Sequence[int]], None]) -> None:
        self._pool = pool
        self._clear_slots = clear_slots
        self._seen_version = pool.version

    @property
    def pool(self) -> SlotPool:
        """To look at."""
        return self._pool

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def fits(self, session: DraftSession, sessions: Iterable[DraftSession]) -> bool:
        """Whether a session without slots can be computed beside the others, and what it drafts as well."""
        if not session.can_draft:
            return True
        promised = sum(other.num_pending for other in sessions if other is not session)
        needed = self._pool.num_wanted(session.tokens, session.adapter) + ADMISSION_MARGIN
        return self._pool.can_allocate(promised + needed)

    def share(self, session: DraftSession) -> None:
        """Take over what other sessions have computed of this one's committed tokens, if that is more than it has."""
        if session.num_pending <= 1:
            return
        shared = self._pool.share(session.tokens, session.adapter, more_than=len(session.slots))
        if shared:
            own, session.slots = session.slots, shared
            self._release(own, suspects=own[session.num_sound :])
            session.num_sound = session.num_shared = len(shared)

    def share_more(self, sessions: Iterable[DraftSession]) -> None:
        """Let all share, if there is more to share than when that was last asked."""
        if self._seen_version != self._pool.version:
            self._seen_version = self._pool.version
            for session in sessions:
                self.share(session)

    def remember(self, session: DraftSession) -> None:
        """Let others share what is computed of a session and known to be free of NaN."""
        count = session.num_sound
        self._pool.remember(session.tokens[:count], session.slots[:count], session.adapter)

    def allocate(self, work: SessionWork) -> list[int]:
        """Slots of the committed rows; nodes get theirs."""
        for node in work.nodes:
            (node.slot,) = self._pool.allocate(1)
        return self._pool.allocate(work.num_committed)

    def commit(self, session: DraftSession, tokens: Sequence[int], origins: Sequence[Origin]) -> None:
        """See DraftSession.commit: slots of nodes that left the tree are free."""
        is_sound = session.num_sound == len(session.slots)
        self._pool.release(session.commit(tokens, origins))
        if is_sound:  # so are the nodes whose slots have joined: each had a row of its own
            session.num_sound = len(session.slots)

    def give_back(self, session: DraftSession, *, is_poisoned: bool = False) -> None:
        """Take all slots of a session; unless they may hold NaN, others may share what is computed in them."""
        suspects = session.held_slots() if is_poisoned else session.slots[session.num_sound :]
        if not is_poisoned:
            self.remember(session)
        self._release(session.reset(), suspects=suspects)
        session.num_sound = session.num_shared = 0
        session.is_cold = True

    def check(self, sessions: Iterable[DraftSession]) -> None:
        """Raise InvariantError unless free + referenced slots = all."""
        self._pool.check(slot for session in sessions for slot in session.held_slots())

    def _release(self, slots: list[int], *, suspects: list[int]) -> None:
        """Zero what may hold NaN, but for slots that others hold or that are cached: these were sound when shared."""
        freed = set(self._pool.release(slots)).intersection(suspects)
        if freed:
            self._clear_slots(sorted(freed))
