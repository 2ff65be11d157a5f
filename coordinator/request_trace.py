"""What happened to one request, as spans.

Owns: `generate` and its children but the rounds (`coordinator.trace_rounds`): when each begins and ends, whatever ends
the request; which session is where. Must not know: clocks, sockets, who gets the spans. Times are given, in
milliseconds of the coordinator's monotonic clock.

It watches: `observe` after each event that the request's state machine has handled, `hear` for what workers report.
Nothing that it does can change an answer.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from coordinator.events import Emit, Event, Fail, Instruction, Kind, Moving, Placement, Received, Send, loss_told
from coordinator.state import RequestMachine
from coordinator.trace_generate import GenerateAttributes
from coordinator.trace_rounds import Rounds
from coordinator.trace_sessions import SessionTrace
from coordinator.trace_spans import Attributes, SpanMaker
from specpipe.answers import Chunk, Finished
from specpipe.config import TraceLevel
from specpipe.errors import RequestCancelledError, SpecpipeError
from specpipe.reports import Report, SessionEvent, StepKind, StepRecord
from specpipe.spans import Process, Span, SpanEvent, SpanKind
from specpipe.telemetry.propagation import traceparent
from specpipe.types import Commit, Extension, NeedTokens

logger = logging.getLogger(__name__)

MAX_LENGTHS = 256
"""Newest commits whose time is remembered, to bound when a draft worker heard of them."""
MAX_RELAYS = 2048
"""Newest draft steps whose extensions' time is remembered, to bound when the target worker knew them."""
MAX_RECORDS = 65_536
"""Records that are laid out of one request: some for each of its tokens. What a worker tells beyond it is lost."""
MAX_UNSETTLED = 1024
"""Records that wait for others. A worker that tells of rounds that never come tells the rest in vain."""
MAX_EVENTS = 256
"""Events of `generate`."""
MAX_HELD = 32
"""What workers have told and is not laid out yet, while one of their clocks is not known well."""

EmitSpans = Callable[[str, Sequence[Span], bool], None]
"""Takes the request's id ("" until it is known), spans, and whether they are the last."""


_Method = TypeVar("_Method", bound=Callable[..., None])


def _harmless(method: _Method) -> _Method:
    """A fault of ours ends the trace and nothing else."""

    @functools.wraps(method)
    def run(trace: RequestTrace, *args: Any, **kwargs: Any) -> None:
        try:
            method(trace, *args, **kwargs)
        except Exception:
            logger.exception("the trace of a request broke and ends here")
            trace.give_up()

    return cast(_Method, run)


