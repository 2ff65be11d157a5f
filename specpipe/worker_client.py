"""The coordinator's end of a worker stream.

Owns: the dial, the hellos, the stream's tasks, what is refused of what the worker says. Must not know: sessions, pools.

    async with WorkerLink.connect(address, "target", incarnation) as link:
        link.send(message)
        async for batch in link: ...

The loop never ends by itself: when the stream does, WorkerUnavailableError says why, and its sessions are over.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio

from specpipe import codec, codec_hello
from specpipe.codec_vocabulary import vocabulary_from_pb
from specpipe.config import TlsConfig
from specpipe.engine.vocabulary import Vocabulary
from specpipe.errors import ConfigError, ErrorCode, ModelMismatchError, SpecpipeError, WorkerUnavailableError
from specpipe.reports import Report
from specpipe.server import create_channel, error_from_status, status_errors
from specpipe.tls import NO_TLS, name_of_worker
from specpipe.types import Batch, Close, Failed, Heartbeat, Hello, SessionMessage
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

ReadInfo = Callable[[int], Awaitable[Any]]

INFO_TIMEOUT_S = 20.0
"""Of GetInfo with a vocabulary: the worker reads its tokenizer's files anew."""
MAX_UNREAD_BATCHES = 16
"""Batches that wait for the owner of a link; beyond it nothing is read and the worker merges what follows."""


class WorkerLink:
    """One stream to one worker. Made by `connect`.

    NOTE: it must hold neither the gRPC call nor its task, which refer to it: a call in a cycle of references keeps its
    connection, a file descriptor, until the cycles of the whole process are collected.
    """

    def __init__(self, address: str, hello: Hello, timing: Timing, read_info: ReadInfo) -> None:
        self.address = address
        self.hello = hello
        """The worker's; `hello.model` is set."""
        self.heartbeat = Heartbeat()
        """The worker's newest."""
        self.num_rejected = 0  # malformed messages
        self._unread: asyncio.Queue[Batch | None] = asyncio.Queue(MAX_UNREAD_BATCHES)  # None: ended, see _reason
        self._reason = ""  # why there are no more
        self._read_info = read_info
        self._stream = WorkerStream(limits=codec.Limits.of(hello.model, relays_extensions=True), timing=timing)

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, address: str, kind: Kind, incarnation: int, *, timing: Timing | None = None, tls: TlsConfig = NO_TLS
    ) -> AsyncIterator[WorkerLink]:
        """Dial a worker and exchange hellos; the stream ends with the block.

        Raises WorkerUnavailableError if nobody answers in time or the worker is not ready, ModelMismatchError if it
        speaks another version.
        """
        timing = timing or Timing()
        async with _dial(address, kind, tls) as channel:
            call = WIRES[kind].stub(channel).Connect()
            try:
                hello = await _greet(call, address, kind, incarnation, timing)
                logger.debug("worker %s is %s", address, told_process(hello.process))
                link = cls(address, hello, timing, functools.partial(_read_info, channel, kind))
                task = asyncio.create_task(link._run(link._ends(call, kind)), name=f"link to {address}")
                try:
                    yield link
                finally:
                    task.cancel()
                    await asyncio.wait([task])
            finally:
                _end(call)

    @property
    def num_holes(self) -> int:
        """Times that batches were missing: each time, all sessions of the link ask NeedTokens."""
        return self._stream.inbox.num_holes

    @property
    def num_dropped_extensions(self) -> int:
        """Extensions that gave way to newer ones before they were sent."""
        return self._stream.outbox.num_dropped_extensions

    def send(self, message: SessionMessage) -> None:
        """Queue a message; it goes at once if the stream can take it, and vanishes if the stream has ended."""
        if self._stream.outbox.put(message):
            self._stream.wake()

    async def read_vocabulary(self, num_ids: int) -> Vocabulary | None:
        """The tokens of the ids below `num_ids`; None if the worker cannot tell. Raises WorkerUnavailableError."""
        try:
            async with asyncio.timeout(INFO_TIMEOUT_S), status_errors():
                info = await self._read_info(num_ids)
            return vocabulary_from_pb(info.vocabulary) if info.HasField("vocabulary") else None
        except (SpecpipeError, TimeoutError) as error:
            raise WorkerUnavailableError(f"worker {self.address} does not tell its vocabulary: {error}") from None

    def __aiter__(self) -> WorkerLink:
        return self

    async def __anext__(self) -> Batch:
        """The next batch; may be cancelled without losing one. Raises WorkerUnavailableError when there are no more."""
        if not self._reason or not self._unread.empty():
            batch = await self._unread.get()
            if batch is not None:
                return batch
        raise WorkerUnavailableError(self._reason)  # a new one each time: a kept one would keep whoever it passed

    def _ends(self, call: Any, kind: Kind) -> Ends:
        return Ends(
            read=call.read,
            write=call.write,
            wrap=WIRES[kind].request,
            heartbeat=Heartbeat,
            on_batch=self._receive,
            on_silence=self._note_silence,
        )

    async def _run(self, ends: Ends) -> None:
        """There is no good end of a link but leaving its block."""
        try:
            await self._stream.run(ends, self._stream.outbox)
            self._reason = f"worker {self.address} ended the stream"
        except SpecpipeError as error:
            self._reason = f"worker {self.address}: {error}"
        except grpc.aio.AioRpcError as error:
            self._reason = f"worker {self.address} is gone: {error_from_status(error)}"
        except Exception:
            logger.exception("the link to worker %s broke", self.address)
            self._reason = f"the link to worker {self.address} broke"
        await self._unread.put(None)

    async def _receive(self, batch: Batch, rejected: list[codec.Rejection]) -> None:
        if batch.heartbeat is not None:
            self.heartbeat = batch.heartbeat
        failures = {failed.session: failed for failed in map(self._reject, rejected) if failed is not None}
        if failures:
            batch = replace(batch, failures=(*batch.failures, *failures.values()))
        await self._unread.put(batch)

    def _reject(self, rejection: codec.Rejection) -> Failed | None:
        """A session whose worker talks nonsense has failed on that worker; the worker is told to end it. But for a
        Report, of which no answer depends."""
        self.num_rejected += 1
        if is_milestone(self.num_rejected):
            logger.warning("worker %s: %s (malformed: %d)", self.address, rejection.error, self.num_rejected)
        if rejection.kind is Report:
            return None
        self.send(Close(session=rejection.session, reason=str(rejection.error)))
        return Failed(
            session=rejection.session, code=ErrorCode.INTERNAL, message=str(rejection.error), is_retryable=True
        )

    def _note_silence(self, is_silent: bool) -> None:
        logger.warning("worker %s %s", self.address, "is silent" if is_silent else "speaks again")


