"""Between specpipe.reports and protobuf, both ways; see specpipe.codec for the rules of both directions."""

from __future__ import annotations

from typing import Any, Final

from specpipe.codec_fields import check_duration
from specpipe.errors import InvalidRequestError
from specpipe.reports import MAX_REPORT_RECORDS, Outcome, Report, SessionEvent, SessionEventKind, StepKind, StepRecord
from specpipe.rpc.v1 import worker_pb2

MAX_RANKS: Final = 1024
MAX_DRAFT_STEPS: Final = 4096
_DURATIONS: Final = ("since_open_ms", "forward_ms", "share_ms", "queue_ms", "exposed_ms")

_KIND_TO_PB: Final = {kind: worker_pb2.StepKind.Value(f"STEP_KIND_{kind.name}") for kind in StepKind}
_KIND_FROM_PB: Final = {number: kind for kind, number in _KIND_TO_PB.items()}
_OUTCOME_TO_PB: Final = {
    outcome: worker_pb2.Outcome.Value(f"OUTCOME_{'UNSPECIFIED' if outcome is Outcome.NONE else outcome.name}")
    for outcome in Outcome
}
_OUTCOME_FROM_PB: Final = {number: outcome for outcome, number in _OUTCOME_TO_PB.items()}
_EVENT_TO_PB: Final = {
    kind: worker_pb2.SessionEventKind.Value(f"SESSION_EVENT_KIND_{kind.name}") for kind in SessionEventKind
}
_EVENT_FROM_PB: Final = {number: kind for kind, number in _EVENT_TO_PB.items()}
_PLAIN: Final = [name for name in StepRecord.__slots__ if name not in ("kind", "outcome", "draft_steps", "rank_ms")]


def report_to_pb(report: Report) -> worker_pb2.Report:
    return worker_pb2.Report(
        session=report.session,
        since_open_ms=report.since_open_ms,
        steps=map(_step_to_pb, report.steps),
        events=(
            worker_pb2.SessionEvent(kind=_EVENT_TO_PB[e.kind], since_open_ms=e.since_open_ms, base=e.base)
            for e in report.events
        ),
        num_lost=report.num_lost,
    )


def report_from_pb(report_pb: worker_pb2.Report) -> Report:
    """Raises InvalidRequestError for what is too long or no duration. Records of a kind that this version does not
    know are counted as lost."""
    if max(len(report_pb.steps), len(report_pb.events)) > MAX_REPORT_RECORDS:
        raise InvalidRequestError(f"a report has more than {MAX_REPORT_RECORDS} records")
    check_duration("since_open_ms", report_pb.since_open_ms)
    steps = tuple(_step_from_pb(step) for step in report_pb.steps if step.kind in _KIND_FROM_PB)
    events = tuple(_event_from_pb(event) for event in report_pb.events if event.kind in _EVENT_FROM_PB)
    num_unknown = len(report_pb.steps) - len(steps) + len(report_pb.events) - len(events)
    return Report(
        session=report_pb.session,
        since_open_ms=report_pb.since_open_ms,
        steps=steps,
        events=events,
        num_lost=report_pb.num_lost + num_unknown,
    )


def _step_to_pb(step: StepRecord) -> worker_pb2.StepRecord:
    return worker_pb2.StepRecord(
        kind=_KIND_TO_PB[step.kind],
        outcome=_OUTCOME_TO_PB[step.outcome],
        draft_steps=step.draft_steps,
        rank_ms=step.rank_ms,
        **{name: getattr(step, name) for name in _PLAIN},
    )


def _step_from_pb(step_pb: worker_pb2.StepRecord) -> StepRecord:
    if len(step_pb.rank_ms) > MAX_RANKS or len(step_pb.draft_steps) > MAX_DRAFT_STEPS:
        raise InvalidRequestError("a step record names too many ranks or draft steps")
    plain: dict[str, Any] = {name: getattr(step_pb, name) for name in _PLAIN}
    for name in _DURATIONS:
        check_duration(name, plain[name])
    for value in step_pb.rank_ms:
        check_duration("rank_ms", value)
    return StepRecord(
        kind=_KIND_FROM_PB[step_pb.kind],
        outcome=_OUTCOME_FROM_PB.get(step_pb.outcome, Outcome.NONE),
        draft_steps=tuple(step_pb.draft_steps),
        rank_ms=tuple(step_pb.rank_ms),
        **plain,
    )


def _event_from_pb(event_pb: worker_pb2.SessionEvent) -> SessionEvent:
    check_duration("since_open_ms", event_pb.since_open_ms)
    return SessionEvent(kind=_EVENT_FROM_PB[event_pb.kind], since_open_ms=event_pb.since_open_ms, base=event_pb.base)
