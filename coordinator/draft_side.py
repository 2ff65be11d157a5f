"""The draft sessions of a request: whether one is wanted, which it is, which one is to take over, when to ask again.

Owns: those, and what the target was told of drafts that do not come. Must not know: events, messages, clocks.
Whatever happens on this side costs the request speed and nothing else.

`session` drafts. A `successor` is opened beside it where drafting is to move to another worker; it hears every commit,
and takes over when it has drafted something, or at once when the first is gone. So nothing is drafted twice for long,
and a successor that fails costs nothing.
"""

from __future__ import annotations

from coordinator.events import Cause, Placement
from specpipe.types import Mode, SpeculationParams

RETRY_MS = 250.0  # first wait before a draft worker is asked for again; doubles when a session there fails
MAX_RETRY_MS = 30_000.0
MOVE_RETRY_MS = 1_000.0  # a successor was lost or refused: so long until another one is tried
MAX_TAKEOVER_MS = 30_000.0  # a successor that has drafted nothing by then is given up
STAY_MS = 10_000.0  # drafting that has moved is not moved for balance again for so long


class DraftSide:
    """Times are given, in milliseconds."""

    def __init__(self, speculation: SpeculationParams) -> None:
        self.session: Placement | None = None
        self.successor: Placement | None = None
        self.is_wanted = speculation.drafter == "model" and speculation.mode is not Mode.OFF
        self._says_nothing_comes = speculation.drafter == "model"
        self._told_at: tuple[Placement | None, int] = (None, 0)
        self._retry_ms = RETRY_MS
        self._retry_at_ms = 0.0
        self._has_drafted = False  # the session has
        self._move_at_ms = 0.0  # not before
        self._level_at_ms = 0.0  # not for balance before
        self._give_up_at_ms = 0.0  # the successor

    @property
    def sessions(self) -> list[Placement]:
        """All that are open."""
        return [placement for placement in (self.session, self.successor) if placement is not None]

    @property
    def latest(self) -> Placement | None:
        """Where it will be drafted if all goes well."""
        return self.successor or self.session

    def find(self, session: int) -> Placement | None:
        """The open session of this id."""
        return next((placement for placement in self.sessions if placement.session == session), None)

    # Asking

    def is_due(self, now_ms: float) -> bool:
        """A draft worker is to be asked for."""
        return self.session is None and self.is_wanted and now_ms >= self._retry_at_ms

    def seek(self, now_ms: float) -> None:
        """One is asked for now."""
        self._retry_at_ms = now_ms + self._retry_ms

    def begin(self, placement: Placement) -> None:
        """It drafts from now on."""
        self.session, self._has_drafted = placement, False

    def ask_anew(self, now_ms: float) -> None:
        """A worker has joined: what others have refused does not count any more."""
        self._retry_ms = RETRY_MS
        self._retry_at_ms = self._move_at_ms = now_ms

    # Moving

    def may_move(self, cause: Cause, now_ms: float) -> bool:
        """For balance only what drafts well and has not moved lately."""
        can_move = self.session is not None and self.successor is None and now_ms >= self._move_at_ms
        return can_move and (cause is not Cause.LOAD or (self._has_drafted and now_ms >= self._level_at_ms))

    def begin_move(self, placement: Placement, now_ms: float) -> None:
        """It is opened beside the session."""
        self.successor = placement
        self._level_at_ms = now_ms + STAY_MS
        self._give_up_at_ms = now_ms + MAX_TAKEOVER_MS

    def replace(self, placement: Placement, now_ms: float) -> list[Placement]:
        """It drafts from now on instead of what is there. Returns the sessions that are to be closed."""
        replaced = self.close()
        self.begin(placement)
        self._level_at_ms = now_ms + STAY_MS
        return replaced

    def hear_drafts(self, placement: Placement) -> Placement | None:
        """An open session has drafted something. Returns the one that is to be closed, if another took over."""
        if placement != self.successor:
            self._has_drafted = True
            return None
        relieved, self.session, self.successor = self.session, self.successor, None
        self._has_drafted = True
        return relieved

    def overdue_successor(self, now_ms: float) -> Placement | None:
        """One that should have taken over long ago."""
        return self.successor if now_ms >= self._give_up_at_ms else None

    # Ends

    def lose(self, placement: Placement, now_ms: float) -> None:
        """Its worker is gone: another may take over at once."""
        self._end(placement, now_ms, now_ms + MOVE_RETRY_MS)

    def fail(self, placement: Placement, now_ms: float, *, is_retryable: bool) -> None:
        """It failed on its worker. What can never work is not tried again."""
        if self.successor is None:
            self.is_wanted = self.is_wanted and is_retryable
            self._retry_ms = min(2 * self._retry_ms, MAX_RETRY_MS)
        move_ms = MOVE_RETRY_MS if is_retryable else MAX_RETRY_MS
        self._end(placement, now_ms + self._retry_ms, now_ms + move_ms)

    def give_up(self, placement: Placement, now_ms: float) -> None:
        """Its worker is of no use to this request for a long while."""
        self._end(placement, now_ms + MAX_RETRY_MS, now_ms + MAX_RETRY_MS)

    def close(self) -> list[Placement]:
        """No session any more. Returns those that were open."""
        closed, self.session, self.successor = self.sessions, None, None
        return closed

    def must_tell(self, target: Placement | None, base: int) -> bool:
        """Whether the target is to hear that no draft comes below these tokens; once for each base it is."""
        is_drafted = self.session is not None and self._has_drafted
        if is_drafted or target is None or not self._says_nothing_comes or self._told_at == (target, base):
            return False
        self._told_at = (target, base)
        return True

    def _end(self, placement: Placement, retry_at_ms: float, move_at_ms: float) -> None:
        """What is left goes on. Of the two times the one counts that is about what ended."""
        if placement == self.successor:
            self.successor, self._move_at_ms = None, move_at_ms
        else:
            self.session, self.successor, self._has_drafted = self.successor, None, False
            self._retry_at_ms = retry_at_ms