def _dial(address: str, kind: Kind, tls: TlsConfig) -> grpc.aio.Channel:
    try:
        return create_channel(address, tls, name=name_of_worker(address, kind))
    except ConfigError as error:  # certificates that were right at start are not now
        raise WorkerUnavailableError(f"worker {address} cannot be called: {error}") from None


def _end(call: Any) -> None:
    """Cancel it in gRPC's core, whatever gRPC makes of its state.

    A call whose write has failed is taken for ended (INTERNAL), and `cancel` does nothing to it then. But in the core
    it goes on while there are messages that nobody reads, and its connection, a file descriptor, stays open for ever,
    channel closed or not (seen with gRPC 1.85; akin to grpc/grpc#42125). NOTE: no public way leads to the core.
    """
    call.cancel()
    call._cython_call.cancel("the link has ended")


async def _read_info(channel: grpc.aio.Channel, kind: Kind, num_vocabulary_ids: int) -> Any:
    wire = WIRES[kind]
    return await wire.stub(channel).GetInfo(wire.info_request(num_vocabulary_ids=num_vocabulary_ids))


async def _greet(call: Any, address: str, kind: Kind, incarnation: int, timing: Timing) -> Hello:
    """The worker's hello, in exchange for ours."""
    hello = Hello(
        protocol_version=PROTOCOL_VERSION,
        minor_version=MINOR_VERSION,
        incarnation=incarnation,
        process=own_process(),
    )
    try:
        async with asyncio.timeout(timing.hello_timeout_s), status_errors():
            with contextlib.suppress(asyncio.InvalidStateError):  # already ended: the read says why
                await call.write(WIRES[kind].request(hello=codec_hello.hello_to_pb(hello)))
            first = await read(call.read)
    except TimeoutError:
        raise WorkerUnavailableError(f"worker {address} does not answer") from None
    except SpecpipeError as error:
        if error.code is not ErrorCode.INTERNAL:
            raise
        # gRPC forgets the status that a worker sent while our hello was being written
        raise WorkerUnavailableError(str(error)) from None
    if first is END or first.WhichOneof("event") != "hello":
        raise WorkerUnavailableError(f"worker {address} did not say hello")
    answer = codec_hello.hello_from_pb(first.hello)
    if answer.protocol_version != PROTOCOL_VERSION:
        raise ModelMismatchError(
            f"worker {address} speaks protocol version {answer.protocol_version}, this coordinator {PROTOCOL_VERSION}"
        )
    if answer.model is None:
        raise WorkerUnavailableError(f"worker {address} did not say what model it has")
    return answer
