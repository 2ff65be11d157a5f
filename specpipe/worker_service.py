"""The gRPC side of a worker: DraftService and TargetService before one model thread.

Owns: streams of coordinators (hello, heartbeats, silence), refusal of what is malformed, health, drain. Must not know:
torch, trees, what a step does: all of that is behind `specpipe.model_thread.StepLoop`.

A stream's sessions live as long as the stream. A malformed message fails its own session (a malformed Extension, being
a hint, is dropped and counted); only a peer that breaks the protocol itself loses its stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from specpipe import codec, codec_hello
from specpipe.causes import one_cause
from specpipe.codec_vocabulary import vocabulary_to_pb
from specpipe.config import ServerConfig, TelemetryConfig
from specpipe.engine.vocabulary import Vocabulary
from specpipe.errors import (
    ErrorCode,
    InvalidRequestError,
    ModelMismatchError,
    SpecpipeError,
    WorkerUnavailableError,
)
from specpipe.link import messages_of
from specpipe.model_thread import ModelThread, Send, StepLoop
from specpipe.process import Lifecycle, lifecycle, serve_until_stopped
from specpipe.reports import Report
from specpipe.server import Server, create_server
from specpipe.telemetry.worker_telemetry import WorkerTelemetry
from specpipe.types import Batch, Close, Closed, Extension, Failed, Heartbeat, Hello, Open
from specpipe.worker_stream import (
    END,
    MINOR_VERSION,
    PROTOCOL_VERSION,
    WIRES,
    Ends,
    Kind,
    Timing,
    WorkerStream,
    is_milestone,
    own_process,
    read,
    told_process,
)

logger = logging.getLogger(__name__)

MAX_PENDING_SESSIONS = 4096
"""Sessions of one stream with messages waiting, in or out; beyond it nothing is read from the stream for a moment."""
STUCK_STEP_S = 30.0
"""A model thread that is at one thing for longer (mail, a forward pass, what comes before or after it) hangs, and its
worker is neither ready nor alive."""


class WorkerService:
    """Serves one model thread to any number of coordinators. `hello` is None while the model loads."""

    def __init__(
        self,
        kind: Kind,
        hello: Hello | None,
        thread: ModelThread,
        *,
        timing: Timing | None = None,
        stuck_step_s: float = STUCK_STEP_S,
        read_vocabulary: Callable[[], Vocabulary] | None = None,
    ) -> None:
        self.hello = hello
        self.num_rejected = 0  # malformed messages, all streams
        self.num_links = 0
        self._kind = kind
        self._wire = WIRES[kind]
        self._thread = thread
        self._timing = timing or Timing()
        self._stuck_step_s = stuck_step_s
        self._read_vocabulary = read_vocabulary
        self._is_draining = False
        self._closing = asyncio.Event()

    def limits(self, hello: Hello) -> codec.Limits:
        """What a stream may name. A target's sessions fit its model; a draft worker takes texts that its own model
        cannot follow (longer, or with other ids) and says that it is exhausted, so that only speed is lost."""
        return codec.Limits.of(hello.model) if self._kind == "target" else codec.Limits()

    @property
    def service_name(self) -> str:
        return self._wire.service_name

    def add_to(self, server: Server) -> None:
        self._wire.add_to_server(self, server.grpc_server)

    def heartbeat(self) -> Heartbeat:
        return replace(self._thread.heartbeat(), is_draining=self._is_draining)

    @property
    def is_healthy(self) -> bool:
        """True if a session opened now would be worked on."""
        return self.hello is not None and self._thread.is_running and not self._is_draining and not self.is_stuck

    @property
    def is_stuck(self) -> bool:
        """The model thread has been at one thing for longer than anything may take; waiting for work is not that."""
        return self._thread.heartbeat().step_running_ms > self._stuck_step_s * 1000.0

    async def watch_health(self, server: Server) -> None:
        """Keep the server's health true. Runs until cancelled."""
        while True:
            await server.set_serving(self.is_healthy)
            await server.set_alive(not self.is_stuck)
            await self._timing.sleep(self._timing.interval_s)

    async def drain(self, server: Server) -> None:
        """Not ready: refuse new sessions, and return when the last one has ended."""
        self._is_draining = True
        await server.set_serving(False)
        while self._thread.is_running and self._thread.heartbeat().num_sessions > 0:  # noqa: ASYNC110 - seen by step
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """End all streams with UNAVAILABLE."""
        self._closing.set()

    # RPCs

    async def GetInfo(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002 - gRPC's name and arguments
        hello = self._require_hello()
        return self._wire.info_response(
            hello=codec_hello.hello_to_pb(hello),
            heartbeat=codec_hello.heartbeat_to_pb(self.heartbeat()),
            vocabulary=await self._vocabulary_pb(request.num_vocabulary_ids),
        )

    async def _vocabulary_pb(self, num_ids: int) -> Any:
        """Read from the tokenizer's files each time, off the event loop: asked for seldom, and large."""
        read_vocabulary = self._read_vocabulary
        if not num_ids or read_vocabulary is None:
            return None
        return await asyncio.to_thread(lambda: vocabulary_to_pb(read_vocabulary(), num_ids))

    async def Connect(self, request_iterator: Any, context: Any) -> None:  # noqa: N802, ARG002
        hello = self._require_hello()
        peer = await self._read_hello(context)
        await context.write(self._wire.response(hello=codec_hello.hello_to_pb(hello)))
        await _StreamOfCoordinator(self, hello, peer).run(context)

    async def _read_hello(self, context: Any) -> Hello:
        try:
            async with asyncio.timeout(self._timing.hello_timeout_s):
                first = await read(context.read)
        except TimeoutError:
            raise InvalidRequestError(f"no hello within {self._timing.hello_timeout_s:g} s") from None
        if first is END or first.WhichOneof("event") != "hello":
            raise InvalidRequestError("the first message of a stream is a hello")
        hello = codec_hello.hello_from_pb(first.hello)
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ModelMismatchError(
                f"protocol version {hello.protocol_version} does not fit: this worker speaks {PROTOCOL_VERSION}"
            )
        return hello

    def _require_hello(self) -> Hello:
        if self.hello is None:
            raise WorkerUnavailableError("the model is loading")
        if self._is_draining or not self._thread.is_running:
            raise WorkerUnavailableError("the worker is shutting down")
        return self.hello


class _StreamOfCoordinator:
    """One Connect call: joins a WorkerStream to a link of the model thread."""

    def __init__(self, service: WorkerService, hello: Hello, peer: Hello) -> None:
        self._service = service
        self._thread = service._thread
        self._peer = f"coordinator {peer.incarnation:x} ({told_process(peer.process)})"
        self._stream = WorkerStream(limits=service.limits(hello), timing=service._timing)
        self._link, self._outbox = self._thread.attach(self._stream.wake)

    async def run(self, context: Any) -> None:
        ends = Ends(
            read=context.read,
            write=context.write,
            wrap=self._service._wire.response,
            heartbeat=self._service.heartbeat,
            on_batch=self._receive,
            on_silence=self._pause,
        )
        logger.info("%s connected as link %d", self._peer, self._link)
        self._service.num_links += 1
        try:
            with one_cause():
                async with asyncio.TaskGroup() as group:
                    watch = group.create_task(self._watch_worker())
                    await self._stream.run(ends, self._outbox)
                    watch.cancel()
        finally:
            self._thread.detach(self._link)
            self._service.num_links -= 1
            logger.info("%s left link %d", self._peer, self._link)

    async def _watch_worker(self) -> None:
        """Raises when the worker ends before the stream."""
        closing = asyncio.ensure_future(self._service._closing.wait())
        try:
            reasons: list[asyncio.Future[Any]] = [closing, self._thread.failure]
            await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
        raise WorkerUnavailableError("the worker is shutting down")

    async def _receive(self, batch: Batch, rejected: list[codec.Rejection]) -> None:
        for rejection in rejected:
            self._reject(rejection)
        for message in messages_of(batch):
            if isinstance(message, Open) and self._service._is_draining:
                self._refuse(message)
            else:
                self._thread.post(self._link, message)
        # The peer asks faster than it reads, or than a step takes. Rare enough to look again instead of an event.
        while max(self._thread.num_pending(self._link), self._outbox.num_sessions) > MAX_PENDING_SESSIONS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def _reject(self, rejection: codec.Rejection) -> None:
        self._service.num_rejected += 1
        if is_milestone(self._service.num_rejected):
            logger.warning("%s: %s (malformed: %d)", self._peer, rejection.error, self._service.num_rejected)
        if rejection.kind not in (Extension, Report):
            self._fail(rejection.session, ErrorCode.INVALID_ARGUMENT, str(rejection.error))
            self._thread.post(self._link, Close(session=rejection.session, reason="malformed message"))

    def _refuse(self, message: Open) -> None:
        self._fail(message.session, ErrorCode.UNAVAILABLE, "the worker is shutting down", is_retryable=True)
        self._thread.send(self._link, Closed(session=message.session, length=0))

    def _fail(self, session: int, code: ErrorCode, message: str, *, is_retryable: bool = False) -> None:
        self._thread.send(self._link, Failed(session=session, code=code, message=message, is_retryable=is_retryable))

    def _pause(self, is_paused: bool) -> None:
        logger.warning("%s %s", self._peer, "is silent: its sessions pause" if is_paused else "speaks again")
        self._thread.pause(self._link, is_paused)


class Companions(Protocol):
    """Other processes that a worker cannot do without."""

    @property
    def pids(self) -> Sequence[int]: ...

    def watch(self, on_failure: Callable[[SpecpipeError], None]) -> None:
        """From now on the loss of one is told, on any thread."""
        ...


async def serve_worker(
    kind: Kind,
    config: ServerConfig,
    create: Callable[[Send], tuple[Hello, StepLoop]],
    *,
    timing: Timing | None = None,
    companions: Companions | None = None,
    read_vocabulary: Callable[[], Vocabulary] | None = None,
    telemetry: WorkerTelemetry | None = None,
) -> int:
    """A whole worker process: take the port, load, serve until told to stop, drain. Returns the exit code.

    `create` runs on the model thread: it loads the model and makes the step loop. Health is NOT_SERVING and calls get
    UNAVAILABLE until it returns. `read_vocabulary` is called on some thread when a coordinator asks. Raises ConfigError
    if a port is taken (before loading), what `create` raised, what escaped from the step loop, or why a companion
    was lost.
    """
    greeting: list[Hello] = []

    def create_loop(send: Send) -> StepLoop:
        hello, step_loop = create(send)
        spoken = replace(hello, protocol_version=PROTOCOL_VERSION, minor_version=MINOR_VERSION)
        greeting.append(replace(spoken, process=own_process()))
        return step_loop

    telemetry = telemetry or WorkerTelemetry(kind, TelemetryConfig(), config.host)
    async with lifecycle(config) as life:
        server = create_server(config, [WIRES[kind].service_name], metrics=telemetry.rpc)
        thread = ModelThread(create_loop)
        service = WorkerService(kind, None, thread, timing=timing, read_vocabulary=read_vocabulary)
        service.add_to(server)
        telemetry.watch_service(thread, service, server)
        async with telemetry.told() as metrics:
            await server.start()
            thread.start()
            if companions is not None:
                companions.watch(thread.fail)
            try:
                if not await life.unless_stopped(thread.wait_ready()):
                    return life.exit_code
                service.hello = greeting[0]
                pids = companions.pids if companions else []
                return await _serve(life, service, server, thread, companions=pids, metrics=metrics)
            finally:
                await server.set_serving(False)
                service.close()
                await server.stop(0.5)
                thread.stop()
                await asyncio.wait([thread.failure], timeout=2.0)


async def _serve(
    life: Lifecycle,
    service: WorkerService,
    server: Server,
    thread: ModelThread,
    *,
    companions: Sequence[int],
    metrics: str,
) -> int:
    await server.set_serving(service.is_healthy)
    health = asyncio.create_task(service.watch_health(server))
    try:
        return await serve_until_stopped(
            life,
            server.address,
            drain=lambda: service.drain(server),
            failure=thread.failure,
            companions=companions,
            metrics=metrics,
        )
    finally:
        health.cancel()
        await asyncio.wait([health])
