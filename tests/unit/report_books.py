"""What must hold between what a worker reports of a session and what it says besides: asserted as messages come."""

from __future__ import annotations

import itertools
import math

from specpipe.reports import Outcome, Report, SessionEvent, SessionEventKind, StepKind, StepRecord
from specpipe.types import Closed, Commit, Extension, Mode, Open, RoundStats, SessionMessage

SLACK_MS = 1e-6  # of sums of floats


class Book:
    """Every report of one session, and that they tell one story: in order, without overlap, nothing ahead of time."""

    def __init__(self, opened: Open) -> None:
        self.opened = opened
        self.reports: list[Report] = []
        self._is_closed = False

    @property
    def steps(self) -> list[StepRecord]:
        return [step for report in self.reports for step in report.steps]

    @property
    def events(self) -> list[SessionEvent]:
        return [event for report in self.reports for event in report.events]

    def count(self, kind: SessionEventKind) -> int:
        return sum(event.kind is kind for event in self.events)

    def take(self, message: SessionMessage) -> None:
        if isinstance(message, Report):
            self._take_report(message)
        self._is_closed = self._is_closed or isinstance(message, Closed)

    def _take_report(self, report: Report) -> None:
        assert self.opened.wants_reports, "a report that nobody asked for"
        assert not self._is_closed, "a report after the session's last message"
        assert report.steps or report.events
        assert report.num_lost == 0
        said_before_ms = self.reports[-1].since_open_ms if self.reports else 0.0
        assert report.since_open_ms >= said_before_ms
        for event in report.events:
            assert 0.0 <= event.since_open_ms <= report.since_open_ms + SLACK_MS
        self.reports.append(report)
        for step in report.steps:
            assert step.since_open_ms + step.forward_ms <= report.since_open_ms + SLACK_MS
            assert 1 <= step.num_rows <= step.batch_tokens
            assert 1 <= step.batch_sessions <= step.batch_tokens
        for before, step in itertools.pairwise([None, *self.steps]):
            self._check_turn(before, step)  # type: ignore[arg-type]

    def _check_turn(self, before: StepRecord | None, step: StepRecord) -> None:
        """Between two steps a session was ready, or waited, or neither, but never two of these at once."""
        end_ms = 0.0 if before is None else before.since_open_ms + before.forward_ms
        assert before is None or before.step < step.step
        assert step.queue_ms >= 0.0
        assert step.exposed_ms >= 0.0
        assert step.since_open_ms - end_ms >= step.queue_ms + step.exposed_ms - SLACK_MS


class RoundBook(Book):
    """Of a target worker."""

    def __init__(self, opened: Open) -> None:
        super().__init__(opened)
        self._num_told = 0  # records before the last commit

    @property
    def rounds(self) -> list[StepRecord]:
        return [step for step in self.steps if step.kind is StepKind.VERIFY]

    def take(self, message: SessionMessage) -> None:
        super().take(message)
        if self.opened.wants_reports and isinstance(message, Commit) and message.round > 0:
            self._take_commit(message)

    def _take_commit(self, commit: Commit) -> None:
        """Its record was told before, and says the same. `commit` is of one round."""
        *prefills, step = self.steps[self._num_told :]
        self._num_told = len(self.steps)
        assert all(prefill.kind is StepKind.PREFILL for prefill in prefills)
        assert step.kind is StepKind.VERIFY
        stats = commit.stats
        assert (step.round, step.base, step.num_committed) == (commit.round, commit.base, len(commit.tokens))
        assert step.exposed_ms == stats.exposed_ms
        assert (step.num_late, step.num_stale) == (stats.num_late, stats.num_stale)
        assert (step.num_verified, step.num_accepted) == (stats.num_verified, stats.num_accepted)
        assert step.num_verified <= step.num_tree_nodes
        assert step.num_rows >= 1 + step.num_verified
        assert step.draft_steps == commit.verified_draft_steps
        assert step.outcome is _outcome(stats)
        assert 1 + len(prefills) == stats.num_steps
        assert math.isclose(sum(record.forward_ms for record in (*prefills, step)), stats.step_ms)


class DraftBook(Book):
    """Of a draft worker."""

    def __init__(self, opened: Open) -> None:
        super().__init__(opened)
        self._num_told = 0  # records before the last extension that told of time

    def take(self, message: SessionMessage) -> None:
        super().take(message)
        if self.opened.wants_reports and isinstance(message, Extension):
            self._take_extension(message)

    def _take_extension(self, extension: Extension) -> None:
        """The step that it tells was told before, and so was the time."""
        drafts = [step for step in self.steps if step.kind is StepKind.DRAFT]
        if extension.tokens:
            assert extension.draft_step in {step.step for step in drafts}
        if extension.draft_share_ms > 0.0 and self.opened.speculation.mode is not Mode.SYNC:
            told = sum(step.share_ms for step in drafts[self._num_told :])
            assert math.isclose(extension.draft_share_ms, told)
            self._num_told = len(drafts)


def _outcome(stats: RoundStats) -> Outcome:
    for count, outcome in (
        (stats.num_lookup_hits, Outcome.LOOKUP),
        (stats.num_hits, Outcome.HIT),
        (stats.num_misses, Outcome.MISS),
    ):
        if count:
            return outcome
    return Outcome.NONE
