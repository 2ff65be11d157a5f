"""Makes spans of one request: ids, times and attribute names.

Owns: how a moment becomes unix time, how attributes are called. Must not know: what happened when, messages.
docs/tracing.md lists every span and attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specpipe.reports import Outcome, StepRecord
from specpipe.spans import AttributeValue, Process, Span, SpanEvent, SpanKind

Attributes = dict[str, AttributeValue]

MAX_NANOS = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceIdentity:
    """Which trace a request belongs to."""

    trace_id: int
    span_id: int  # of its `generate`
    parent_id: int = 0  # the caller's span; 0: none
    trace_state: str = ""
    is_sampled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanMaker:
    """Times are milliseconds of the coordinator's monotonic clock, of which one moment is known as unix time."""

    identity: TraceIdentity
    process: Process  # the coordinator
    new_id: Callable[[], int]  # of spans, never 0
    anchor_ms: float
    anchor_unix_nanos: int

    def nanos(self, at_ms: float) -> int:
        """Within what every receiver can hold, whatever durations a worker tells."""
        return min(max(0, self.anchor_unix_nanos + round((at_ms - self.anchor_ms) * 1e6)), MAX_NANOS)

    def span(
        self,
        name: str,
        start_ms: float,
        end_ms: float,
        *,
        attributes: Mapping[str, AttributeValue],
        span_id: int = 0,
        parent_id: int | None = None,
        process: Process | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        events: tuple[SpanEvent, ...] = (),
        links: tuple[int, ...] = (),
        error: str = "",
    ) -> Span:
        """By default a child of `generate`, of the coordinator itself."""
        return Span(
            name=name,
            trace_id=self.identity.trace_id,
            span_id=span_id or self.new_id(),
            parent_id=self.identity.span_id if parent_id is None else parent_id,
            kind=kind,
            process=process or self.process,
            start_unix_nanos=self.nanos(start_ms),
            end_unix_nanos=self.nanos(max(start_ms, end_ms)),
            attributes=attributes,
            events=events,
            links=links,
            error=error,
            trace_state=self.identity.trace_state,
        )

    def event(self, name: str, at_ms: float, **attributes: AttributeValue) -> SpanEvent:
        named = {f"specpipe.{key}": value for key, value in attributes.items()}
        return SpanEvent(name=name, unix_nanos=self.nanos(at_ms), attributes=named)


@dataclass(frozen=True, slots=True)
class WorkerName:
    """A worker as spans name it: its process, and the attributes that all its spans have."""

    process: Process
    attributes: Attributes


def name_worker(process: Process) -> WorkerName:
    return WorkerName(process, _worker_attributes(process))


def _worker_attributes(process: Process) -> Attributes:
    return {"specpipe.worker": process.address, "specpipe.incarnation": f"{process.incarnation:016x}"}


def step_attributes(worker: Attributes, record: StepRecord) -> Attributes:
    """What verify and draft spans have in common."""
    return {
        **worker,
        "specpipe.step": record.step,
        "specpipe.base": record.base,
        "specpipe.forward_ms": record.forward_ms,
        "specpipe.queue_ms": record.queue_ms,
        "specpipe.num_rows": record.num_rows,
        "specpipe.num_tree_nodes": record.num_tree_nodes,
        "specpipe.batch_sessions": record.batch_sessions,
        "specpipe.batch_tokens": record.batch_tokens,
    }


def verify_attributes(worker: Attributes, record: StepRecord, number: int) -> Attributes:
    return {
        **step_attributes(worker, record),
        "specpipe.round": number,
        "specpipe.num_verified": record.num_verified,
        "specpipe.num_accepted": record.num_accepted,
        "specpipe.exposed_ms": record.exposed_ms,
    }


def draft_attributes(worker: Attributes, record: StepRecord) -> Attributes:
    return {**step_attributes(worker, record), "specpipe.share_ms": record.share_ms}


def prefill_attributes(worker: Attributes, records: Sequence[StepRecord]) -> Attributes:
    return {
        **worker,
        "specpipe.num_steps": len(records),
        "specpipe.num_rows": sum(record.num_rows for record in records),
        "specpipe.forward_ms": sum(record.forward_ms for record in records),
        "specpipe.queue_ms": sum(record.queue_ms for record in records),
    }


def round_attributes(record: StepRecord) -> Attributes:
    return {
        "specpipe.base": record.base,
        "specpipe.outcome": outcome_of(record),
        "specpipe.num_tree_nodes": record.num_tree_nodes,
        "specpipe.num_verified": record.num_verified,
        "specpipe.num_accepted": record.num_accepted,
        "specpipe.num_committed": record.num_committed,
        "specpipe.queue_ms": record.queue_ms,
    }


def outcome_of(record: StepRecord) -> str:
    """A miss is told apart by what came too late for it."""
    if record.outcome is not Outcome.MISS:
        return str(record.outcome.value)
    if record.num_late:
        return "late"
    return "stale" if record.num_stale else "miss"
