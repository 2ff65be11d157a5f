"""One side of a worker stream after the hellos: what service and client have in common.

Owns: the kinds of worker services, the protocol version, heartbeats and silence, the reader and the writer of a stream.
Must not know: what the messages mean. The other side is trusted with nothing: see `specpipe.codec.batch_from_pb`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

import grpc.aio
from google.protobuf.message import DecodeError

import specpipe
from specpipe import codec
from specpipe.causes import one_cause
from specpipe.errors import InvalidRequestError, WorkerUnavailableError
from specpipe.link import Arrival, Inbox, Outbox
from specpipe.rpc.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from specpipe.types import Batch, Heartbeat, ProcessInfo

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
"""Both ends must have the same; raised with every change that an older peer would misread."""
MINOR_VERSION = 1
"""Any two go together; raised with every field that is added. 0: before it was told."""

END: Any = grpc.aio.EOF  # type: ignore[attr-defined]
"""What is read after a peer's last message."""

Kind = Literal["draft", "target"]


@dataclass(frozen=True, slots=True)
class Wire:
    """The two worker services have the same shape; this is what differs."""

    service_name: str
    info_request: Any
    info_response: Any
    request: Any
    response: Any
    stub: Any
    add_to_server: Any


WIRES: dict[Kind, Wire] = {
    "draft": Wire(
        "specpipe.rpc.v1.DraftService",
        draft_pb2.DraftServiceGetInfoRequest,
        draft_pb2.DraftServiceGetInfoResponse,
        draft_pb2.DraftServiceConnectRequest,
        draft_pb2.DraftServiceConnectResponse,
        draft_pb2_grpc.DraftServiceStub,
        draft_pb2_grpc.add_DraftServiceServicer_to_server,
    ),
    "target": Wire(
        "specpipe.rpc.v1.TargetService",
        target_pb2.TargetServiceGetInfoRequest,
        target_pb2.TargetServiceGetInfoResponse,
        target_pb2.TargetServiceConnectRequest,
        target_pb2.TargetServiceConnectResponse,
        target_pb2_grpc.TargetServiceStub,
        target_pb2_grpc.add_TargetServiceServicer_to_server,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When a peer is told that we live, and when it is taken for gone. `sleep` is replaced by tests."""

    interval_s: float = 1.0  # between heartbeats
    pause_after_s: float = 5.0  # silence after which a worker runs no steps for the stream's sessions
    close_after_s: float = 15.0  # silence after which the stream ends
    hello_timeout_s: float = 10.0  # how long the first message may take
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


def is_milestone(count: int) -> bool:
    """1, 2, 4, 8 and so on: which of many occurrences are logged, so that a peer cannot fill a disk."""
    return count & (count - 1) == 0


def new_incarnation() -> int:
    """A number for this process's life: random, 64 bits, never 0."""
    return secrets.randbits(63) + 1


@dataclass(slots=True, kw_only=True)
class Ends:
    """How a stream reaches its owner."""

    read: Callable[[], Awaitable[Any]]  # the next message, or END
    write: Callable[[Any], Awaitable[None]]
    wrap: Any  # the message class that is sent: wrap(batch=...)
    heartbeat: Callable[[], Heartbeat]
    on_batch: Callable[[Batch, list[codec.Rejection]], Awaitable[None]]  # may wait: nothing is read meanwhile
    on_silence: Callable[[bool], None]  # True: silent for pause_after_s; False: it speaks again


class _PeerHasEnded(Exception):  # noqa: N818 - no error
    """Ends the tasks of a stream. NOTE: a list of them to cancel would be in a cycle with what they raise."""


class WorkerStream:
    """Reads, writes and watches one stream until it ends.

    NOTE: it keeps no `Ends`: they refer to its owner and to the gRPC call, and a call in a cycle of references holds
    its connection, a file descriptor, until the cycles of the whole process are collected.
    """

    def __init__(self, *, limits: codec.Limits, timing: Timing) -> None:
        self.inbox = Inbox()
        self.outbox: Outbox = Outbox()
        self._limits = limits
        self._timing = timing
        self._wake = asyncio.Event()
        self._silent_s = 0.0
        self._is_paused = False
        self._is_busy = False

    def wake(self) -> None:
        """The outbox has something. Called on the event loop."""
        self._wake.set()

    async def run(self, ends: Ends, outbox: Outbox) -> None:
        """Returns when the peer has ended its side.

        Raises WorkerUnavailableError after too much silence, InvalidRequestError if the peer breaks the protocol, and
        AioRpcError if the stream broke.
        """
        self.outbox = outbox
        with contextlib.suppress(_PeerHasEnded), one_cause():
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write(ends))
                group.create_task(self._watch(ends))
                await self._read(ends)
                raise _PeerHasEnded

    async def _read(self, ends: Ends) -> None:
        while (message := await read(ends.read)) is not END:
            if message.WhichOneof("event") != "batch":
                raise InvalidRequestError("after the first message of a stream every message is a batch")
            self._hear(ends)
            if self.inbox.arrival(message.batch.sequence) is Arrival.DUPLICATE:
                continue
            batch, rejected = codec.batch_from_pb(message.batch, self._limits)
            self._is_busy = True
            await ends.on_batch(batch, rejected)
            self._is_busy = False
            self._hear(ends)

    async def _write(self, ends: Ends) -> None:
        """Messages go as they come; while one is under way the outbox merges what follows."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while (batch := self.outbox.take()) is not None:
                    await ends.write(ends.wrap(batch=codec.batch_to_pb(batch)))
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            logger.debug("cannot write: %s", error)  # the reader learns why, and ends the stream

    async def _watch(self, ends: Ends) -> None:
        """Speak each second, and listen.

        Silence is counted in ticks of our own loop, so that a process that was stopped does not blame its peer.
        """
        while True:
            if self.outbox.put_heartbeat(ends.heartbeat()):
                self.wake()
            await self._timing.sleep(self._timing.interval_s)
            if self._is_busy:
                continue
            self._silent_s += self._timing.interval_s
            if self._silent_s >= self._timing.close_after_s:
                raise WorkerUnavailableError(f"no heartbeat for {self._timing.close_after_s:g} s")
            if self._silent_s >= self._timing.pause_after_s and not self._is_paused:
                self._set_paused(ends, True)

    def _hear(self, ends: Ends) -> None:
        self._silent_s = 0.0
        if self._is_paused:
            self._set_paused(ends, False)

    def _set_paused(self, ends: Ends, is_paused: bool) -> None:
        self._is_paused = is_paused
        ends.on_silence(is_paused)


def own_process() -> ProcessInfo:
    """This process, as a Hello tells of it."""
    return ProcessInfo(host=socket.gethostname(), pid=os.getpid(), version=specpipe.__version__)


def told_process(process: ProcessInfo) -> str:
    """For a log: a peer need not say which process it is."""
    return f"pid {process.pid} on {process.host!r}" if process.host else "unknown process"


async def read(next_message: Callable[[], Awaitable[Any]]) -> Any:
    """The next message or END. Raises InvalidRequestError for bytes that are no message."""
    try:
        return await next_message()
    except DecodeError as error:
        raise InvalidRequestError(f"not a message of this stream: {error}") from None
