"""The coordinator at work: carries out what the machines of its requests say.

Owns: the requests that wait and that run, which session is whose, the clock. Must not know: protobuf, text, what a
message means (`coordinator.state`), where sessions fit (`coordinator.pools`), how workers are reached
(`coordinator.links`).

Everything here runs on one event loop and no method but the readers waits, so an event and all its instructions are
one step that nothing interrupts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator.answer_stream import AnswerStream
from coordinator.detokenizer import AnswerText
from coordinator.discovery import Resolve, resolve_name
from coordinator.draft_moves import DraftMoves
from coordinator.events import (
    Admitted,
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
    Received,
    Seek,
    Send,
    Tick,
    Unplaced,
)
from coordinator.links import Connect, WorkerLinks, connect_worker
from coordinator.metrics import CoordinatorMetrics, RequestCount
from coordinator.pools import Connection, Pool
from coordinator.request_trace import RequestTrace
from coordinator.requests import Request
from coordinator.settings import DriverSettings
from coordinator.state import RequestMachine
from coordinator.tracing import Tracing, create_tracing
from specpipe.config import CoordinatorConfig
from specpipe.errors import (
    CapacityError,
    DuplicateRequestError,
    ErrorCode,
    RequestCancelledError,
    SpecpipeError,
    WorkerUnavailableError,
)
from specpipe.link import messages_of
from specpipe.reports import Report
from specpipe.types import Batch, Close, Closed, Failed, ModelInfo, NeedTokens

logger = logging.getLogger(__name__)


class Coordinator:
    """`async with coordinator.running():` keeps the links up; `submit` begins an answer."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        settings: DriverSettings | None = None,
        connect: Connect | None = None,
        resolve: Resolve = resolve_name,
        tracing: Tracing | None = None,
        metrics: CoordinatorMetrics | None = None,
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.tracing = tracing or create_tracing(config.telemetry)
        self.settings = settings or DriverSettings()
        self.is_stopping = False  # told to end: not ready; what is submitted nevertheless is answered until `end_all`
        self._last_word: SpecpipeError | None = None  # why nothing is answered any more
        connect = connect or functools.partial(connect_worker, tls=config.server.tls)
        self._links = WorkerLinks(config, self.settings, connect, self, resolve)
        self._moves = DraftMoves(
            self.pools[Kind.DRAFT], self._find_draft, level_every_ms=1000 * self.settings.level_every_s
        )
        self._session_ids = itertools.count(secrets.randbits(62) + 1)
        self._streams: set[AnswerStream] = set()  # until their readers are gone
        self._live: dict[str, AnswerStream] = {}  # by request id, until they are answered
        self._queue: deque[AnswerStream] = deque()
        self._running: set[AnswerStream] = set()
        self._is_admitting = False
        self._by_session: dict[int, AnswerStream] = {}  # sessions that some worker still holds
        self._idle = asyncio.Event()
        self._idle.set()
        if metrics is not None:
            metrics.watch(self)
            metrics.watch_tracing(self.tracing)

    # Life

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While open, workers are dialled and requests move. On leaving, what still runs ends with an error."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [*self._links.start(group), group.create_task(self._keep_ticking(), name="tick")]
                try:
                    yield
                finally:
                    self.end_all(WorkerUnavailableError("the service has stopped"))
                    for task in tasks:
                        task.cancel()
        finally:
            await self.tracing.close()

    async def wait_ready(self) -> ModelInfo:
        """Returns when a target worker is there and every worker has been tried once.

        Raises ModelMismatchError if one of the first tries found a worker that does not fit.
        """
        return await self._links.wait_ready()

    @property
    def awaited(self) -> str:
        """What a service that is still starting waits for."""
        return self._links.awaited

    @property
    def pools(self) -> dict[Kind, Pool]:
        return self._links.pools

    @property
    def num_running(self) -> int:
        """Requests that hold, or look for, sessions on workers."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def workers(self) -> list[tuple[Kind, str]]:
        """Kind and address of all that are dialled, connected or not."""
        return self._links.workers

    @property
    def is_ready(self) -> bool:
        """An answer is possible."""
        return not self.is_stopping and self.pools[Kind.TARGET].is_ready

    async def wait_idle(self) -> None:
        """Returns when no request is left, and no reader."""
        await self._idle.wait()

    def end_all(self, error: SpecpipeError) -> None:
        """All requests end so, and those that come later."""
        self.is_stopping, self._last_word = True, error
        for stream in tuple(self._streams):
            self._handle(stream, Ended(error))

    # Requests

    def submit(
        self,
        request: Request,
        answer: AnswerText,
        trace: RequestTrace | None = None,
        count: RequestCount | None = None,
    ) -> AnswerStream:
        """Begin to answer, or queue. The caller reads the stream and closes it; `trace` and `count` hear of it.

        Raises DuplicateRequestError, CapacityError (queue full), or what `end_all` was given.
        """
        self.check_room(request.request_id)
        if request.request_id in self._live:
            raise DuplicateRequestError(
                f"request_id {request.request_id!r}: the request with this id is still answered"
            )
        machine = RequestMachine(request, answer, max_target_wait_ms=1000 * self.settings.max_target_wait_s)
        stream = AnswerStream(machine, self._reader_gone, trace, count)
        if trace is not None:
            trace.submit(machine, _now_ms())
        if count is not None:
            count.submit(machine)
        self._streams.add(stream)
        self._live[request.request_id] = stream
        self._idle.clear()
        self._queue.append(stream)
        self._admit()
        return stream

    def check_room(self, request_id: str) -> None:
        """Raises what `submit` would if it came now, before anything is done for a request.

        Not for want of room if there is a live request with this id: it may be on its way out and make room.
        """
        if self._last_word is not None:
            raise self._last_word
        if request_id not in self._live and len(self._queue) >= self.config.max_queue and not self._can_admit():
            raise CapacityError(f"{len(self._running)} requests run and {len(self._queue)} wait; try again later")

    async def wait_for_id(self, request_id: str, timeout_s: float) -> None:
        """Returns when no live request has this id, or the time is up.

        A client may cancel a request and use its id again at once, and then we may hear of the second one first.
        """
        stream = self._live.get(request_id)
        if stream is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await stream.over.wait()

    def _reader_gone(self, stream: AnswerStream) -> None:
        self._handle(stream, Ended(RequestCancelledError("the client has left")))
        self._streams.discard(stream)
        if not self._streams:
            self._idle.set()

    def _can_admit(self) -> bool:
        """A request may run if there is room; without any target it runs too, for its wait is bounded then."""
        target = self.pools[Kind.TARGET]
        return len(self._running) < self.config.max_sessions and (not target.is_ready or target.can_place(_now_ms()))

    def _admit(self) -> None:
        """First come, first served. NOTE: one that ends at once comes back here: the loop sees to its successor."""
        if self._is_admitting:
            return
        self._is_admitting = True
        try:
            while self._queue and self._can_admit():
                stream = self._queue.popleft()
                self._running.add(stream)
                self._handle(stream, Admitted())
        finally:
            self._is_admitting = False

    # Machines

    def _handle(self, stream: AnswerStream, event: Event) -> None:
        """One event, all that it leads to, and what its end makes room for."""
        now_ms = _now_ms()
        instructions = stream.machine.handle(event, now_ms)
        stream.observe(event, instructions, now_ms)
        for instruction in instructions:
            self._carry_out(stream, instruction, now_ms)
        if stream.machine.phase.is_over:
            self._retire(stream)

    def _retire(self, stream: AnswerStream) -> None:
        """Idempotent: a request that is over hears no more, but may be told."""
        if self._live.get(stream.request_id) is stream:
            del self._live[stream.request_id]
            stream.over.set()
            if stream.trace is not None:
                self.tracing.ending(stream.trace)
        if stream in self._running:
            self._running.discard(stream)
            self._admit()
        elif stream in self._queue:
            self._queue.remove(stream)

    def _carry_out(self, stream: AnswerStream, instruction: Instruction, now_ms: float) -> None:
        match instruction:
            case Send(worker=worker, message=message):
                connection = self._links.get(worker)
                if connection is not None:
                    connection.link.send(message)
                    if isinstance(message, Close):
                        connection.close(message.session, now_ms)
            case Seek(kind=kind):
                self._place(stream, kind)
            case Emit(event=event):
                stream.put(event)
            case Fail(error=error):
                logger.info("request %s ends: %s", stream.request_id, error)
                stream.fail(error)

    def _place(self, stream: AnswerStream, kind: Kind) -> None:
        connection = self._find_draft(stream) if kind is Kind.DRAFT else self._find_target(stream)
        if connection is None:
            self._handle(stream, Unplaced(kind, self.pools[kind].is_full))
        else:
            self._handle(stream, Placed(kind, connection.number, self._new_session(stream, connection)))

    def _find_target(self, stream: AnswerStream) -> Connection | None:
        return self.pools[Kind.TARGET].place(_now_ms(), stream.machine.tokens)

    def _find_draft(self, stream: AnswerStream) -> Connection | None:
        """Near the target worker, where it tells on which host it runs."""
        target = stream.machine.target
        connection = None if target is None else self._links.get(target.worker)
        host = "" if connection is None else connection.link.hello.process.host
        return self.pools[Kind.DRAFT].place(_now_ms(), stream.machine.tokens, host=host)

    def _new_session(self, stream: AnswerStream, connection: Connection) -> int:
        session = next(self._session_ids)
        connection.sessions.add(session)
        self._by_session[session] = stream
        if stream.trace is not None:
            stream.trace.place(connection.kind, session, connection.process, _now_ms())
        return session

    # Drafting that moves

    def _move_drafts(self, now_ms: float) -> None:
        """Requests hear of a worker that has joined; drafting goes elsewhere where that is better."""
        streams = tuple(self._running)
        if self._moves.has_joined():
            for stream in streams:
                self._handle(stream, Joined())
        for stream, connection, cause in self._moves.due(streams, now_ms):
            self._handle(stream, Moving(connection.number, self._new_session(stream, connection), cause))

    # Time

    async def _keep_ticking(self) -> None:
        """Silence is counted in our own ticks, so that a process that was stopped does not blame its workers."""
        before_ms = _now_ms()
        while True:
            await asyncio.sleep(self.settings.tick_s)
            now_ms = _now_ms()
            passed_s = min((now_ms - before_ms) / 1000, self.settings.max_pause_s)
            before_ms = now_ms
            for connection in self._links:
                self._links.watch(connection, passed_s)
                for session in connection.overdue(now_ms):
                    self._by_session[session].session_over(session, now_ms)
                    self._forget(connection, session)
            self._move_drafts(now_ms)
            tick = Tick(self.pools[Kind.TARGET].unready_ms(now_ms))
            for stream in tuple(self._streams):
                self._handle(stream, tick)
                self._check_reader(stream, now_ms)
            self.tracing.tick(now_ms)
            self._admit()

    def _check_reader(self, stream: AnswerStream, now_ms: float) -> None:
        if stream.stalled_ms(now_ms) > 1000 * self.settings.max_reader_stall_s:
            message = f"the client took nothing for {self.settings.max_reader_stall_s:g} s"
            self._handle(stream, Ended(RequestCancelledError(message)))
            stream.give_up()

    # What links tell

    def hear(self, connection: Connection, batch: Batch) -> None:
        for message in messages_of(batch):
            stream = self._by_session.get(message.session)
            if stream is None or message.session not in connection.sessions:
                continue  # late, or about a session of another stream
            if isinstance(message, Report):
                if self.metrics is not None:
                    self.metrics.hear(message)
                if stream.trace is not None:
                    stream.trace.hear(message, _now_ms())
                continue
            self._handle(stream, Received(connection.kind, message))
            if isinstance(message, Failed):
                connection.close(message.session, _now_ms())  # Closed follows
                if message.is_retryable:
                    connection.refuse(_now_ms(), is_ending=message.code is ErrorCode.UNAVAILABLE)
            if isinstance(message, Closed):
                self._forget(connection, message.session)
                stream.session_over(message.session, _now_ms())
                self._admit()

    def ask_for_missing(self, connection: Connection) -> None:
        """Batches were lost: commits may have been among them."""
        if connection.kind is Kind.TARGET:
            for session in connection.sessions - connection.closing_since_ms.keys():
                stream = self._by_session[session]
                have = len(stream.machine.tokens)
                connection.link.send(NeedTokens(session=session, have=have))
                if stream.trace is not None:
                    stream.trace.note("resync", _now_ms(), base=have)

    def lose(self, connection: Connection, reason: str) -> None:
        if self.metrics is not None:
            self.metrics.workers.lose(connection)
        for session in tuple(connection.sessions):
            stream = self._by_session[session]
            self._forget(connection, session)
            lost = Lost(
                connection.kind,
                session,
                reason,
                stalled_ms=connection.stalled_ms,
                was_draining=connection.is_draining,
            )
            self._handle(stream, lost)
            stream.session_over(session, _now_ms())

    def _forget(self, connection: Connection, session: int) -> None:
        connection.forget(session)
        self._by_session.pop(session, None)


def _now_ms() -> float:
    return 1000 * time.monotonic()
