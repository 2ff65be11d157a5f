"""The draft session of a request: whether one is wanted, which it is, when the next one is asked for.

Owns: those three, and what the target was told of drafts that do not come. Must not know: events, messages, clocks.
Whatever happens on this side costs the request speed and nothing else.
"""

from __future__ import annotations

from coordinator.events import Placement
from specpipe.types import Mode, SpeculationParams

RETRY_MS = 250.0  # first wait before a draft worker is asked for again; doubles when a session there fails
MAX_RETRY_MS = 30_000.0


class DraftSide:
    """Times are given, in milliseconds."""

    def __init__(self, speculation: SpeculationParams) -> None:
        self.session: Placement | None = None
        self.is_wanted = speculation.drafter == "model" and speculation.mode is not Mode.OFF
        self._says_nothing_comes = speculation.drafter == "model"
        self._told_at: tuple[Placement | None, int] = (None, 0)
        self._retry_ms = RETRY_MS
        self._retry_at_ms = 0.0

    def is_due(self, now_ms: float) -> bool:
        """A draft worker is to be asked for."""
        return self.session is None and self.is_wanted and now_ms >= self._retry_at_ms

    def seek(self, now_ms: float) -> None:
        """One is asked for now."""
        self._retry_at_ms = now_ms + self._retry_ms

    def lose(self, now_ms: float) -> None:
        """Its worker is gone: another may take over at once."""
        self._end(now_ms)

    def fail(self, now_ms: float, *, is_retryable: bool) -> None:
        """It failed on its worker. What can never work is not tried again."""
        self.is_wanted = self.is_wanted and is_retryable
        self._retry_ms = min(2 * self._retry_ms, MAX_RETRY_MS)
        self._end(now_ms + self._retry_ms)

    def give_up(self, now_ms: float) -> None:
        """Its worker is of no use to this request for a long while."""
        self._end(now_ms + MAX_RETRY_MS)

    def must_tell(self, target: Placement | None, base: int) -> bool:
        """Whether the target is to hear that no draft comes below these tokens; once for each base it is."""
        if target is None or not self._says_nothing_comes or self._told_at == (target, base):
            return False
        self._told_at = (target, base)
        return True

    def _end(self, retry_at_ms: float) -> None:
        self.session = None
        self._retry_at_ms = retry_at_ms
