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

import numpy as np
import numpy.typing as npt

from specpipe.calibration import Calibrator
from specpipe.config import TargetWorkerConfig
from specpipe.engine.interface import StepModel
from specpipe.engine.slots import create_pool
from specpipe.errors import CapacityError, DeadlineExceededError, DuplicateRequestError, SpecpipeError
from specpipe.step_costs import StepCosts
from specpipe.types import (
    Close,
    Closed,
    Commit,
    Extension,
    Failed,
    Heartbeat,
    Mode,
    NeedTokens,
    Open,
    RoundStats,
    SessionMessage,
)
from target_worker.room import Room
from target_worker.scheduler import MIN_CHUNK, chunk_sizes, next_budget, select_nodes
from target_worker.session import Limits, Phase, Session, check_open
from target_worker.step import SessionStep, create_batch, nan_slots, total_load
from target_worker.waiting import ExtensionTimes, Pace

logger = logging.getLogger(__name__)

Send = Callable[[int, SessionMessage], None]
_REMEMBERED = 4096  # ended sessions whose crossing Close is not answered a second time


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
    ) -> None:
        self._model = model
        self._config = config
        self._send = send
        self._commits: list[tuple[int, Commit]] = []  # of the last step, said once the next one is about to run
        self._clock = clock
        self._costs = costs or StepCosts(config.engine.max_batch_tokens)
        self._limits = Limits(info=model.info, num_slots=model.num_slots, max_nodes=config.max_nodes)
        pool = create_pool(config.engine, model.num_slots)
        self.sharing = pool.sharing  # what prefix sharing has done so far
        self._room = Room(pool, model.clear_slots)
        self._calibrator = Calibrator()
        self._times = ExtensionTimes()
        self._pace = Pace()
        self._sessions: dict[tuple[int, int], Session] = {}  # by link and session id
        self._ended: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self._paused: set[int] = set()
        self._num_opened = 0
        self._step = 0
        self._step_started: float | None = None
        self._last_end: float | None = None  # end of the last step
        self._is_back_to_back = False  # nothing but our own work lies between the last step and now
        self._exposed: tuple[float, list[Session]] | None = None  # since when nothing runs, and who waits

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
        self._commits = [(to, commit) for to, commit in self._commits if to != link]
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
                session.ready_since = self._clock()

    def heartbeat(self) -> Heartbeat:
        started = self._step_started
        return Heartbeat(
            step=self._step,
            step_running_ms=0.0 if started is None else (self._clock() - started) * 1e3,
            num_sessions=len(self._sessions),
            num_free_slots=self._room.num_free,
        )

    def _open(self, link: int, opened: Open) -> None:
        if (link, opened.session) in self._sessions:
            error = DuplicateRequestError(f"session {opened.session} is open already")
            self._say(link, _failed(opened.session, error))
            return
        try:
            session = self._create(link, opened)
        except SpecpipeError as error:
            self._say(link, _failed(opened.session, error))
            self._say(link, Closed(session=opened.session, length=len(opened.tokens)))
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
            now=self._clock(),
        )

    def _close(self, link: int, close: Close, session: Session | None) -> None:
        if session is not None:
            self._forget(session)
            self._say(link, Closed(session=close.session, length=len(session.tokens)))
        elif (link, close.session) not in self._ended:
            self._say(link, Closed(session=close.session, length=0))

    def _graft(self, session: Session, extension: Extension) -> None:
        session.graft(extension)
        if session.has_draft:
            self._note_time(session, self._clock() if extension.arrived_s is None else extension.arrived_s)
        if session.watch.wait_until is not None and (session.has_draft or session.watch.is_exhausted):
            self._end_wait(session, self._clock(), has_come=True)

    def _resync(self, session: Session, need: NeedTokens) -> None:
        try:
            self._say(session.link, session.resync(need.have))
        except SpecpipeError as error:
            self._fail(session, error)

    # One step.

    def run_once(self) -> float | None:
        """Run one step if there is work. Returns seconds to wait for messages; 0.0: none; None: until one comes."""
        now = self._clock()
        self._end_exposure(now)
        self._expire(now)
        self._room.admit(self._paused)
        runnable = [session for session in self._room.running if session.link not in self._paused]
        waiting = [session for session in runnable if self._waits(session, now, is_sole=len(runnable) == 1)]
        ready = [session for session in runnable if session not in waiting]
        steps = self._plan(ready) if ready else []
        if steps:
            self._run(steps)
            return 0.0
        self._flush()
        self._is_back_to_back = False
        if waiting:
            self._exposed = (now, waiting)
        return self._time_to_next(waiting, now)

    def check(self) -> None:
        """Raise InvariantError if the loop contradicts itself. For tests, between events."""
        self._room.check()
        for session in self._sessions.values():
            session.tree.check()
            held = session.slots or session in self._room.running or session in self._room.queued
            if bool(held) is (session.phase is Phase.FINISHED):
                raise AssertionError(f"session {session.session}: {session.phase} and {len(session.slots)} slots")

    def _plan(self, ready: list[Session]) -> list[SessionStep]:
        """What the next step does for whom; every node named holds a slot."""
        max_rows = self._config.engine.max_batch_tokens
        prefilling = [session for session in ready if session.num_pending > 1]
        decode_rows = max_rows - min(MIN_CHUNK, max_rows // 2) if prefilling else max_rows
        steps = self._plan_decoding([session for session in ready if session.num_pending == 1], decode_rows)
        prefilling = [session for session in prefilling if session.phase is Phase.RUNNING]
        self._choose_nodes(steps, steps, decode_rows)
        load = total_load(steps)
        sizes = chunk_sizes(
            [(session.num_pending, session.num_computed) for session in prefilling],
            load,
            self._costs,
            max_rows=max_rows - load.rows,
            max_slowdown=self._config.max_prefill_slowdown,
        )
        chunks = [SessionStep(session, size) for session, size in zip(prefilling, sizes, strict=True) if size > 0]
        self._choose_nodes([chunk for chunk in chunks if chunk.decodes], [*steps, *chunks], max_rows)
        return steps + chunks

    def _plan_decoding(self, sessions: list[Session], max_rows: int) -> list[SessionStep]:
        """One decode row each, those that ran longest ago first where there are more sessions than rows."""
        chosen = sorted(sessions, key=lambda session: (session.last_step, session.serial))[: max(1, max_rows)]
        for session in sorted(chosen, key=lambda session: session.serial):
            if session.phase is Phase.RUNNING:
                self._room.grow(session)
        return [SessionStep(session, 1) for session in chosen if session.phase is Phase.RUNNING]

    def _choose_nodes(self, steps: list[SessionStep], all_steps: list[SessionStep], max_rows: int) -> None:
        """Add the nodes worth verifying to `steps`, beside all that is planned, and lend them slots."""
        if not steps:
            return
        for step in steps:
            step.session.draft_ngram()
        load = total_load(all_steps)
        chosen = select_nodes(
            [step.candidate() for step in steps],
            load,
            self._costs,
            max_nodes=max(0, min(max_rows - load.rows, self._room.num_free)),
            max_slowdown=self._config.max_shared_slowdown if len(all_steps) > 1 else None,
        )
        for step, nodes in zip(steps, chosen, strict=True):
            self._room.lend(nodes)
            step.nodes = nodes

    def _run(self, steps: list[SessionStep]) -> None:
        load = total_load(steps)
        batch = create_batch(steps)
        self._step += 1
        start = self._step_started = self._clock()
        self._flush()
        logits = self._model.forward(batch)
        end = self._clock()
        self._step_started = None
        step_ms = (end - start) * 1e3
        self._costs.observe(load.rows, load.attended, step_ms)
        if self._is_back_to_back and self._last_end is not None:
            self._costs.observe_gap((start - self._last_end) * 1e3)
        self._finish(steps, logits, start, step_ms)
        self._last_end, self._is_back_to_back = end, True

    def _finish(self, steps: list[SessionStep], logits: npt.NDArray[np.float32], start: float, step_ms: float) -> None:
        """Hand each session its part of the step's logits, in the order of the batch."""
        first_row = 0
        for step in steps:
            if step.decodes:
                part = logits[first_row : first_row + step.num_wanted]
                first_row += step.num_wanted
                self._decide(step, part, start, step_ms, num_sessions=len(steps))
            else:
                step.session.num_computed += step.num_committed
                step.session.stats += RoundStats(step_ms=step_ms, num_steps=1)
            step.session.last_step = self._step

    def _decide(
        self, step: SessionStep, logits: npt.NDArray[np.float32], start: float, step_ms: float, *, num_sessions: int
    ) -> None:
        """Walk, commit, say so. A row that cannot be decided ends its session and no other."""
        session = step.session
        rows = {node: 1 + i for i, node in enumerate(step.nodes)}
        poisoned = nan_slots(step.nodes, logits)
        try:
            result = session.verify(rows, logits, 0)
        except SpecpipeError as error:
            self._room.take_back(step.nodes, (), poisoned=poisoned)
            self._fail(session, error, is_poisoned=True)
            return
        if num_sessions == 1:
            self._observe_pace(session, len(result.tokens), start, step_ms)
        was_cold = session.is_cold
        commit = session.commit(result, rows, step_ms=step_ms, gap_ms=self._gap_ms(session, start))
        self._pace.observe_guesses(*session.last_guesses)
        self._room.take_back(step.nodes, result.path, poisoned=poisoned)
        if result.finish_reason is not None:
            session.phase = Phase.FINISHED
            self._room.leave(session)
        elif was_cold:
            self._room.remember(session)
        self._commits.append((session.link, replace(commit, next_budget=self._budget(session))))

    def _budget(self, session: Session) -> int:
        if session.mode is not Mode.PIPELINED:
            return session.max_depth
        return next_budget(self._costs, max(1, len(self._room.running)), len(session.tokens))

    def _gap_ms(self, session: Session, start: float) -> float:
        """How long the session was ready before the step began, since the last one ended."""
        since = session.ready_since if self._last_end is None else max(session.ready_since, self._last_end)
        return max(0.0, start - since) * 1e3

    def _observe_pace(self, session: Session, num_tokens: int, start: float, step_ms: float) -> None:
        """Its round began where the last step ended, if that was its own: waits count, idle time before it does not."""
        if session.round > 0 and session.last_step == self._step - 1 and self._last_end is not None:
            self._pace.observe(num_tokens, (start - self._last_end) * 1e3 + step_ms)

    # Waiting, ending.

    def _waits(self, session: Session, now: float, *, is_sole: bool) -> bool:
        """Whether a session sits out this step for the extension that it lacks."""
        watch = session.watch
        if watch.wait_until is not None:
            if now < watch.wait_until and (is_sole or session.mode is Mode.SYNC):
                return True
            self._end_wait(session, now, has_come=False)
            return False
        if session.num_pending > 1 or session.has_draft or not watch.may_wait():
            return False
        session.draft_ngram()
        watch.on_miss(now)
        limit_ms = self._wait_limit_ms(session, is_sole=is_sole)
        if limit_ms > 0:
            watch.begin(now, limit_ms)
        return limit_ms > 0

    def _wait_limit_ms(self, session: Session, *, is_sole: bool) -> float:
        if session.mode is Mode.SYNC:
            return session.watch.sync_limit_ms()
        if not is_sole:
            return 0.0
        plain_ms = self._costs.estimate(1, len(session.tokens)) + self._costs.gap_ms
        return self._times.limit_ms(self._pace.worth_ms(plain_ms, 1.0 + session.expected_accepted))

    def _note_time(self, session: Session, came_at: float | None) -> None:
        """A draft came, or (None) the next commit was there before it: record how long after the last one."""
        time_ms = session.watch.take_miss_ms(came_at)
        if time_ms is not None:
            self._times.observe(time_ms)

    def _end_wait(self, session: Session, now: float, *, has_come: bool) -> None:
        session.watch.end(has_come=has_come)
        session.ready_since = now

    def _end_exposure(self, now: float) -> None:
        """Nothing ran since the last call: that time was exposed draft time of those who waited."""
        if self._exposed is not None:
            since, sessions = self._exposed
            self._exposed = None
            for session in sessions:
                session.stats += RoundStats(exposed_ms=(now - since) * 1e3)

    def _time_to_next(self, waiting: Iterable[Session], now: float) -> float | None:
        """Seconds until a wait or a deadline ends."""
        until = [session.deadline for session in self._sessions.values() if session.phase is not Phase.FINISHED]
        until += [session.watch.wait_until for session in waiting if session.watch.wait_until is not None]
        earliest = min(until, default=math.inf)
        return None if math.isinf(earliest) else max(0.0, earliest - now)

    def _expire(self, now: float) -> None:
        expired = [s for s in self._sessions.values() if now >= s.deadline and s.phase is not Phase.FINISHED]
        for session in expired:
            self._fail(
                session, DeadlineExceededError(f"session {session.session}: its time ran out on the target worker")
            )

    def _say(self, link: int, message: SessionMessage) -> None:
        self._flush()
        self._send(link, message)

    def _flush(self) -> None:
        """Say what the last step committed: not sooner, since the event loop would work while the next is planned."""
        for link, commit in self._commits:
            self._send(link, commit)
        self._commits.clear()

    def _fail(self, session: Session, error: SpecpipeError, *, is_poisoned: bool = False) -> None:
        logger.info("session %d failed: %s", session.session, error)
        self._forget(session, is_poisoned=is_poisoned)
        self._say(session.link, _failed(session.session, error))
        self._say(session.link, Closed(session=session.session, length=len(session.tokens)))

    def _forget(self, session: Session, *, is_poisoned: bool = False) -> None:
        self._room.leave(session, is_poisoned=is_poisoned)
        del self._sessions[session.link, session.session]
        self._ended.append((session.link, session.session))


def _failed(session: int, error: SpecpipeError) -> Failed:
    return Failed(session=session, code=error.code, message=str(error), is_retryable=error.is_retryable)
