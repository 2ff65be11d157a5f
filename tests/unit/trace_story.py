"""A request whose workers do what a test says, when it says: their reports, extensions and commits, and its trace.

Times are milliseconds of the coordinator's clock. A worker's own clock starts at its session's origin, which is when
Open reached it; what it says takes a hop. Nothing waits and nothing is random.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from coordinator.detokenizer import AnswerText, Detokenizer, SpacedDecoder
from coordinator.events import (
    Admitted,
    Cause,
    Ended,
    Event,
    Kind,
    Lost,
    Moving,
    Placed,
    Received,
    Seek,
    Send,
    Tick,
    Unplaced,
)
from coordinator.request_trace import RequestTrace
from coordinator.requests import Question, Request
from coordinator.state import RequestMachine
from coordinator.tracing import Tracing
from specpipe.config import TelemetryConfig
from specpipe.errors import RequestCancelledError
from specpipe.reports import Outcome, Report, SessionEvent, SessionEventKind, StepKind, StepRecord
from specpipe.spans import Process, Role, Span
from specpipe.types import (
    Closed,
    Commit,
    Extension,
    FinishReason,
    Open,
    Origin,
    RoundStats,
    SamplingParams,
    SpeculationParams,
    StopRules,
)

PROMPT = (7, 8, 9)
UNIX_NANOS = 1_800_000_000_000_000_000
COORDINATOR = Process(role=Role.COORDINATOR, host="head", pid=1)


def a_request(**changes: Any) -> Request:
    values: dict[str, Any] = {
        "request_id": "r",
        "model": "m",
        "prompt": PROMPT,
        "sampling": SamplingParams(seed=3),
        "stops": StopRules(max_length=1000),
        "speculation": SpeculationParams(drafter="model"),
    }
    return Request(**values | changes)


@dataclass
class Worker:
    """One session on one worker. Every moment given to it is the coordinator's; it tells them by its own clock."""

    story: Story
    kind: Kind
    session: int
    origin_ms: float
    shift_ms: float = 0.0  # how much later its clock says everything is, than it was after Open came
    num_rounds: int = 0
    step: int = 0

    def since_open_ms(self, at_ms: float) -> float:
        return max(0.0, at_ms - self.origin_ms + self.shift_ms)

    def report(self, at_ms: float, *steps: StepRecord, events: tuple[SessionEvent, ...] = ()) -> Report:
        return Report(session=self.session, since_open_ms=self.since_open_ms(at_ms), steps=steps, events=events)

    def record(self, kind: StepKind, start_ms: float, forward_ms: float, **values: Any) -> StepRecord:
        self.step += 1
        plain = {"num_rows": 1, "batch_sessions": 1, "batch_tokens": 1} | values
        since_open_ms = self.since_open_ms(start_ms)
        return StepRecord(kind=kind, step=self.step, since_open_ms=since_open_ms, forward_ms=forward_ms, **plain)


class Exported:
    """An exporter that keeps what it is given."""

    num_pending = 0

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.num_dropped: dict[str, int] = {}

    @property
    def num_exported(self) -> int:
        return len(self.spans)

    def put(self, spans: Sequence[Span]) -> None:
        self.spans += spans

    def close(self) -> None:
        """Nothing waits."""


