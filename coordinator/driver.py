"""The coordinator at work: the only place with tasks and timeouts.

Owns: the links to workers, the requests that wait and that run, and the carrying out of what their state machines say.
Must not know: protobuf, text, what a message means (`coordinator.state`), where sessions fit (`coordinator.pools`).

Everything here runs on one event loop and no method but the readers waits, so an event and all its instructions are
one step that nothing interrupts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from coordinator.answer_stream import AnswerStream
from coordinator.detokenizer import AnswerText
from coordinator.events import (
    Admitted,
    Emit,
    Ended,
    Event,
    Fail,
    Instruction,
    Kind,
    Lost,
    Placed,
    Received,
    Seek,
    Send,
    Tick,
    Unplaced,
)
from coordinator.pools import AVOID_MS, Backoff, Connection, Pool, check_draft, check_target
from coordinator.requests import Request
from coordinator.state import RequestMachine
from specpipe.config import CoordinatorConfig
from specpipe.errors import (
    CapacityError,
    DuplicateRequestError,
    ModelMismatchError,
    RequestCancelledError,
    SpecpipeError,
    WorkerUnavailableError,
)
from specpipe.link import messages_of
from specpipe.types import Batch, Close, Closed, Failed, ModelInfo, NeedTokens
from specpipe.worker_client import WorkerLink
from specpipe.worker_stream import new_incarnation

logger = logging.getLogger(__name__)

Connect = Callable[[str, Kind, int], AbstractAsyncContextManager[WorkerLink]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """Patience, in seconds."""

    tick_s: float = 0.05  # how often machines hear that time has passed
    max_draft_silence_s: float = 5.0  # a draft worker that says nothing this long is taken for lost
    max_target_silence_s: float = 10.0  # the same for a target worker
    max_step_s: float = 60.0  # a worker whose step runs this long is taken for lost
    suspect_after_s: float = 3.0  # a worker that says nothing this long gets no new sessions
    max_reader_stall_s: float = 60.0  # a client that takes nothing this long is cancelled
    max_target_wait_s: float = 5.0  # a request that finds no target worker this long fails, within 10 s of a death
    max_first_try_s: float = 15.0  # how long `wait_ready` waits for the first attempt to reach each worker

    def patience_s(self, kind: Kind) -> float:
        return self.max_target_silence_s if kind is Kind.TARGET else self.max_draft_silence_s


def connect_worker(address: str, kind: Kind, incarnation: int) -> AbstractAsyncContextManager[WorkerLink]:
    return WorkerLink.connect(address, kind.value, incarnation)


class Coordinator:
    """`async with coordinator.running():` keeps the links up; `submit` begins an answer."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        settings: DriverSettings | None = None,
        connect: Connect = connect_worker,
    ) -> None:
        self.config = config
        self.settings = settings or DriverSettings()
        self.pools = {kind: Pool(kind) for kind in Kind}
        self.model: ModelInfo | None = None
        """The target model, once a target worker was reached; all others must serve the same."""
        self.is_stopping = False
        self._connect = connect
        self._incarnation = new_incarnation()
        self._numbers = itertools.count(1)
        self._session_ids = itertools.count(secrets.randbits(62) + 1)
        self._model_known = asyncio.Event()
        self._first_tries: dict[tuple[Kind, str], asyncio.Future[SpecpipeError | None]] = {}
        self._streams: set[AnswerStream] = set()  # until their readers are gone
        self._live: dict[str, AnswerStream] = {}  # by request id, until they are answered
        self._queue: deque[AnswerStream] = deque()
        self._running: set[AnswerStream] = set()
        self._by_session: dict[int, AnswerStream] = {}  # sessions that some worker still holds
        self._patience: dict[int, asyncio.Timeout] = {}  # by connection number: ends the reading of a silent link
        self._idle = asyncio.Event()
        self._idle.set()

    # Life

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While open, workers are dialled and requests move. On leaving, what still runs ends with an error."""
        loop = asyncio.get_running_loop()
        addresses = {Kind.TARGET: self.config.targets, Kind.DRAFT: self.config.drafts}
        workers = [(kind, address) for kind, group in addresses.items() for address in dict.fromkeys(group)]
        self._first_tries = {worker: loop.create_future() for worker in workers}
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._keep_connected(*worker), name=f"keep {worker[1]}") for worker in workers]
            tasks.append(group.create_task(self._keep_ticking(), name="tick"))
            try:
                yield
            finally:
                self.is_stopping = True
                self.end_all(WorkerUnavailableError("the service has stopped"))
                for task in tasks:
                    task.cancel()

    async def wait_ready(self) -> ModelInfo:
        """Returns when a target worker is there and every worker has been tried once.

        Raises ModelMismatchError if one of the first tries found a worker that does not fit.
        """
        await self._model_known.wait()
        tries = self._first_tries.values()
        await asyncio.wait(tries, timeout=self.settings.max_first_try_s)
        for outcome in tries:
            if outcome.done() and isinstance(error := outcome.result(), ModelMismatchError):
                raise error
        assert self.model is not None
        return self.model

    @property
    def is_ready(self) -> bool:
        """An answer is possible."""
        return not self.is_stopping and self.pools[Kind.TARGET].is_ready

    async def drain(self) -> None:
        """Take no more requests; returns when the last one has ended and its reader is gone."""
        self.is_stopping = True
        await self._idle.wait()

    def end_all(self, error: SpecpipeError) -> None:
        for stream in tuple(self._streams):
            self._handle(stream, Ended(error))

    # Requests

    def submit(self, request: Request, answer: AnswerText) -> AnswerStream:
        """Begin to answer, or queue. The caller reads the stream and closes it.

        Raises DuplicateRequestError, CapacityError (queue full) or WorkerUnavailableError (stopping).
        """
        if self.is_stopping:
            raise WorkerUnavailableError("the service is stopping")
        if request.request_id in self._live:
            raise DuplicateRequestError(
                f"request_id {request.request_id!r}: the request with this id is still answered"
            )
        if len(self._queue) >= self.config.max_queue and not self._can_admit():
            raise CapacityError(f"{len(self._running)} requests run and {len(self._queue)} wait; try again later")
        machine = RequestMachine(request, answer, max_target_wait_ms=1000 * self.settings.max_target_wait_s)
        stream = AnswerStream(machine, self._reader_gone)
        self._streams.add(stream)
        self._live[request.request_id] = stream
        self._idle.clear()
        self._queue.append(stream)
        self._admit()
        return stream

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
        return len(self._running) < self.config.max_sessions and (
            not target.is_ready or target.place(_now_ms()) is not None
        )

    def _admit(self) -> None:
        """First come, first served."""
        while self._queue and self._can_admit():
            stream = self._queue.popleft()
            self._running.add(stream)
            self._handle(stream, Admitted())

    # Machines

    def _handle(self, stream: AnswerStream, event: Event) -> None:
        """One event, all that it leads to, and what its end makes room for."""
        now_ms = _now_ms()
        for instruction in stream.machine.handle(event, now_ms):
            self._carry_out(stream, instruction, now_ms)
        if stream.machine.phase.is_over:
            self._retire(stream)

    def _retire(self, stream: AnswerStream) -> None:
        """Idempotent: a request that is over hears no more, but may be told."""
        if self._live.get(stream.request_id) is stream:
            del self._live[stream.request_id]
            stream.over.set()
        if stream in self._running:
            self._running.discard(stream)
            self._admit()
        elif stream in self._queue:
            self._queue.remove(stream)

    def _carry_out(self, stream: AnswerStream, instruction: Instruction, now_ms: float) -> None:
        match instruction:
            case Send(worker=worker, message=message):
                connection = self._connection(worker)
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
        connection = self.pools[kind].place(_now_ms())
        if connection is None:
            self._handle(stream, Unplaced(kind))
            return
        session = next(self._session_ids)
        connection.sessions.add(session)
        self._by_session[session] = stream
        self._handle(stream, Placed(kind, connection.number, session))

    def _connection(self, number: int) -> Connection | None:
        return self.pools[Kind.TARGET].get(number) or self.pools[Kind.DRAFT].get(number)

    # Time

    async def _keep_ticking(self) -> None:
        """Silence is counted in our own ticks, so that a process that was stopped does not blame its workers."""
        before_ms = _now_ms()
        while True:
            await asyncio.sleep(self.settings.tick_s)
            now_ms = _now_ms()
            passed_s = min((now_ms - before_ms) / 1000, 4 * self.settings.tick_s)
            before_ms = now_ms
            for connection in self._connections():
                self._watch(connection, passed_s, now_ms)
            for stream in tuple(self._streams):
                self._handle(stream, Tick())
                self._check_reader(stream, now_ms)
            self._admit()

    def _connections(self) -> Iterator[Connection]:
        for pool in self.pools.values():
            yield from pool

    def _watch(self, connection: Connection, passed_s: float, now_ms: float) -> None:
        connection.silent_s += passed_s
        connection.is_suspect = connection.silent_s > self.settings.suspect_after_s
        if connection.silent_s > self.settings.patience_s(connection.kind):
            self._patience[connection.number].reschedule(0.0)
        for session in connection.overdue(now_ms):
            self._forget(connection, session)

    def _check_reader(self, stream: AnswerStream, now_ms: float) -> None:
        if stream.stalled_ms(now_ms) > 1000 * self.settings.max_reader_stall_s:
            message = f"the client took nothing for {self.settings.max_reader_stall_s:g} s"
            self._handle(stream, Ended(RequestCancelledError(message)))
            stream.give_up()

    # Links

    async def _keep_connected(self, kind: Kind, address: str) -> None:
        """Dial for ever. What goes wrong is logged when it changes."""
        backoff = Backoff()
        last_error = ""
        while True:
            try:
                async with self._connect(address, kind, self._incarnation) as link:
                    await self._serve_link(kind, address, link, backoff)
            except SpecpipeError as error:
                self._note_first_try(kind, address, error)
                if str(error) != last_error:
                    last_error = str(error)
                    logger.warning("%s worker %s: %s", kind.value, address, error)
            await asyncio.sleep(backoff.next_s())

    async def _serve_link(self, kind: Kind, address: str, link: WorkerLink, backoff: Backoff) -> None:
        """Returns never: a link ends with an error. Then its sessions are lost."""
        await self._check_fit(kind, address, link)
        connection = Connection(next(self._numbers), kind, address, link)
        self.pools[kind].add(connection)
        self._note_first_try(kind, address, None)
        backoff.reset()
        logger.info("%s worker %s is connected", kind.value, address)
        reason = "the coordinator stops"
        try:
            await self._read_link(connection, link)
        except SpecpipeError as error:
            reason = str(error)
            raise
        finally:
            self._lose(connection, reason)

    async def _check_fit(self, kind: Kind, address: str, link: WorkerLink) -> None:
        model = link.hello.model
        assert model is not None  # WorkerLink.connect has checked
        if kind is Kind.TARGET and self.model is None:
            self.model = model
            self._model_known.set()
        await self._model_known.wait()
        assert self.model is not None
        if kind is Kind.TARGET:
            check_target(model, self.model, address)
        else:
            check_draft(model, self.model, address)

    def _note_first_try(self, kind: Kind, address: str, error: SpecpipeError | None) -> None:
        first_try = self._first_tries[kind, address]
        if not first_try.done():
            first_try.set_result(error)

    async def _read_link(self, connection: Connection, link: WorkerLink) -> None:
        num_holes = 0
        try:
            async with asyncio.timeout(None) as self._patience[connection.number]:
                async for batch in link:
                    connection.silent_s = 0.0
                    self._check_step(link)
                    if link.num_holes != num_holes:
                        num_holes = link.num_holes
                        self._ask_for_missing(connection)
                    self._hear(connection, batch)
        except TimeoutError:
            raise WorkerUnavailableError(f"it has said nothing for {connection.silent_s:.1f} s") from None
        finally:
            del self._patience[connection.number]

    def _check_step(self, link: WorkerLink) -> None:
        running_s = link.heartbeat.step_running_ms / 1000
        if running_s > self.settings.max_step_s:
            raise WorkerUnavailableError(f"its step has run for {running_s:.0f} s")

    def _hear(self, connection: Connection, batch: Batch) -> None:
        for message in messages_of(batch):
            stream = self._by_session.get(message.session)
            if stream is None or message.session not in connection.sessions:
                continue  # late, or about a session of another stream
            self._handle(stream, Received(connection.kind, message))
            if isinstance(message, Failed):
                connection.close(message.session, _now_ms())  # Closed follows
                if message.is_retryable:
                    connection.avoided_until_ms = _now_ms() + AVOID_MS
            if isinstance(message, Closed):
                self._forget(connection, message.session)
                self._admit()

    def _ask_for_missing(self, connection: Connection) -> None:
        """Batches were lost: commits may have been among them."""
        if connection.kind is Kind.TARGET:
            for session in connection.sessions - connection.closing_since_ms.keys():
                have = len(self._by_session[session].machine.tokens)
                connection.link.send(NeedTokens(session=session, have=have))

    def _lose(self, connection: Connection, reason: str) -> None:
        self.pools[connection.kind].remove(connection)
        for session in tuple(connection.sessions):
            stream = self._by_session[session]
            self._forget(connection, session)
            self._handle(stream, Lost(connection.kind, session, reason))

    def _forget(self, connection: Connection, session: int) -> None:
        connection.forget(session)
        self._by_session.pop(session, None)


def _now_ms() -> float:
    return 1000 * time.monotonic()
