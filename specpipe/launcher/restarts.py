"""How long a process that has ended waits before it is started again. Pure."""

from __future__ import annotations

from typing import Final

FIRST_DELAY_S: Final = 1.0
MAX_DELAY_S: Final = 30.0
STABLE_AFTER_S: Final = 60.0


class RestartDelays:
    """1, 2, 4 ... 30 s; and from the beginning again for a process that lived for a while."""

    def __init__(
        self, *, first_s: float = FIRST_DELAY_S, max_s: float = MAX_DELAY_S, stable_after_s: float = STABLE_AFTER_S
    ) -> None:
        self._first_s, self._max_s, self._stable_after_s = first_s, max_s, stable_after_s
        self._next_s = first_s

    def after(self, lived_s: float) -> float:
        """The delay for a process that served for `lived_s` seconds; 0 if it did not start."""
        if lived_s > self._stable_after_s:
            self._next_s = self._first_s
        delay_s, self._next_s = self._next_s, min(2 * self._next_s, self._max_s)
        return delay_s
