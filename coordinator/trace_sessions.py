"""One session on one worker, as its request's trace knows it.

Owns: its clock on ours, and its `prefill` spans. Must not know: rounds, other sessions, messages.
"""

from __future__ import annotations

from collections.abc import Callable

from coordinator.events import Kind
from coordinator.trace_layout import SessionClock
from coordinator.trace_spans import SpanMaker, name_worker, prefill_attributes
from specpipe.reports import Report, StepRecord
from specpipe.spans import Process, Span

NUM_FIRST_REPORTS = 3
"""Reports after which a session's clock is known: one alone may have waited long on its way."""

Step = tuple[StepRecord, tuple[float, float]]
"""What a worker told of a step, and where it lies: start and end."""


class SessionTrace:
    """From Open to its last message. `emit` gets its spans."""

    def __init__(self, kind: Kind, process: Process, opened_ms: float, maker: SpanMaker, emit: Callable[[Span], None]):
        self.kind = kind
        self.worker = name_worker(process)
        self.clock = SessionClock(opened_ms)
        self.is_over = False
        self.first_commit_ms: float | None = None
        self._opened_ms = opened_ms
        self._maker = maker
        self._emit = emit
        self._num_reports = 0
        self._prefill: list[Step] = []  # told and not written yet
        self._has_prefill = False  # one was written

    @property
    def address(self) -> str:
        return self.worker.process.address

    @property
    def is_new(self) -> bool:
        """It has told something, and where that lies is not certain yet."""
        return not self.is_over and 0 < self._num_reports < NUM_FIRST_REPORTS

    def hear(self, report: Report, now_ms: float) -> None:
        self._num_reports += 1
        self.clock.before(now_ms, report.since_open_ms)

    def place(self, record: StepRecord, not_before_ms: float = 0.0) -> tuple[float, float]:
        return self.clock.place(record.step, record.since_open_ms, record.forward_ms, not_before_ms)

    # Prefill

    @property
    def num_held(self) -> int:
        """Steps of a prefill whose end has not been told."""
        return len(self._prefill)

    def add_prefill(self, record: StepRecord) -> None:
        self._prefill.append((record, self.place(record)))

    def end_prefill(self, record: StepRecord, times_ms: tuple[float, float]) -> None:
        """The first step with a row to decode ends the prefill; of a short prompt it is all of it."""
        if self._prefill or not self._has_prefill:
            self._prefill.append((record, times_ms))
            self._write_prefill()

    def end(self, now_ms: float, *, error: str, request_error: str) -> None:
        """It is over. `error`: it was lost; `request_error`: its request has ended so."""
        self.is_over = True
        if self._prefill:
            self._write_prefill(error)
        elif not self._has_prefill:
            self._write_untold_prefill(now_ms, error or request_error)

    def _write_prefill(self, error: str = "") -> None:
        """What was told of it as one span."""
        steps, self._prefill, self._has_prefill = self._prefill, [], True
        self._emit(
            self._maker.span(
                "prefill",
                steps[0][1][0],
                steps[-1][1][1],
                process=self.worker.process,
                attributes=prefill_attributes(self.worker.attributes, [record for record, _ in steps]),
                error=error,
            )
        )

    def _write_untold_prefill(self, end_ms: float, error: str) -> None:
        """As seen from here: until the first commit, or until the session was lost or the request ended before."""
        if self.first_commit_ms is not None:
            end_ms, error = self.first_commit_ms, ""
        elif not error or self.kind is Kind.DRAFT:
            return
        attributes = self.worker.attributes
        self._emit(self._maker.span("prefill", self._opened_ms, end_ms, attributes=attributes, error=error))
