"""The next Report of one session, as a worker's loop writes it down.

Owns: `StepRun`, a step as all its sessions share it, and `Recorder`. Must not know: clocks (times come in, as seconds
of one clock), messages, what a step was for: the workers' own recorders say that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specpipe.reports import Report, SessionEvent, SessionEventKind, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """A step that has run."""

    number: int
    start_s: float
    end_s: float
    num_sessions: int
    num_rows: int
    rank_ms: Sequence[float] = ()

    @property
    def ms(self) -> float:
        return (self.end_s - self.start_s) * 1e3


class Recorder:
    """What was done for one session since its last Report. `opened_s` is when its Open came."""

    def __init__(self, session: int, opened_s: float) -> None:
        self._session = session
        self._opened_s = opened_s
        self._ready_s = opened_s  # since when it has been ready and was not run
        self._steps: list[StepRecord] = []
        self._events: list[SessionEvent] = []

    def become_ready(self, now_s: float) -> None:
        """Until now there was nothing to run for it."""
        self._ready_s = max(self._ready_s, now_s)

    def add_event(self, kind: SessionEventKind, now_s: float, *, base: int) -> None:
        self._events.append(SessionEvent(kind=kind, since_open_ms=self._since_open_ms(now_s), base=base))

    def take(self, now_s: float) -> Report | None:
        """What was written down since the last call, said now; None: nothing was."""
        if not (self._steps or self._events):
            return None
        steps, self._steps = self._steps, []
        events, self._events = self._events, []
        return Report.bounded(
            session=self._session, since_open_ms=self._since_open_ms(now_s), steps=tuple(steps), events=tuple(events)
        )

    def _add_step(self, run: StepRun, **values: Any) -> None:
        """`values`: what only the worker knows. The step ends the time in which the session was ready."""
        record = StepRecord(
            step=run.number,
            since_open_ms=self._since_open_ms(run.start_s),
            forward_ms=run.ms,
            queue_ms=max(0.0, run.start_s - self._ready_s) * 1e3,
            batch_sessions=run.num_sessions,
            batch_tokens=run.num_rows,
            rank_ms=tuple(run.rank_ms),
            **values,
        )
        self._steps.append(record)
        self._ready_s = run.end_s

    def _since_open_ms(self, at_s: float) -> float:
        return max(0.0, at_s - self._opened_s) * 1e3
