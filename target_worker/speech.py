"""What a target worker says of its sessions, in which order and when.

Owns: what waits to be said. Must not know: what a step does, gRPC. A report never comes after what it led to, and
nothing comes after a session's Closed.
"""

from __future__ import annotations

from collections.abc import Callable

from specpipe.types import Closed, Commit, Failed, SessionMessage
from target_worker.session import Session

Send = Callable[[int, SessionMessage], None]


class Speech:
    """`clock` gives seconds; it is asked where a session is reported, and nowhere else."""

    def __init__(self, send: Send, clock: Callable[[], float]) -> None:
        self._send = send
        self._clock = clock
        self._unsaid: list[tuple[Session, Commit | None]] = []  # with None: only a report

    def later(self, session: Session, commit: Commit | None = None) -> None:
        """Say what a step led to once the next one is about to run: not sooner, since the event loop would work while
        that is planned."""
        self._unsaid.append((session, commit))

    def flush(self) -> None:
        """Say it now."""
        for session, commit in self._unsaid:
            self._report(session)
            if commit is not None:
                self._send(session.link, commit)
        self._unsaid.clear()

    def now(self, link: int, message: SessionMessage) -> None:
        """After all that was to be said before."""
        self.flush()
        self._send(link, message)

    def last(self, session: Session, failed: Failed | None = None) -> None:
        """A session has ended: what was done for it, why it failed, and that nothing follows."""
        self.flush()
        self._report(session)
        if failed is not None:
            self._send(session.link, failed)
        self._send(session.link, Closed(session=session.session, length=len(session.tokens)))

    def forget(self, link: int) -> None:
        """Nobody listens there any more."""
        self._unsaid = [(session, commit) for session, commit in self._unsaid if session.link != link]

    def _report(self, session: Session) -> None:
        report = None if session.recorder is None else session.recorder.take(self._clock())
        if report is not None:
            self._send(session.link, report)
