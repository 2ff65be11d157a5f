"""The numbers of a coordinator: requests, rounds, tokens, draft time, workers. docs/metrics.md defines each.

Owns: a coordinator's metrics, and what one request adds to them. Must not know: clocks, OpenTelemetry, protobuf.

They are sums of what the requests' own statistics are made of (`coordinator.statistics`), so that both agree exactly:
rounds and tokens are added with each commit, as far as it was delivered, draft times when the request is over, as what
was hidden of them is only certain then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from coordinator.events import (
    Admitted,
    Cause,
    Emit,
    Event,
    Fail,
    Instruction,
    Kind,
    Lost,
    Moving,
    Placement,
    Received,
    Unplaced,
    draft_has_moved,
)
from coordinator.metric_sums import DraftTimeMetrics, RequestMetrics, RoundMetrics
from coordinator.metric_workers import Coordinating, WorkerMetrics
from coordinator.state import RequestMachine
from specpipe.answers import Chunk, Finished, SpeculationStats
from specpipe.errors import RequestCancelledError, SpecpipeError
from specpipe.reports import Report
from specpipe.telemetry.instruments import Description, Instruments, Labels
from specpipe.telemetry.resources import PROVIDER
from specpipe.types import Closed, Commit, Failed, Mode


class TracingCounts(Protocol):
    """What tracing has done so far."""

    @property
    def num_exported(self) -> int: ...

    @property
    def num_dropped(self) -> Mapping[str, int]:
        """By cause."""
        ...


class CoordinatorMetrics:
    """`begin` for each request, `hear` for what workers report; `watch` says who is asked for gauges, 0 until then."""

    def __init__(self, instruments: Instruments) -> None:
        self.rounds = RoundMetrics(instruments)
        self.requests = RequestMetrics(instruments)
        self.draft_time = DraftTimeMetrics(instruments)
        self.workers = WorkerMetrics(instruments)
        lost = Description(
            name="specpipe.reports.lost", unit="{record}", text="Records of steps that workers dropped untold."
        )
        self._lost_records = instruments.counter(lost)
        self._instruments = instruments
        self._undrafted: set[RequestCount] = set()
        self._coordinator: Coordinating | None = None
        undrafted = "Of the running ones, want a draft worker and have none."
        self._gauge("queued", "Wait for their turn.", lambda: self._coordinator.num_waiting if self._coordinator else 0)
        self._gauge("running", "Are answered.", lambda: self._coordinator.num_running if self._coordinator else 0)
        self._gauge("undrafted", undrafted, lambda: len(self._undrafted))

    def watch(self, coordinator: Coordinating) -> None:
        self._coordinator = coordinator
        self.workers.watch(coordinator)

    def watch_tracing(self, tracing: TracingCounts) -> None:
        """Called once at most, before the start."""

        def about(name: str, unit: str, text: str, *labels: str) -> Description:
            return Description(name=f"specpipe.{name}", unit=unit, text=text, labels=labels)

        observe = self._instruments.observe
        exported = about("spans.exported", "{span}", "Taken by the OTLP receiver.")
        observe(exported, lambda: {(): tracing.num_exported})
        dropped = about("spans.dropped", "{span}", "Not taken by the OTLP receiver.", "cause")
        observe(dropped, lambda: {(cause,): count for cause, count in tracing.num_dropped.items()})

    def hear(self, report: Report) -> None:
        self._lost_records.add(report.num_lost)

    def begin(self, *, is_chat: bool, received_ms: float) -> RequestCount:
        return RequestCount(self, is_chat=is_chat, received_ms=received_ms)

    def note_drafted(self, request: RequestCount, *, is_drafted: bool) -> None:
        """Whether a running request that wants a draft worker has one; over, it does not want one any more."""
        (self._undrafted.discard if is_drafted else self._undrafted.add)(request)

    def _gauge(self, name: str, text: str, read: Callable[[], int]) -> None:
        about = Description(name=f"specpipe.requests.{name}", unit="{request}", text=text)
        self._instruments.gauge(about, lambda: {(): read()})


class RequestCount:
    """Adds what one request does. Times are milliseconds of the coordinator's clock."""

    def __init__(self, metrics: CoordinatorMetrics, *, is_chat: bool, received_ms: float) -> None:
        self._metrics = metrics
        self._operation = "chat" if is_chat else "text_completion"
        self._received_ms = received_ms
        self._machine: RequestMachine | None = None
        self._wants_draft = False
        self._is_drafted: bool | None = None  # None: not known yet
        self._target: Placement | None = None
        self._draft: Placement | None = None
        self._moving = Cause.LOAD  # why drafting last began to move

    def refuse(self, error: BaseException, now_ms: float) -> None:
        """It ends before it was submitted."""
        cause = error if isinstance(error, SpecpipeError) else None
        has_left = cause is None and not isinstance(error, Exception)  # cancelled while it was read
        self._metrics.requests.end("cancelled" if has_left else "refused")
        code = "CANCELLED" if has_left else cause.code.name if cause else "INTERNAL"
        self._metrics.requests.duration.record(
            (now_ms - self._received_ms) / 1000, self._operation, PROVIDER, "", "", code
        )

    def submit(self, machine: RequestMachine) -> None:
        """It is valid, and queued."""
        self._machine = machine
        speculation = machine.request.speculation
        self._wants_draft = speculation.drafter == "model" and speculation.mode is not Mode.OFF

    def observe(self, event: Event, instructions: Sequence[Instruction], now_ms: float) -> None:
        """What its machine has just made of an event."""
        machine = self._machine
        if machine is None:
            return
        if isinstance(event, Admitted):
            self._metrics.requests.queue.record((now_ms - self._received_ms) / 1000)
        for instruction in instructions:
            match instruction:
                case Emit(event=Chunk(), commit=Commit() as commit):
                    self._metrics.rounds.add(commit, machine.request.speculation.mode)
                case Emit(event=Finished() as finished):
                    self._finish(machine, finished)
                case Fail(error=error):
                    self._fail(machine, error, now_ms)
        self._note_sessions(machine, event)

    # The end

    def _finish(self, machine: RequestMachine, finished: Finished) -> None:
        requests, timing, labels = self._metrics.requests, finished.timing, self._labels(machine)
        requests.end("finished")
        requests.duration.record(timing.total_ms / 1000, *labels, "")
        requests.first_token.record(timing.ttft_ms / 1000, *labels)
        if timing.tpot_ms is not None:
            requests.per_token.record(timing.tpot_ms / 1000, *labels)
        self._end(machine, finished.finish_reason.value, finished.speculation)

    def _fail(self, machine: RequestMachine, error: SpecpipeError, now_ms: float) -> None:
        outcome = "cancelled" if isinstance(error, RequestCancelledError) else "failed"
        requests = self._metrics.requests
        requests.end(outcome)
        requests.duration.record((now_ms - self._received_ms) / 1000, *self._labels(machine), error.code.name)
        self._end(machine, outcome, machine.transcript.statistics.report())

    def _end(self, machine: RequestMachine, reason: str, sums: SpeculationStats) -> None:
        num_tokens, labels = machine.transcript.num_committed, self._labels(machine)
        requests = self._metrics.requests
        requests.completion_tokens.add(num_tokens, reason)
        requests.usage.record(len(machine.request.prompt), *labels, "input")
        requests.usage.record(num_tokens, *labels, "output")
        if num_tokens:
            num_cached = machine.transcript.statistics.num_cached or 0
            requests.prompt_tokens.add(num_cached, "cached")
            requests.prompt_tokens.add(len(machine.request.prompt) - num_cached, "computed")
        self._metrics.draft_time.add(sums)
        self._metrics.note_drafted(self, is_drafted=True)

    def _labels(self, machine: RequestMachine) -> Labels:
        model = machine.request.model
        return (self._operation, PROVIDER, model, model)

    # Sessions

    def _note_sessions(self, machine: RequestMachine, event: Event) -> None:
        """A session that was there and is not has been lost or left, unless the request is over."""
        if isinstance(event, Moving):
            self._moving = event.cause
        if not machine.phase.is_over:
            if self._target is not None and machine.target is None:
                self._metrics.workers.moves.add(1, Kind.TARGET.value)
            if self._draft is not None and machine.draft != self._draft:
                self._leave_draft(event)
            if self._wants_draft:
                self._note_draft(event, has_draft=machine.draft is not None)
        self._target, self._draft = machine.target, machine.draft

    def _leave_draft(self, event: Event) -> None:
        if draft_has_moved(event):
            self._metrics.workers.draft_moves.add(1, self._moving.value)
        else:
            self._metrics.workers.moves.add(1, Kind.DRAFT.value)

    def _note_draft(self, event: Event, *, has_draft: bool) -> None:
        """Once each time that it has to go on without one, whatever is tried meanwhile."""
        if has_draft:
            self._is_drafted = True
            self._metrics.note_drafted(self, is_drafted=True)
        elif self._is_drafted is not False and (cause := _cause_of(event)) is not None:
            self._is_drafted = False
            self._metrics.note_drafted(self, is_drafted=False)
            self._metrics.workers.fallbacks.add(1, cause)


def _cause_of(event: Event) -> str | None:
    """Why there is no draft session."""
    match event:
        case Unplaced(kind=Kind.DRAFT):
            return "unplaced"
        case Lost(kind=Kind.DRAFT):
            return "lost"
        case Received(kind=Kind.DRAFT, message=Failed()):
            return "failed"
        case Received(kind=Kind.DRAFT, message=Closed()):
            return "closed"
        case Received(kind=Kind.DRAFT):
            return "failed"  # refused by us: it contradicted what was committed
    return None
