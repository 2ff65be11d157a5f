"""Which sessions sit out a step for the extension that they lack, and the time that this cost them.

Owns: what one worker has learned of how fast drafts come and of its own pace, and since when nothing runs because of
waits. Must not know: messages, slots, clocks (times come in, as seconds). `target_worker.waiting` has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from specpipe.step_costs import StepCosts
from specpipe.types import Commit, Mode, RoundStats
from target_worker.session import Session
from target_worker.waiting import ExtensionTimes, Pace


class Waits:
    """The waits of all sessions of one worker."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._times = ExtensionTimes()
        self._pace = Pace()
        self._exposed: tuple[float, Sequence[Session]] | None = None  # since when nothing runs, and who waits

    def sits_out(self, session: Session, now: float, *, is_sole: bool) -> bool:
        """Whether a session does not take part in the step that would begin now."""
        watch = session.watch
        if watch.wait_until is not None:
            if now < watch.wait_until and (is_sole or session.mode is Mode.SYNC):
                return True
            self._end(session, now, has_come=False)
            return False
        if session.num_pending > 1 or session.has_draft or not watch.may_wait():
            return False
        session.draft_ngram()
        watch.on_miss(now)
        limit_ms = self._limit_ms(session, is_sole=is_sole)
        if limit_ms > 0:
            watch.begin(now, limit_ms)
        return limit_ms > 0

    def on_extension(self, session: Session, now: float, *, arrived_s: float) -> None:
        """One was grafted: it may be what the session waits for."""
        watch = session.watch
        if session.has_draft and (time_ms := watch.take_miss_ms(arrived_s)) is not None:
            self._times.observe(time_ms)
        if watch.wait_until is not None and (session.has_draft or watch.is_exhausted):
            self._end(session, now, has_come=True)

    def on_preempted(self, session: Session, now: float) -> None:
        """It has its text to compute again, which is more than to wait; below the same base it may wait once more."""
        if session.watch.wait_until is not None:
            self._end(session, now, has_come=True)

    def on_round(self, session: Session, commit: Commit, round_ms: float | None) -> None:
        """A session committed. `round_ms`: since the end of its last step, if that was the worker's last one and the
        session is the only one; then it tells of the pace."""
        if round_ms is not None:
            self._pace.observe(len(commit.tokens), round_ms)
        self._pace.observe_guesses(*session.last_guesses)

    def begin_exposure(self, sessions: Sequence[Session], now: float) -> None:
        """From now on nothing runs, since all that could run wait."""
        self._exposed = (now, sessions)

    def end_exposure(self, now: float) -> None:
        """The time since `begin_exposure`, if that was called, was exposed draft time of those who waited."""
        if self._exposed is None:
            return
        since, sessions = self._exposed
        self._exposed = None
        for session in sessions:
            session.stats += RoundStats(exposed_ms=(now - since) * 1e3)
            if session.recorder is not None:
                session.recorder.become_ready(now)

    def _limit_ms(self, session: Session, *, is_sole: bool) -> float:
        if session.mode is Mode.SYNC:
            return session.watch.sync_limit_ms()
        if not is_sole:
            return 0.0
        plain_ms = self._costs.estimate(1, len(session.tokens)) + self._costs.gap_ms
        return self._times.limit_ms(self._pace.worth_ms(plain_ms, 1.0 + session.expected_accepted))

    def _end(self, session: Session, now: float, *, has_come: bool) -> None:
        session.watch.end(has_come=has_come)
        session.become_ready(now)
