"""The life of one request as a state machine: events in, instructions out.

Owns: the committed tokens, which sessions exist on which workers, what each side must hear, when the answer ends.
Must not know: asyncio, gRPC, clocks, pools. `coordinator.driver` feeds it and does what it says, in order.

    QUEUED -> OPENING -> STREAMING -> FINISHED
       |        ^  |        |  |
       |        |  |        |  +-> FAILED, CANCELLED        (also from QUEUED and OPENING)
       |        +--+--------+      target lost: open again elsewhere, from the tokens held here

OPENING: without a target session, or with one that has not committed yet. A draft session comes and goes beside all
this and changes no state: a request without one costs speed and nothing else. While drafting moves to another worker
there are two, and what either drafts goes to the target.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace

from coordinator.detokenizer import AnswerText
from coordinator.draft_side import DraftSide
from coordinator.events import (
    Admitted,
    Cause,
    Emit,
    Ended,
    Event,
    Fail,
    Instruction,
    Joined,
    Kind,
    Lost,
    Moving,
    Placed,
    Placement,
    Received,
    Seek,
    Send,
    Tick,
    Unplaced,
    cause_told,
    told,
)
from coordinator.phases import TRANSITIONS, Phase
from coordinator.requests import Request
from coordinator.session_messages import answer_need, no_drafts, open_session, started
from coordinator.target_wait import TargetWait
from coordinator.transcript import Transcript
from specpipe.errors import (
    ERROR_BY_CODE,
    DeadlineExceededError,
    ErrorCode,
    InvariantError,
    SpecpipeError,
    WorkerUnavailableError,
)
from specpipe.types import (
    Close,
    Closed,
    Commit,
    Extension,
    Failed,
    FinishReason,
    NeedTokens,
    RoundStats,
    SessionMessage,
)

logger = logging.getLogger(__name__)

MAX_STORY = 40  # entries kept for the report of an InvariantError
MAX_TARGET_MOVES = 8  # target sessions lost to faults before the request is given up
REFUSALS = (ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.UNAVAILABLE)  # of a worker that is full, or drains


class RequestMachine:
    """See the module's text. `handle` never raises for what a worker says; a broken invariant fails this request."""

    def __init__(self, request: Request, answer: AnswerText, *, max_target_wait_ms: float = 10_000.0) -> None:
        self.request = request
        self.phase = Phase.QUEUED
        self.transcript = Transcript(request, answer)
        self.target: Placement | None = None
        self._draft = DraftSide(request.speculation)
        self._wait = TargetWait(max_target_wait_ms)
        self._now_ms = request.received_ms
        self._out: list[Instruction] = []
        self._story: deque[str] = deque(maxlen=MAX_STORY)
        self._is_started = False
        self._num_target_moves = 0

    @property
    def draft(self) -> Placement | None:
        """The session that drafts."""
        return self._draft.session

    @property
    def latest_draft(self) -> Placement | None:
        """The one that will, where drafting moves; else the same."""
        return self._draft.latest

    def may_move_draft(self, cause: Cause, now_ms: float) -> bool:
        """Whether Moving may come now. For balance only once the answer streams."""
        is_streaming = self.phase is Phase.STREAMING or (self.phase is Phase.OPENING and cause is not Cause.LOAD)
        return is_streaming and self._draft.may_move(cause, now_ms)

    @property
    def tokens(self) -> list[int]:
        """Prompt and committed."""
        return self.transcript.tokens

    @property
    def story(self) -> tuple[str, ...]:
        """The last events, for reports."""
        return tuple(self._story)

    def handle(self, event: Event, now_ms: float) -> list[Instruction]:
        """Apply one event. The instructions are to be carried out in order."""
        if self.phase.is_over:
            return []
        self._now_ms = now_ms
        self._out = []
        if not isinstance(event, Tick | Unplaced):
            self._story.append(told(event))
        try:
            self._apply(event)
        except InvariantError as error:
            self._end(Phase.FAILED, InvariantError(f"request {self.request.request_id}: {error}", self.story))
        except Exception:  # a fault of ours: it ends this request and no other
            logger.exception("request %s broke: %s", self.request.request_id, " > ".join(self.story))
            self._end(Phase.FAILED, InvariantError(f"request {self.request.request_id}: see the coordinator's log"))
        return self._out

    def check(self) -> None:
        """Raise InvariantError if the machine contradicts itself. For tests, after every event."""
        has_sessions = self.target is not None or bool(self._draft.sessions)
        rules = {
            "tokens begin with the prompt": tuple(self.tokens[: len(self.request.prompt)]) == self.request.prompt,
            "no token beyond max_length": len(self.tokens) <= self.request.stops.max_length,
            "no session before admission or after the end": not has_sessions
            or self.phase in (Phase.OPENING, Phase.STREAMING),
            "a streaming request has a target": self.phase is not Phase.STREAMING or self.target is not None,
            "a draft session only where one is wanted": not self._draft.sessions or self._draft.is_wanted,
            "a successor only beside a session": self._draft.successor is None or self.draft is not None,
        }
        for rule, holds in rules.items():
            if not holds:
                raise InvariantError(f"request {self.request.request_id}: not true: {rule}", self.story)

    # Events

    def _apply(self, event: Event) -> None:
        match event:
            case Admitted():
                self._go(Phase.OPENING)
                self._seek_target()
            case Placed(kind=Kind.TARGET):
                self._place_target(Placement(event.worker, event.session))
            case Placed():
                self._place_draft(Placement(event.worker, event.session))
            case Unplaced(kind=Kind.DRAFT):
                self._tell_no_draft()
            case Unplaced(is_full=True):
                self._wait.end()  # it is as in the queue: room comes when sessions end
            case Unplaced():
                self._check_wait()  # the next Tick asks again
            case Received(kind=Kind.TARGET, message=message):
                if self.target is not None and message.session == self.target.session:
                    self._hear_target(message, self.target)
            case Received(message=message):
                if (draft := self._draft.find(message.session)) is not None:
                    self._hear_draft(message, draft)
            case Joined():
                self._draft.ask_anew(self._now_ms)
            case Moving():
                self._move_draft(Placement(event.worker, event.session), event.cause)
            case Lost(kind=Kind.TARGET):
                if self.target is not None and event.session == self.target.session:
                    self._lose_target(event.reason, event.stalled_ms, is_fault=not event.was_draining)
            case Lost():
                if (draft := self._draft.find(event.session)) is not None:
                    self._draft.lose(draft, self._now_ms)
                    self._tell_no_draft()
            case Tick(unready_ms=unready_ms):
                self._tick(unready_ms)
            case Ended(error=error):
                self._end(Phase.CANCELLED, error)

    def _tick(self, unready_ms: float | None) -> None:
        deadline_ms = self.request.deadline_ms
        if deadline_ms is not None and self._now_ms >= deadline_ms:
            self._end(
                Phase.FAILED, DeadlineExceededError("the request's deadline passed before its answer was complete")
            )
        elif self.phase is Phase.QUEUED:
            self._wait.queued(self.request.received_ms, self._now_ms, unready_ms)
            self._check_wait()
        elif self.target is None:
            self._seek_target()
        elif self._draft.is_due(self._now_ms):
            self._seek_draft()
        elif (late := self._draft.overdue_successor(self._now_ms)) is not None:
            self._refuse_draft(late, "it has drafted nothing")

    # The target session

    def _seek_target(self) -> None:
        self._wait.begin(self._now_ms)
        self._out.append(Seek(Kind.TARGET))

    def _check_wait(self) -> None:
        try:
            self._wait.check(self._now_ms)
        except WorkerUnavailableError as error:
            self._end(Phase.FAILED, error)

    def _place_target(self, placement: Placement) -> None:
        self._require(self.phase is Phase.OPENING and self.target is None, "a target session that was not asked for")
        self.target = placement
        self._open(placement)
        if not self._is_started:
            self._is_started = True
            self._out.append(Emit(started(self.request)))
        if self._draft.is_due(self._now_ms):
            self._seek_draft()

    def _hear_target(self, message: SessionMessage, target: Placement) -> None:
        match message:
            case Commit():
                self._commit(message)
            case NeedTokens(have=have):
                self._answer_need(target, have)
            case Failed():
                self._target_failed(message)
            case Closed():
                self._lose_target("it closed the session")

    def _target_failed(self, failed: Failed) -> None:
        if not failed.is_retryable:
            self._end(Phase.FAILED, ERROR_BY_CODE[failed.code](failed.message))
        elif failed.code in REFUSALS and self.phase is Phase.OPENING:
            self.target, self._wait.reason = None, failed.message  # ask again, within the same wait
            self._check_wait()
        else:
            self._lose_target(failed.message)

    def _lose_target(self, reason: str, stalled_ms: float = 0.0, *, is_fault: bool = True) -> None:
        """It is gone, and has done nothing for this request for so long already. An end in order is no fault."""
        self.target = None
        self._num_target_moves += is_fault
        self.transcript.target_moved()
        if self._num_target_moves > MAX_TARGET_MOVES:
            message = f"target sessions were lost {self._num_target_moves} times, the last because {reason}"
            self._end(Phase.FAILED, WorkerUnavailableError(message))
            return
        if self.phase is Phase.STREAMING:
            self._go(Phase.OPENING)
        self._wait.begin_again(self._now_ms - stalled_ms, reason)

    # Commits

    def _commit(self, commit: Commit) -> None:
        """Apply what is new of a commit. One that starts beyond what is held asks for what lies between."""
        if commit.base > len(self.tokens):
            self._send_target(NeedTokens(session=commit.session, have=len(self.tokens)))
            return
        new = self.transcript.new_part(commit)
        if new is None:
            return
        if self.phase is Phase.OPENING:
            self._go(Phase.STREAMING)
        self._wait.end()
        delivered, chunk = self.transcript.add(new, self._now_ms)
        if delivered.finish_reason is None:
            self._pass_on(delivered)  # first: the next drafts wait for it
        self._out.append(Emit(chunk, delivered))
        if delivered.finish_reason is not None:
            self._finish(delivered.finish_reason)

    def _pass_on(self, commit: Commit) -> None:
        """Draft workers hear every commit; without one the target hears that no draft will come."""
        for draft in self._draft.sessions:
            told = replace(commit, session=draft.session, stats=RoundStats())  # sums are no business of drafts
            self._out.append(Send(draft.worker, told))
        if self.draft is None:
            self._tell_no_draft()

    def _finish(self, reason: FinishReason) -> None:
        finished = self.transcript.finished(reason, self._now_ms)
        self._close_sessions("finished")
        self._go(Phase.FINISHED)
        self._out.append(Emit(finished))

    # The draft sessions

    def _seek_draft(self) -> None:
        self._draft.seek(self._now_ms)
        self._out.append(Seek(Kind.DRAFT))

    def _place_draft(self, placement: Placement) -> None:
        self._require(self.draft is None and self._draft.is_wanted, "a draft session that was not asked for")
        self._draft.begin(placement)
        self._open(placement)

    def _move_draft(self, placement: Placement, cause: Cause) -> None:
        """The one before is kept until this one has drafted something, unless it does nothing itself."""
        self._require(self.may_move_draft(cause, self._now_ms), "a draft session that was not asked for")
        if cause is Cause.SILENT:
            for silent in self._draft.replace(placement, self._now_ms):
                self._close(silent, cause_told(cause))
            self._tell_no_draft()
        else:
            self._draft.begin_move(placement, self._now_ms)
        self._open(placement)

    def _hear_draft(self, message: SessionMessage, draft: Placement) -> None:
        match message:
            case Extension():
                self._hear_extension(message, draft)
            case NeedTokens(have=have) if have > len(self.tokens):
                self._refuse_draft(draft, f"it claims {have} tokens where {len(self.tokens)} are committed")
            case NeedTokens(have=have):
                self._answer_need(draft, have)
            case Failed(code=ErrorCode.UNAVAILABLE, is_retryable=True):
                self._draft.lose(draft, self._now_ms)  # the worker ends: another may take over at once
                self._tell_no_draft()
            case Failed():
                self._draft.fail(draft, self._now_ms, is_retryable=message.is_retryable)
                self._tell_no_draft()
            case Closed():
                self._draft.give_up(draft, self._now_ms)
                self._tell_no_draft()

    def _hear_extension(self, extension: Extension, draft: Placement) -> None:
        """A successor that drafts takes over; that it can draft nothing is no news while another one drafts."""
        if extension.num_nodes:
            relieved = self._draft.hear_drafts(draft)
            if relieved is not None:
                self._close(relieved, "another draft worker has taken over")
        elif draft != self.draft:
            return
        self._relay(extension)

    def _relay(self, extension: Extension) -> None:
        """To the target as it is, for it decides alone; without a target it is lost, which is allowed."""
        draft_step = self.transcript.statistics.add_extension(extension)
        if self.target is not None:
            self._send_target(replace(extension, session=self.target.session, draft_step=draft_step))

    def _refuse_draft(self, draft: Placement, reason: str) -> None:
        self._close(draft, reason)
        self._draft.give_up(draft, self._now_ms)
        self._tell_no_draft()

    def _tell_no_draft(self) -> None:
        """Nothing is coming below these tokens: the target need not wait for it."""
        if self.target is None or not self._draft.must_tell(self.target, len(self.tokens)):
            return
        self._send_target(no_drafts(self.target.session, len(self.tokens)))

    # Both

    def _open(self, placement: Placement) -> None:
        opened = open_session(placement.session, self.request, self.tokens, self._now_ms)
        self._out.append(Send(placement.worker, opened))

    def _close(self, placement: Placement, reason: str) -> None:
        self._out.append(Send(placement.worker, Close(session=placement.session, reason=reason)))

    def _answer_need(self, placement: Placement, have: int) -> None:
        answer = answer_need(placement.session, self.tokens, have)
        if answer is not None:
            self._out.append(Send(placement.worker, answer))

    def _close_sessions(self, reason: str) -> None:
        for placement in filter(None, (self.target, *self._draft.close())):
            self._close(placement, reason)
        self.target = None

    def _end(self, phase: Phase, error: SpecpipeError) -> None:
        """Whatever was emitted stays; the error is the last word."""
        self._close_sessions(str(error))
        self._go(phase)
        self._out.append(Fail(error))

    def _send_target(self, message: SessionMessage) -> None:
        if self.target is not None:
            self._out.append(Send(self.target.worker, message))

    def _go(self, phase: Phase) -> None:
        if (self.phase, phase) not in TRANSITIONS:
            raise InvariantError(f"no transition {self.phase.value} -> {phase.value}")
        self._story.append(phase.value)
        self.phase = phase

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise InvariantError(message)
