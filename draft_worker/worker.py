"""The model thread of a draft worker: messages in, one step at a time, extensions out.

Owns: sessions, the order "receive all, plan, compute, push". Called on one thread only, except `heartbeat`.
Must not know: gRPC, asyncio, torch. It never waits: `run_once` says when it wants to be called again.

A draft worker's word is a hint, so nothing here can change an answer (under the rejection rule: its distribution, if
what was sent is what was drawn from); what goes wrong in one session ends that session
and no other.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from draft_worker.growth import DraftStep, GrowthRules
from draft_worker.load import load_of
from draft_worker.progress import Progress
from draft_worker.recording import DraftRecorder
from draft_worker.room import Room
from draft_worker.scheduler import SessionWork, StepRules, idle_cause, is_starved, layout_rows, newest_holder, plan_step
from draft_worker.session import DraftSession
from specpipe.calibration import Calibrator
from specpipe.config import DraftWorkerConfig
from specpipe.engine.interface import StepBatch, StepModel
from specpipe.engine.slots import create_pool
from specpipe.errors import (
    CapacityError,
    DuplicateRequestError,
    ErrorCode,
    InvalidRequestError,
    SpecpipeError,
    own_error,
)
from specpipe.recording import StepRun
from specpipe.reports import SessionEventKind
from specpipe.step_costs import StepCosts
from specpipe.telemetry.observer import NULL_OBSERVER, StepObserver, WorkerLoad
from specpipe.types import Close, Closed, Commit, Failed, Heartbeat, NeedTokens, Open, SessionMessage

Send = Callable[[int, SessionMessage], None]
Logits = npt.NDArray[np.float32]

MAX_REMEMBERED_FAILURES = 1024  # per worker: a Close that crosses Failed is answered once

logger = logging.getLogger(__name__)


class DisagreementError(SpecpipeError):
    """Two messages say different things about the same committed tokens; opened again, the session may work."""

    code = ErrorCode.FAILED_PRECONDITION
    is_retryable = True


class DraftLoop:
    """Drafts for all sessions of this worker. A `StepLoop` of specpipe.model_thread."""

    def __init__(
        self,
        model: StepModel,
        config: DraftWorkerConfig,
        send: Send,
        clock: Callable[[], float] = time.perf_counter,
        *,
        growth: GrowthRules | None = None,
        steps: StepRules | None = None,
        costs: StepCosts | None = None,
        observer: StepObserver = NULL_OBSERVER,
    ) -> None:
        """`growth` and `steps` default to the measured rules within the bounds of `config`; `costs` to rows for
        nothing."""
        self._model = model
        self._send = send
        self._clock = clock
        self._observer = observer
        self._growth = growth or GrowthRules(max_nodes=config.max_nodes, max_depth=config.max_depth)
        self._steps = replace(steps or StepRules(), max_rows=config.engine.max_batch_tokens)
        self._costs = costs
        self._max_sessions = config.engine.max_sessions
        self._max_context = min(model.info.max_context, config.engine.max_context or model.info.max_context)
        self._calibrator = Calibrator()
        pool = create_pool(config.engine, model.num_slots)
        self.sharing = pool.sharing  # what prefix sharing has done so far
        self._room = Room(pool, model.clear_slots)
        self._sessions: dict[tuple[int, int], DraftSession] = {}  # by (link, session id), in order of arrival
        self._failed: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._paused_links: set[int] = set()
        self._num_opened = 0
        self._last_steps: dict[int, DraftStep] = {}  # by session key
        self._progress = Progress(num_free_slots=self._room.num_free)

    # StepLoop

    def receive(self, link: int, message: SessionMessage) -> None:
        """Apply one message. Never raises for what a peer said: the session it names fails, or nothing happens."""
        if isinstance(message, Open):
            self._open(link, message)
        elif isinstance(message, Close):
            self._close(link, message)
        elif (session := self._sessions.get((link, message.session))) is not None:
            if isinstance(message, Commit):
                self._commit(session, message)
            elif isinstance(message, NeedTokens):
                self._note(session, SessionEventKind.RESYNC)
                session.resend()  # the coordinator lost messages; what it needs of a draft worker is the tree
            elif isinstance(message, Failed):
                self._remove(session)
        self._note_progress()

    def link_lost(self, link: int) -> None:
        """End all sessions of a stream that is gone."""
        for session in [session for session in self._sessions.values() if session.link == link]:
            self._remove(session)
        self._paused_links.discard(link)
        self._failed = OrderedDict((key, None) for key in self._failed if key[0] != link)
        self._note_progress()

    def link_paused(self, link: int, is_paused: bool) -> None:
        """Stop or resume drafting for a stream whose other end is silent."""
        (self._paused_links.add if is_paused else self._paused_links.discard)(link)
        for session in self._sessions.values():
            if session.link == link:
                session.is_paused = is_paused
                if session.recorder is not None:
                    session.recorder.become_ready(self._clock())

    def run_once(self) -> float | None:
        """One step if there is work: 0.0 (call again at once). None: nothing to do until a message comes."""
        self._progress = replace(self._progress, busy_since_s=self._clock())
        self._take_up_parked()
        plan = self._plan()
        if plan:
            self._run_step(plan)
        else:
            self._observer.idle(idle_cause(self._sessions.values()))
        self._push()
        self._note_progress()
        return 0.0 if plan else None

    def heartbeat(self) -> Heartbeat:
        """What the thread does now. May be called from any thread."""
        return self._progress.heartbeat(self._clock())

    def load(self) -> WorkerLoad:
        return load_of(tuple(self._sessions.values()), self._room.pool)

    def check(self) -> None:
        """Raise InvariantError unless every session is sound and free + referenced slots = all."""
        for session in self._sessions.values():
            session.check()
        self._room.check(self._sessions.values())

    # Messages

    def _open(self, link: int, opened: Open) -> None:
        try:
            session = self._admit(link, opened)
        except DuplicateRequestError as error:  # the session that is there goes on: no Closed
            self._send(link, _failure(opened.session, error))
        except SpecpipeError as error:
            logger.info("%s is refused: %s", opened.label, error)
            self._send(link, _failure(opened.session, error))
            self._send(link, Closed(session=opened.session, length=len(opened.tokens)))
            self._remember_failure((link, opened.session))
        else:
            self._sessions[link, opened.session] = session

    def _admit(self, link: int, opened: Open) -> DraftSession:
        """Raises SpecpipeError if the session cannot be taken."""
        if (link, opened.session) in self._sessions:
            raise DuplicateRequestError(f"session {opened.session} is open on this draft worker")
        if not opened.tokens:
            raise InvalidRequestError(f"session {opened.session} has no tokens")
        if len(self._sessions) >= self._max_sessions:
            raise CapacityError(f"this draft worker has {self._max_sessions} sessions, its limit")
        session = DraftSession(
            opened,
            key=self._num_opened + 1,
            link=link,
            vocab_size=min(self._model.info.vocab_size, opened.vocab_size or self._model.info.vocab_size),
            max_context=self._max_context,
            rules=self._growth,
            calibrator=self._calibrator,
        )
        if opened.wants_reports:
            opened_s = self._clock() if opened.arrived_s is None else opened.arrived_s
            session.recorder = DraftRecorder(session.id, opened_s)
        if not self._room.fits(session, self._sessions.values()):
            raise CapacityError(f"session {opened.session} needs {session.base} KV slots on the draft worker")
        self._num_opened = session.key
        self._room.share(session)
        session.is_paused = link in self._paused_links
        if not session.can_draft:
            self._stop(session)
        return session

    def _close(self, link: int, close: Close) -> None:
        """Answered by Closed, also for a session that never arrived; not again for one that failed here."""
        key = (link, close.session)
        session = self._sessions.get(key)
        if session is not None:
            self._remove(session)
            self._report(session)
        if session is not None or key not in self._failed:
            self._send(link, Closed(session=close.session, length=0 if session is None else session.base))
        self._failed.pop(key, None)

    def _commit(self, session: DraftSession, commit: Commit) -> None:
        """Apply what is new in a commit; ask for what is missing; fail the session where the two texts differ."""
        if commit.base > session.base:
            self._note(session, SessionEventKind.RESYNC)
            self._send(session.link, NeedTokens(session=session.id, have=session.base))
            return
        overlap = session.tokens[commit.base : commit.base + len(commit.tokens)]
        if tuple(overlap) != commit.tokens[: len(overlap)]:
            self._fail(session, DisagreementError(f"a commit at {commit.base} contradicts tokens that were final"))
            return
        session.next_budget = commit.next_budget
        if new := commit.tokens[len(overlap) :]:
            self._room.commit(session, new, commit.origins[len(overlap) :])
        session.is_finished = session.is_finished or commit.finish_reason is not None
        if session.recorder is not None:
            session.recorder.become_ready(self._clock())
            if new and session.has_restarted and not session.is_finished:
                self._note(session, SessionEventKind.RESTARTED)
        if not session.can_draft:
            self._stop(session)

    def _stop(self, session: DraftSession) -> None:
        """Give back the slots of a session that cannot be drafted (any more)."""
        had_slots = bool(session.slots)
        self._room.give_back(session)
        if session.is_finished or session.is_parked:
            return
        if had_slots:
            logger.debug("drafting of %s ends at %d tokens: %s", session.label, session.base, session.stop_reason)
        if session.recorder is not None:
            session.recorder.end_drafting(self._clock(), base=session.base)

    def _fail(
        self,
        session: DraftSession,
        error: SpecpipeError,
        *,
        is_retryable: bool | None = None,
        is_poisoned: bool = False,
    ) -> None:
        logger.warning("%s fails: %s", session.label, error)
        self._remove(session, is_poisoned=is_poisoned)
        self._report(session)
        self._send(session.link, _failure(session.id, error, is_retryable))
        self._send(session.link, Closed(session=session.id, length=session.base))
        self._remember_failure((session.link, session.id))

    def _remember_failure(self, key: tuple[int, int]) -> None:
        self._failed[key] = None
        if len(self._failed) > MAX_REMEMBERED_FAILURES:
            self._failed.popitem(last=False)

    def _remove(self, session: DraftSession, *, is_poisoned: bool = False) -> None:
        self._room.give_back(session, is_poisoned=is_poisoned)
        self._last_steps.pop(session.key, None)
        del self._sessions[session.link, session.id]

    # Steps

    def _plan(self) -> list[SessionWork]:
        """Work for a step. While committed tokens wait for slots that nobody gives back, the newest holder parks."""
        sessions = self._sessions.values()
        self._room.share_more(sessions)
        while True:
            if plan := plan_step(sessions, self._steps, num_free_slots=self._room.num_free, costs=self._costs):
                return plan
            holder = newest_holder(sessions)
            if holder is None or not is_starved(sessions, num_free_slots=self._room.num_free):
                return []
            logger.info("%s gives its %d KV slots to older ones", holder.label, len(holder.slots))
            self._room.give_back(holder)
            holder.is_parked = True
            self._observer.preempted()
            self._note(holder, SessionEventKind.PREEMPTED)

    def _take_up_parked(self) -> None:
        """Those that there is room for again go on, in order of arrival, from where others have computed their tokens.

        NOTE: each is asked about as if it went on: one that is parked wants no slots and would always fit.
        """
        for session in self._sessions.values():
            if session.is_parked:
                session.is_parked = False
                if self._room.fits(session, self._sessions.values()):
                    self._room.share(session)
                else:
                    session.is_parked = True

    def _run_step(self, plan: list[SessionWork]) -> None:
        new_slots = [self._room.allocate(work) for work in plan]
        batch = StepBatch(sessions=[layout_rows(work, slots) for work, slots in zip(plan, new_slots, strict=True)])
        number = self._progress.step + 1
        started_s = self._clock()
        self._progress = replace(self._progress, step=number, busy_since_s=started_s)
        logits = iter(self._model.forward(batch))
        run = StepRun(
            number=number,
            start_s=started_s,
            end_s=self._clock(),
            num_sessions=len(plan),
            num_rows=batch.num_rows,
        )
        self._progress = replace(self._progress, busy_since_s=run.end_s)
        self._observe(plan, run)
        for work, slots in zip(plan, new_slots, strict=True):
            work.session.slots.extend(slots)
            self._apply(work, logits, run)
        if self._costs is not None:
            self._costs.observe(run.num_rows, 0, (self._clock() - started_s) * 1e3)

    def _observe(self, plan: list[SessionWork], run: StepRun) -> None:
        """NOTE: before the step's results change what it was for."""
        self._observer.step(
            run.end_s - run.start_s,
            num_sessions=run.num_sessions,
            num_rows=run.num_rows,
            num_prefill_rows=sum(work.num_committed for work in plan if work.session.is_cold),
            num_nodes=sum(len(work.nodes) for work in plan),
        )

    def _apply(self, work: SessionWork, logits: Iterator[Logits], run: StepRun) -> None:
        """Take one session's results: exactly its rows of `logits`, whatever becomes of the session."""
        session = work.session
        step = DraftStep(run.number, run.ms, run.ms * (work.num_rows / run.num_rows))  # never more than the whole
        expanded = [session.tree.root] if work.reaches_root else []
        results = [(node, next(logits)) for node in expanded + work.nodes]
        self._last_steps[session.key] = step
        if any(np.isnan(row).any() for _, row in results):
            error = SpecpipeError("the draft model gave NaN for this session")
            self._fail(session, error, is_retryable=False, is_poisoned=True)
            return
        if work.reaches_root:
            self._note_computed(session)
        if results:
            session.spent(step)
        try:
            session.expand(results, step)
        except Exception as error:  # a fault of ours would end the worker, and all other sessions with it
            self._fail(session, own_error(error, f"session {session.id} cannot be drafted"), is_retryable=False)
            return
        if session.recorder is not None:
            session.recorder.add_step(
                run,
                base=session.base,
                num_rows=work.num_rows,
                num_tree_nodes=session.tree.num_nodes,
                share_ms=step.share_ms if results else None,
            )

    def _note_computed(self, session: DraftSession) -> None:
        """All its committed tokens are computed, and free of NaN."""
        session.num_sound = len(session.slots)
        if session.is_cold:
            session.is_cold = False
            self._room.remember(session)
            self._observer.prefix(num_cached=session.num_shared, num_computed=session.base - session.num_shared)

    def _push(self) -> None:
        for session in self._sessions.values():
            self._report(session)
            if session.is_finished:
                continue
            extension = session.take_extension(self._last_steps.get(session.key, DraftStep()))
            if extension is not None:
                self._observer.extension("pushed", num_nodes=len(extension.tokens))
                self._send(session.link, extension)

    def _report(self, session: DraftSession) -> None:
        """Tell what was written down for a session. Never after what it led to."""
        report = None if session.recorder is None else session.recorder.take(self._clock())
        if report is not None:
            self._send(session.link, report)

    def _note(self, session: DraftSession, kind: SessionEventKind) -> None:
        if session.recorder is not None:
            session.recorder.add_event(kind, self._clock(), base=session.base)

    def _note_progress(self) -> None:
        """What the heartbeat tells while the thread waits."""
        step, num_sessions, num_free_slots = self._progress.step, len(self._sessions), self._room.num_free
        self._progress = Progress(step=step, num_sessions=num_sessions, num_free_slots=num_free_slots)


def _failure(session: int, error: SpecpipeError, is_retryable: bool | None = None) -> Failed:
    return Failed(
        session=session,
        code=error.code,
        message=str(error),
        is_retryable=error.is_retryable if is_retryable is None else is_retryable,
    )