class RequestTrace:
    """Of one request that is traced. Ends with `is_complete`: then every span that began has been emitted."""

    def __init__(
        self,
        maker: SpanMaker,
        attributes: GenerateAttributes,
        emit: EmitSpans,
        *,
        level: TraceLevel,
        received_ms: float,
        note_lost: Callable[[int], None],
    ) -> None:
        """`note_lost` is told of records that workers had to drop."""
        self.is_complete = False
        self.over_ms: float | None = None
        """When the request ended; what workers tell of it later is still taken, until it is complete."""
        self._maker = maker
        self._attributes = attributes
        self._emit_spans = emit
        self._level = level
        self._note_lost = note_lost
        self._received_ms = received_ms
        self._queued_ms: float | None = None
        self._placed_ms: float | None = None  # the first target session was opened
        self._machine: RequestMachine | None = None
        self._sessions: dict[int, SessionTrace] = {}
        self._held: deque[Callable[[], None]] = deque()
        self._target: Placement | None = None
        self._draft: Placement | None = None
        self._lost_target = ""  # why, until the next one is found
        self._moving: Moving | None = None  # how drafting last began to move
        self._rounds_before = 0  # of target sessions that were lost
        self._rounds_here = 0
        self._length_ms: dict[int, float] = {}  # since when so many tokens are committed
        self._relay_ms: dict[int, float] = {}  # when the request's draft steps came
        self._num_draft_steps = 0
        self._error: SpecpipeError | None = None
        self._events: list[SpanEvent] = []
        self._num_records = 0
        self._num_lost_records = 0
        self._out: list[Span] = []
        self._rounds = Rounds(maker, self._out.append, has_ranks=level == "debug")

    @property
    def context(self) -> str:
        """The W3C traceparent of its `generate`, for whoever works for it."""
        identity = self._maker.identity
        return traceparent(identity.trace_id, identity.span_id, is_sampled=identity.is_sampled)

    @property
    def wants_reports(self) -> bool:
        return self._level in ("round", "debug")

    # Before there is a state machine

    def tokenized(self, start_ms: float, end_ms: float, num_tokens: int) -> None:
        attributes: Attributes = {"gen_ai.usage.input_tokens": num_tokens}
        self._out.append(self._maker.span("tokenize", start_ms, end_ms, attributes=attributes))

    def refuse(self, error: BaseException, now_ms: float) -> None:
        """The request never began."""
        if self._machine is not None or self.over_ms is not None:
            return
        self._error = error if isinstance(error, SpecpipeError) else RequestCancelledError("the client has left")
        self._end(now_ms)
        self.complete()

    def submit(self, machine: RequestMachine, now_ms: float) -> None:
        """It waits for its turn from now on."""
        self._machine = machine
        self._queued_ms = now_ms
        self._attributes.add_request(machine.request)
        self._length_ms[len(machine.tokens)] = now_ms
        self._send()

    # While it lives

    def place(self, kind: Kind, session: int, process: Process, now_ms: float) -> None:
        """A session is about to be opened there."""
        self._sessions[session] = SessionTrace(kind, process, now_ms, self._maker, self._out.append)

    @_harmless
    def observe(self, event: Event, instructions: Sequence[Instruction], now_ms: float) -> None:
        """The machine has handled an event. Instructions have not been carried out yet."""
        if self.is_complete or self._machine is None:
            return
        if self.over_ms is None:
            self._note_placements(event, now_ms)
            match event:
                case Received(message=Commit() as commit):
                    self._note_commit(commit, now_ms)
                case Received(message=Extension() as extension):
                    self._note_extension(extension, now_ms)
            for instruction in instructions:
                self._note_instruction(instruction, now_ms)
        self._send()

    @_harmless
    def hear(self, report: Report, now_ms: float) -> None:
        """Of a session of this request, also of one that is lost or closing."""
        session = self._sessions.get(report.session)
        if session is None or session.is_over or self.is_complete:
            return
        report = self._bounded(report, session)
        if report.num_lost:
            self._num_lost_records += report.num_lost
            self._note_lost(report.num_lost)
        session.hear(report, now_ms)
        for record in report.steps:
            self._in_order(partial(self._add_step, report.session, session, record))
        for told in report.events:
            self._in_order(partial(self._add_event, session, told))
        self._send()

    def _bounded(self, report: Report, session: SessionTrace) -> Report:
        """The report, or what is left of one that there is no room for."""
        num_records = len(report.steps) + len(report.events)
        is_full = self._rounds.num_held + session.num_held > MAX_UNSETTLED
        if is_full or self._num_records + num_records > MAX_RECORDS:
            return replace(report, steps=(), events=(), num_lost=report.num_lost + num_records)
        self._num_records += num_records
        return report

    @_harmless
    def session_over(self, session: int, now_ms: float) -> None:
        """No more messages of it come. Once the request is over and all its sessions are, the trace is complete."""
        ended = self._sessions.get(session)
        if ended is not None and not ended.is_over:
            self._end_session(ended, now_ms)
            self._send()
        if self.over_ms is not None and all(s.is_over for s in self._sessions.values()):
            self.complete()

    @_harmless
    def complete(self) -> None:
        """Write what is left, whatever is still to come."""
        if self.is_complete or self.over_ms is None:
            return
        for session in self._sessions.values():
            if not session.is_over:
                self._end_session(session, self.over_ms)
        self._release()
        error = "" if self._error is None else str(self._error)
        length = 0 if self._machine is None else len(self._machine.tokens)
        self._events += self._rounds.finish(length, over_ms=self.over_ms, error=error)
        self._write_generate(error)
        self.is_complete = True
        self._send()

    def give_up(self) -> None:
        """Emit nothing more."""
        if not self.is_complete:
            self.is_complete = True
            self._emit_spans(self._request_id, (), True)

    def note(self, name: str, now_ms: float, **attributes: str | int | float) -> None:
        """An event of the request as a whole."""
        if len(self._events) < MAX_EVENTS:
            self._events.append(self._maker.event(name, now_ms, **attributes))

    # What the machine did

    def _note_placements(self, event: Event, now_ms: float) -> None:
        assert self._machine is not None
        target, draft = self._machine.target, self._machine.draft
        if isinstance(event, Moving):
            self._moving = event
        if target is self._target and draft is self._draft:
            return
        is_over = self._machine.phase.is_over
        if target != self._target:
            if self._target is not None and not is_over:
                self._lose_target(self._target, loss_told(event), now_ms)
            if target is not None:
                self._open_target(target, now_ms)
        if draft != self._draft and self._draft is not None and not is_over:
            name, worker = ("draft lost", self._draft) if draft is None else ("draft moved", draft)
            self.note(name, now_ms, reason=loss_told(event, self._moving), worker=self._address(worker))
        if not is_over:
            self._target, self._draft = target, draft

    def _open_target(self, target: Placement, now_ms: float) -> None:
        if self._placed_ms is None:
            self._placed_ms = now_ms
            self._write_queue(now_ms, "")
        else:
            self.note("session moved", now_ms, reason=self._lost_target, worker=self._address(target))

    def _lose_target(self, target: Placement, reason: str, now_ms: float) -> None:
        assert self._machine is not None
        self._release()
        self._lost_target = reason
        self._rounds_before, self._rounds_here = self._rounds_before + self._rounds_here, 0
        lost = self._sessions.get(target.session)
        if lost is not None and not lost.is_over:
            self._end_session(lost, now_ms, f"target lost: {reason}")
        self._rounds.lose_target(now_ms, len(self._machine.tokens), f"target lost: {reason}")

    def _note_commit(self, commit: Commit, now_ms: float) -> None:
        assert self._machine is not None
        length = len(self._machine.tokens)
        if length in self._length_ms:
            return  # it said nothing new
        session = self._sessions.get(commit.session)
        if session is not None and session.first_commit_ms is None:
            session.first_commit_ms = now_ms
        self._rounds_here = max(self._rounds_here, commit.round)
        _remember(self._length_ms, length, now_ms, MAX_LENGTHS)
        if not self._machine.phase.is_over:
            self._rounds.settle(length)

    def _note_extension(self, extension: Extension, now_ms: float) -> None:
        assert self._machine is not None
        statistics = self._machine.transcript.statistics
        number = statistics.draft_step_number(extension.session, extension.draft_step)
        if number > self._num_draft_steps:  # its first extension
            self._num_draft_steps = number
            _remember(self._relay_ms, number, now_ms, MAX_RELAYS)
            self._in_order(partial(self._rounds.count_drafts, extension, number))

    def _note_instruction(self, instruction: Instruction, now_ms: float) -> None:
        match instruction:
            case Send(message=NeedTokens(have=have)):
                self.note("resync", now_ms, base=have)
            case Emit(event=Chunk() as chunk):
                self._attributes.add_chunk(chunk)
            case Emit(event=Finished() as finished):
                self._attributes.add_finished(finished)
                self._end(now_ms)
            case Fail(error=error):
                self._error = error
                if isinstance(error, RequestCancelledError):
                    self.note("cancel", now_ms, reason=str(error))
                self._end(now_ms)

    def _end(self, now_ms: float) -> None:
        self.over_ms = now_ms
        if self._queued_ms is not None and self._placed_ms is None:
            self._write_queue(now_ms, str(self._error or ""))

    def _address(self, placement: Placement) -> str:
        session = self._sessions.get(placement.session)
        return "" if session is None else session.address

    # What workers did

    def _in_order(self, act: Callable[[], None]) -> None:
        """Lay something out once it is known well where it lies: whatever was told before comes first."""
        self._held.append(act)
        if len(self._held) > MAX_HELD or not any(session.is_new for session in self._sessions.values()):
            self._release()

    def _release(self) -> None:
        while self._held:
            self._held.popleft()()

    def _add_step(self, session_id: int, session: SessionTrace, record: StepRecord) -> None:
        match record.kind:
            case StepKind.PREFILL:
                session.add_prefill(record)
            case StepKind.VERIFY:
                self._bound_verify(session, record)
                times_ms = session.place(record, self._rounds.end_of_drafts(record.draft_steps))
                session.end_prefill(record, times_ms)
                self._rounds.add_verify(record, self._rounds_before + record.round, session.worker, times_ms)
            case StepKind.DRAFT:
                if record.base in self._length_ms:
                    session.clock.after(self._length_ms[record.base], record.since_open_ms)
                times_ms = session.place(record)
                session.end_prefill(record, times_ms)
                self._rounds.add_draft(session_id, record, session.worker, times_ms)

    def _bound_verify(self, session: SessionTrace, record: StepRecord) -> None:
        known_ms = max((self._relay_ms[n] for n in record.draft_steps if n in self._relay_ms), default=None)
        if known_ms is not None:
            session.clock.after(known_ms, record.since_open_ms)

    def _add_event(self, session: SessionTrace, told: SessionEvent) -> None:
        at_ms = session.clock.at(told.since_open_ms)
        self._rounds.add_event(self._maker.event(told.kind.value, at_ms, base=told.base, worker=session.address), at_ms)

    def _end_session(self, session: SessionTrace, now_ms: float, error: str = "") -> None:
        self._release()
        session.end(now_ms, error=error, request_error=str(self._error or ""))

    # Spans

    @property
    def _request_id(self) -> str:
        return "" if self._machine is None else self._machine.request.request_id

    def _write_queue(self, end_ms: float, error: str) -> None:
        assert self._queued_ms is not None
        attributes: Attributes = {"specpipe.queue_ms": end_ms - self._queued_ms}
        self._out.append(self._maker.span("queue", self._queued_ms, end_ms, attributes=attributes, error=error))

    def _write_generate(self, error: str) -> None:
        assert self.over_ms is not None
        attributes = self._attributes.of(self._machine, self._error)
        if self._num_lost_records:
            attributes["specpipe.num_lost_records"] = self._num_lost_records
        self._out.append(
            self._maker.span(
                "generate",
                self._received_ms,
                self.over_ms,
                span_id=self._maker.identity.span_id,
                parent_id=self._maker.identity.parent_id,
                kind=SpanKind.SERVER,
                attributes=attributes,
                events=tuple(sorted(self._events, key=lambda event: event.unix_nanos)),
                error=error,
            )
        )

    def _send(self) -> None:
        if self._out:
            spans = tuple(self._out)
            self._out.clear()
            self._emit_spans(self._request_id, spans, self.is_complete)


def _remember(times_ms: dict[int, float], key: int, now_ms: float, max_known: int) -> None:
    times_ms[key] = now_ms
    if len(times_ms) > max_known:
        del times_ms[next(iter(times_ms))]