@dataclass
class Story:
    """`say` puts what a worker says on its way, `run` lets time pass."""

    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    question: Question = field(default_factory=Question)
    request: Request = field(default_factory=a_request)
    stops: tuple[str, ...] = ()
    metadata: tuple[tuple[str, str], ...] = ()
    hop_ms: Callable[[], float] = lambda: 1.0
    shift_ms: float = 0.0  # of every worker's clock

    def __post_init__(self) -> None:
        self.now_ms = 0.0
        self.has = {Kind.TARGET: True, Kind.DRAFT: True}
        self.workers: dict[int, Worker] = {}
        self.opened: list[Open] = []
        self.relayed: dict[tuple[int, int], int] = {}  # from draft session and step to the request's number
        self._order = itertools.count()
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self.exported = Exported()
        self.tracing = Tracing(
            self.telemetry,
            exporter=self.exported,
            process=COORDINATOR,
            now_ms=lambda: self.now_ms,
            unix_nanos=lambda: UNIX_NANOS + round(self.now_ms * 1e6),
            random=Random(5),
        )
        trace = self.tracing.begin(self.question, self.metadata, received_ms=0.0)
        assert trace is not None
        self.trace: RequestTrace = trace
        trace.tokenized(0.5, 1.0, len(PROMPT))
        request = replace(self.request, trace_context=trace.context, wants_reports=trace.wants_reports)
        answer = AnswerText(Detokenizer(str, SpacedDecoder()), self.stops)
        self.machine = RequestMachine(request, answer)
        self.now_ms = 1.0
        trace.submit(self.machine, 1.0)

    # Time

    def run(self, until_ms: float) -> None:
        """What is said until then arrives."""
        while self._coming and self._coming[0][0] <= until_ms:
            self.now_ms, _, arrive = heapq.heappop(self._coming)
            arrive()
        self.now_ms = max(self.now_ms, until_ms)

    def later(self, at_ms: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._coming, (at_ms, next(self._order), happen))

    # The driver's part

    def do(self, event: Event) -> None:
        instructions = self.machine.handle(event, self.now_ms)
        self.trace.observe(event, instructions, self.now_ms)
        for instruction in instructions:
            match instruction:
                case Seek(kind=kind):
                    self._place(kind)
                case Send(message=Open() as opened):
                    self.opened.append(opened)
                case Send(message=Extension(draft_step=number)):
                    self._last_number = number
        self.machine.check()

    def _place(self, kind: Kind) -> None:
        if not self.has[kind]:
            self.do(Unplaced(kind))
            return
        session = self._new_session(kind)
        self.do(Placed(kind, session, session))

    def _new_session(self, kind: Kind) -> int:
        session = 100 + len(self.workers)
        role = Role.TARGET_WORKER if kind is Kind.TARGET else Role.DRAFT_WORKER
        process = Process(role=role, address=f"{kind.value}-{session}:1", host="host", pid=session, incarnation=session)
        self.workers[session] = Worker(self, kind, session, self.now_ms + self.hop_ms(), self.shift_ms)
        self.trace.place(kind, session, process, self.now_ms)
        return session

    def move_draft(self, cause: Cause) -> None:
        session = self._new_session(Kind.DRAFT)
        self.do(Moving(session, session, cause))

    def admit(self) -> None:
        self.do(Admitted())

    def tick(self) -> None:
        self.do(Tick())

    def cancel(self) -> None:
        self.do(Ended(RequestCancelledError("the client has left")))

    def lose(self, worker: Worker, reason: str = "it died") -> None:
        self.do(Lost(worker.kind, worker.session, reason))
        self.trace.session_over(worker.session, self.now_ms)

    def close(self) -> None:
        """All workers say their last word."""
        for worker in self.workers.values():
            self.do(Received(worker.kind, Closed(session=worker.session, length=0)))
            self.trace.session_over(worker.session, self.now_ms)

    def of(self, kind: Kind) -> Worker:
        """The session of this kind that was opened last."""
        return [worker for worker in self.workers.values() if worker.kind is kind][-1]

    # What workers say

    def say(self, worker: Worker, at_ms: float, report: Report | None, *messages: Any) -> None:
        def arrive() -> None:
            if report is not None:
                self.trace.hear(report, self.now_ms)
            for message in messages:
                self._hear(worker, message)

        self.later(at_ms + self.hop_ms(), arrive)

    def _hear(self, worker: Worker, message: Any) -> None:
        self._last_number = 0
        self.do(Received(worker.kind, message))
        if isinstance(message, Extension) and self._last_number:
            self.relayed[worker.session, message.draft_step] = self._last_number

    def prefill(self, worker: Worker, start_ms: float, forward_ms: float, *, num_rows: int) -> None:
        record = worker.record(StepKind.PREFILL, start_ms, forward_ms, num_rows=num_rows)
        self.say(worker, start_ms + forward_ms, worker.report(start_ms + forward_ms, record))

    def draft(self, start_ms: float, forward_ms: float, *, base: int, **values: Any) -> tuple[int, int]:
        """A step of the draft worker, its report and its extension. Returns draft session and step."""
        worker = self.of(Kind.DRAFT)
        values = {"share_ms": forward_ms, "num_tree_nodes": 4} | values
        record = worker.record(StepKind.DRAFT, start_ms, forward_ms, base=base, **values)
        end_ms = start_ms + forward_ms
        extension = Extension(
            session=worker.session,
            base=base,
            parents=(0,),
            tokens=(1,),
            confidences=(0.5,),
            draft_step=record.step,
            draft_step_ms=forward_ms,
            draft_share_ms=record.share_ms,
        )
        self.say(worker, end_ms, worker.report(end_ms, record), extension)
        return worker.session, record.step

    def verify(
        self,
        start_ms: float,
        forward_ms: float,
        *,
        base: int,
        num_tokens: int = 1,
        drafts: tuple[tuple[int, int], ...] = (),
        finish_reason: FinishReason | None = None,
        **values: Any,
    ) -> None:
        """A round of the target worker, its report and its commit."""
        worker = self.of(Kind.TARGET)
        worker.num_rounds += 1
        is_first = worker.num_rounds == 1
        steps = tuple(self.relayed[draft] for draft in drafts)
        outcome = Outcome.NONE if is_first else Outcome.HIT if drafts else Outcome.MISS
        values = {
            "outcome": outcome,
            "num_accepted": num_tokens - 1,
            "num_committed": num_tokens,
            "num_verified": max(num_tokens - 1, len(drafts)),
            "draft_steps": steps,
        } | values
        record = worker.record(StepKind.VERIFY, start_ms, forward_ms, round=worker.num_rounds, base=base, **values)
        commit = Commit(
            session=worker.session,
            round=worker.num_rounds,
            base=base,
            tokens=tuple(range(100 + base, 100 + base + num_tokens)),
            origins=(Origin.ACCEPTED,) * (num_tokens - 1) + (Origin.BONUS if drafts else Origin.PLAIN,),
            finish_reason=finish_reason,
            verified_draft_steps=steps,
            stats=RoundStats(num_rounds=1, exposed_ms=record.exposed_ms, num_verified=record.num_verified),
        )
        self.say(worker, start_ms + forward_ms, worker.report(start_ms + forward_ms, record), commit)

    def event(self, worker: Worker, kind: SessionEventKind, at_ms: float, *, base: int = 0) -> None:
        told = SessionEvent(kind=kind, since_open_ms=worker.since_open_ms(at_ms), base=base)
        self.say(worker, at_ms, worker.report(at_ms, events=(told,)))

    # What became of it

    @property
    def spans(self) -> tuple[Span, ...]:
        kept = self.tracing.find("r")
        return () if kept is None else kept.spans

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def ms(self, unix_nanos: int) -> float:
        return (unix_nanos - UNIX_NANOS) / 1e6


def a_hit_and_miss_story(**options: Any) -> Story:
    """Four rounds: the first, a hit on two draft steps, a miss, a hit."""
    story = Story(**options)
    story.admit()
    first = story.draft(3.0, 4.0, base=3)
    story.verify(3.0, 10.0, base=3)
    second = story.draft(7.0, 4.0, base=3)
    story.run(13.0)
    story.verify(13.0, 10.0, base=4, num_tokens=3, drafts=(first, second), num_tree_nodes=8)
    story.draft(15.0, 4.0, base=4)
    story.event(story.of(Kind.DRAFT), SessionEventKind.RESTARTED, 25.5, base=7)
    story.verify(23.0, 10.0, base=7, num_stale=1)
    third = story.draft(26.0, 6.0, base=7)
    story.run(36.0)
    story.verify(36.0, 10.0, base=8, num_tokens=2, drafts=(third,), exposed_ms=2.5, num_tree_nodes=4)
    story.draft(33.0, 6.0, base=7)
    story.run(48.0)
    return story
