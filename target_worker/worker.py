"""The self-paced loop of a target worker: takes messages between steps, verifies what it holds, sends commits.

Owns: `TargetLoop`, the life of sessions on this worker. Must not know: gRPC, asyncio, torch. It lives on the model
thread; `heartbeat` alone may be called from elsewhere. It never asks the network before a step.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from specpipe.calibration import Calibrator
from specpipe.config import TargetWorkerConfig
from specpipe.engine.interface import StepModel
from specpipe.engine.slots import create_pool
from specpipe.errors import CapacityError, DeadlineExceededError, DuplicateRequestError, SpecpipeError, own_error
from specpipe.recording import StepRun
from specpipe.reports import SessionEventKind
from specpipe.step_costs import StepCosts
from specpipe.telemetry.observer import NULL_OBSERVER, ExtensionOutcome, IdleCause, StepObserver, WorkerLoad
from specpipe.tree import GraftOutcome
from specpipe.types import (
    Close,
    Closed,
    Extension,
    Failed,
    Heartbeat,
    Mode,
    NeedTokens,
    Open,
    RoundStats,
    SessionMessage,
)
from target_worker.load import load_of
from target_worker.planner import Planner
from target_worker.room import Room
from target_worker.scheduler import next_budget
from target_worker.session import Limits, Phase, Session, check_open
from target_worker.speech import Send, Speech
from target_worker.step import SessionStep, create_batch, nan_slots, total_load
from target_worker.waits import Waits

logger = logging.getLogger(__name__)

_REMEMBERED = 4096  # ended sessions whose crossing Close is not answered a second time
_OUTCOMES: Final[dict[GraftOutcome, ExtensionOutcome]] = {
    GraftOutcome.GRAFTED: "grafted",
    GraftOutcome.LATE: "late",
    GraftOutcome.STALE: "stale",
    GraftOutcome.AHEAD: "stale",
}


class TargetLoop:
    """A StepLoop (see specpipe.model_thread). `clock` gives seconds; `costs` may have been measured before.

    Invariants (`check`): free + referenced slots = all; a running session has slots for all its tokens but at most the
    last; every step commits at least one token for each session that decodes in it; committed tokens never change.
    """

    def __init__(
        self,
        model: StepModel,
        config: TargetWorkerConfig,
        send: Send,
        clock: Callable[[], float] = time.perf_counter,
        costs: StepCosts | None = None,
        observer: StepObserver = NULL_OBSERVER,
    ) -> None:
        self._model = model
        self._config = config
        self._speech = Speech(send, clock)
        self._clock = clock
        self._observer = observer
        self._costs = costs or StepCosts(config.engine.max_batch_tokens)
        self._limits = Limits(info=model.info, num_slots=model.num_slots, max_nodes=config.max_nodes)
        pool = create_pool(config.engine, model.num_slots)
        self.sharing = pool.sharing  # what prefix sharing has done so far
        self._room = Room(pool, model.clear_slots, self._note_preempted)
        self._calibrator = Calibrator()
        self._waits = Waits(self._costs)
        self._planner = Planner(config, self._costs, self._room)
        self._sessions: dict[tuple[int, int], Session] = {}  # by link and session id
        self._ended: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self._paused: set[int] = set()
        self._num_opened = 0
        self._step = 0
        self._busy_since: float | None = None  # beginning of what `run_once` is at; None: it is not running
        self._last_end: float | None = None  # end of the last step
        self._is_back_to_back = False  # nothing but our own work lies between the last step and now

    # Messages, taken between steps.

    def receive(self, link: int, message: SessionMessage) -> None:
        """Apply one message of a stream. One for a session that is not open is dropped, but Close is answered."""
        if isinstance(message, Open):
            self._open(link, message)
            return
        session = self._sessions.get((link, message.session))
        if isinstance(message, Close):
            self._close(link, message, session)
        elif session is not None and isinstance(message, Extension):
            self._graft(session, message)
        elif session is not None and isinstance(message, NeedTokens):
            self._resync(session, message)

    def link_lost(self, link: int) -> None:
        """A stream ended: so do its sessions, without a word."""
        self._speech.forget(link)
        for session in [session for session in self._sessions.values() if session.link == link]:
            self._forget(session)
        self._paused.discard(link)

    def link_paused(self, link: int, is_paused: bool) -> None:
        """A stream is silent (or speaks again): its sessions keep their place and do not run."""
        if is_paused:
            self._paused.add(link)
            return
        self._paused.discard(link)
        for session in self._sessions.values():
            if session.link == link:
                session.become_ready(self._clock())

    def heartbeat(self) -> Heartbeat:
        since = self._busy_since
        return Heartbeat(
            step=self._step,
            step_running_ms=0.0 if since is None else (self._clock() - since) * 1e3,
            num_sessions=len(self._sessions),
            num_free_slots=self._room.num_free,
        )

    def load(self) -> WorkerLoad:
        return load_of(tuple(self._sessions.values()), frozenset(self._paused), self._room.pool)

    def _open(self, link: int, opened: Open) -> None:
        if (link, opened.session) in self._sessions:
            error = DuplicateRequestError(f"session {opened.session} is open already")
            self._speech.now(link, _failed(opened.session, error))
            return
        try:
            session = self._create(link, opened)
        except SpecpipeError as error:
            self._speech.now(link, _failed(opened.session, error))
            self._speech.now(link, Closed(session=opened.session, length=len(opened.tokens)))
            self._ended.append((link, opened.session))
            return
        self._sessions[link, opened.session] = session
        self._room.enter(session)

    def _create(self, link: int, opened: Open) -> Session:
        check_open(opened, self._limits)
        limit = self._config.engine.max_sessions
        if sum(session.phase is not Phase.FINISHED for session in self._sessions.values()) >= limit:
            raise CapacityError(f"{limit} sessions are open, which is all this worker takes")
        self._num_opened += 1
        return Session(
            opened,
            link=link,
            serial=self._num_opened,
            limits=self._limits,
            calibrator=self._calibrator,
            now=self._clock() if opened.arrived_s is None else opened.arrived_s,
        )

    def _close(self, link: int, close: Close, session: Session | None) -> None:
        if session is not None:
            self._forget(session)
            self._speech.last(session)
        elif (link, close.session) not in self._ended:
            self._speech.now(link, Closed(session=close.session, length=0))

    def _graft(self, session: Session, extension: Extension) -> None:
        now = self._clock()
        arrived_s = now if extension.arrived_s is None else extension.arrived_s
        outcome = session.graft(extension)
        if outcome is None:
            return
        num_nodes, lag_s = len(extension.tokens), None
        if outcome is GraftOutcome.GRAFTED and num_nodes and session.decided_s is not None:
            lag_s, session.decided_s = max(0.0, arrived_s - session.decided_s), None
        self._observer.extension(_OUTCOMES[outcome], num_nodes=num_nodes, lag_s=lag_s)
        self._waits.on_extension(session, now, arrived_s=arrived_s)

    def _resync(self, session: Session, need: NeedTokens) -> None:
        try:
            commit = session.resync(need.have)
        except SpecpipeError as error:
            self._fail(session, error)
            return
        self._note(session, SessionEventKind.RESYNC)
        self._speech.now(session.link, commit)

    # One step.

    def run_once(self) -> float | None:
        """Run one step if there is work. Returns seconds to wait for messages; 0.0: none; None: until one comes."""
        now = self._busy_since = self._clock()
        wait_s = self._run_or_wait(now)
        self._busy_since = None
        return wait_s

    def _run_or_wait(self, now: float) -> float | None:
        self._waits.end_exposure(now)
        self._expire(now)
        self._room.admit(self._paused)
        runnable = [session for session in self._room.running if session.link not in self._paused]
        waiting = [session for session in runnable if self._waits.sits_out(session, now, is_sole=len(runnable) == 1)]
        ready = [session for session in runnable if session not in waiting]
        steps = self._planner.plan(ready) if ready else []
        if steps:
            self._run(steps)
            return 0.0
        self._speech.flush()
        self._is_back_to_back = False
        if waiting:
            self._waits.begin_exposure(waiting, now)
        self._observer.idle("extension" if waiting else self._idle_cause())
        return self._time_to_next(waiting, now)

    def check(self) -> None:
        """Raise InvariantError if the loop contradicts itself. For tests, between events."""
        self._room.check()
        for session in self._sessions.values():
            session.tree.check()
            held = session.slots or session in self._room.running or session in self._room.queued
            if bool(held) is (session.phase is Phase.FINISHED):
                raise AssertionError(f"session {session.session}: {session.phase} and {len(session.slots)} slots")

    def _run(self, steps: list[SessionStep]) -> None:
        load = total_load(steps)
        batch = create_batch(steps)
        self._step += 1
        start = self._busy_since = self._clock()
        self._speech.flush()
        logits = self._model.forward(batch)
        end = self._busy_since = self._clock()
        run = StepRun(
            number=self._step,
            start_s=start,
            end_s=end,
            num_sessions=len(steps),
            num_rows=load.rows,
            rank_ms=self._model.rank_ms,
        )
        self._costs.observe(load.rows, load.attended, run.ms)
        if self._is_back_to_back and self._last_end is not None:
            self._costs.observe_gap((start - self._last_end) * 1e3)
        self._observe(steps, run)
        self._finish(steps, logits, run)
        self._last_end, self._is_back_to_back = end, True

    def _observe(self, steps: list[SessionStep], run: StepRun) -> None:
        self._observer.step(
            run.end_s - run.start_s,
            num_sessions=run.num_sessions,
            num_rows=run.num_rows,
            num_prefill_rows=sum(step.num_prefill for step in steps),
            num_nodes=sum(len(step.nodes) for step in steps),
        )

    def _finish(self, steps: list[SessionStep], logits: npt.NDArray[np.float32], run: StepRun) -> None:
        """Hand each session its part of the step's logits, in the order of the batch."""
        first_row = 0
        for step in steps:
            if step.decodes:
                part = logits[first_row : first_row + step.num_wanted]
                first_row += step.num_wanted
                self._decide(step, part, run)
            else:
                self._go_on(step, run)
            step.session.last_step = self._step

    def _go_on(self, step: SessionStep, run: StepRun) -> None:
        """A part of the text is computed, and more is to come."""
        session = step.session
        session.num_computed += step.num_committed
        session.stats += RoundStats(step_ms=run.ms, num_steps=1)
        if session.recorder is not None:
            session.recorder.add_prefill(run, base=len(session.tokens), num_rows=step.num_committed)
            self._speech.later(session)

    def _decide(self, step: SessionStep, logits: npt.NDArray[np.float32], run: StepRun) -> None:
        """Walk, commit, say so. A row that cannot be decided ends its session and no other."""
        session = step.session
        rows = {node: 1 + i for i, node in enumerate(step.nodes)}
        poisoned = nan_slots(step.nodes, logits)
        try:
            result = session.verify(rows, logits, 0)
        except Exception as error:  # a fault of ours would end the worker, and the next one the session goes to
            self._room.take_back(step.nodes, (), poisoned=poisoned)
            self._fail(session, own_error(error, f"session {session.session} cannot be decided"), is_poisoned=True)
            return
        round_ms = self._round_ms(session, run)
        was_cold, num_tree_nodes = session.is_cold, session.tree.num_nodes
        commit = session.commit(result, rows, step_ms=run.ms, gap_ms=self._gap_ms(session, run.start_s))
        session.decided_s = run.end_s
        if session.recorder is not None:
            session.recorder.add_round(run, commit, num_rows=step.load.rows, num_tree_nodes=num_tree_nodes)
        self._waits.on_round(session, commit, round_ms)
        self._room.take_back(step.nodes, result.path, poisoned=poisoned)
        if was_cold:
            self._observer.prefix(num_cached=session.num_shared, num_computed=commit.base - session.num_shared)
        if result.finish_reason is not None:
            session.phase = Phase.FINISHED
            self._room.leave(session)
        elif was_cold:
            self._room.remember(session)
        self._speech.later(session, replace(commit, next_budget=self._budget(session)))

    def _budget(self, session: Session) -> int:
        if session.mode is not Mode.PIPELINED:
            return session.max_depth
        return next_budget(self._costs, max(1, len(self._room.running)), len(session.tokens))

    def _gap_ms(self, session: Session, start: float) -> float:
        """How long the session was ready before the step began, since the last one ended."""
        since = session.ready_since if self._last_end is None else max(session.ready_since, self._last_end)
        return max(0.0, start - since) * 1e3

    def _round_ms(self, session: Session, run: StepRun) -> float | None:
        """How long the round took since the last step, if both were of this session alone: waits count, and idle time
        before it does not."""
        is_own = run.num_sessions == 1 and session.round > 0 and session.last_step == self._step - 1
        return (run.end_s - self._last_end) * 1e3 if is_own and self._last_end is not None else None

    # Waiting, ending.

    def _idle_cause(self) -> IdleCause:
        """Why nothing runs, though nobody waits for an extension."""
        open_ones = [session for session in self._sessions.values() if session.phase is not Phase.FINISHED]
        if not open_ones:
            return "no sessions"
        return "paused" if all(session.link in self._paused for session in open_ones) else "slots"

    def _time_to_next(self, waiting: Iterable[Session], now: float) -> float | None:
        """Seconds until a wait or a deadline ends."""
        until = [session.deadline for session in self._sessions.values() if session.phase is not Phase.FINISHED]
        until += [session.watch.wait_until for session in waiting if session.watch.wait_until is not None]
        earliest = min(until, default=math.inf)
        return None if math.isinf(earliest) else max(0.0, earliest - now)

    def _expire(self, now: float) -> None:
        for session in [s for s in self._sessions.values() if now >= s.deadline and s.phase is not Phase.FINISHED]:
            error = DeadlineExceededError(f"session {session.session}: its time ran out on the target worker")
            self._fail(session, error)

    def _note(self, session: Session, kind: SessionEventKind) -> None:
        if session.recorder is not None:
            session.recorder.add_event(kind, self._clock(), base=len(session.tokens))
            self._speech.later(session)

    def _note_preempted(self, session: Session) -> None:
        logger.info("%s gives its KV slots to older ones", session.opened.label)
        self._observer.preempted()
        self._waits.on_preempted(session, self._clock())
        self._note(session, SessionEventKind.PREEMPTED)

    def _fail(self, session: Session, error: SpecpipeError, *, is_poisoned: bool = False) -> None:
        logger.info("%s failed: %s", session.opened.label, error)
        self._forget(session, is_poisoned=is_poisoned)
        self._speech.last(session, _failed(session.session, error))

    def _forget(self, session: Session, *, is_poisoned: bool = False) -> None:
        self._room.leave(session, is_poisoned=is_poisoned)
        del self._sessions[session.link, session.session]
        self._ended.append((session.link, session.session))


def _failed(session: int, error: SpecpipeError) -> Failed:
    return Failed(session=session, code=error.code, message=str(error), is_retryable=error.is_retryable)
