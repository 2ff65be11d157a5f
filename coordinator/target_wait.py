"""How long a request goes without a target worker that works on it.

Owns: since when, and why. Must not know: events, sessions, clocks: times are given, in milliseconds.
"""

from __future__ import annotations

from specpipe.errors import WorkerUnavailableError


class TargetWait:
    """It begins when a worker is sought or lost, and ends with the first commit.

    Of a request in the queue: it begins when no worker is ready, and ends when one is.
    """

    def __init__(self, max_ms: float) -> None:
        self.reason = "no target worker is ready"
        """Of the last worker, why it does not work on the request."""
        self._max_ms = max_ms
        self._since_ms: float | None = None

    def begin(self, since_ms: float) -> None:
        """Does nothing while it waits already."""
        if self._since_ms is None:
            self._since_ms = since_ms

    def begin_again(self, since_ms: float, reason: str) -> None:
        """A worker was lost that had done nothing since then."""
        self._since_ms, self.reason = since_ms, reason

    def queued(self, received_ms: float, now_ms: float, unready_ms: float | None) -> None:
        """The request is in the queue, and no worker has been ready for so long; None: one is."""
        if unready_ms is None:
            self.end()
        else:
            self.begin(max(received_ms, now_ms - unready_ms))

    def end(self) -> None:
        self._since_ms = None

    def check(self, now_ms: float) -> None:
        """Raise WorkerUnavailableError if the wait is over."""
        if self._since_ms is not None and now_ms - self._since_ms >= self._max_ms:
            waited_s = (now_ms - self._since_ms) / 1000
            raise WorkerUnavailableError(f"no target worker took the request within {waited_s:.1f} s: {self.reason}")
