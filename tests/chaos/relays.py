"""Networks of the tests that fail in one direction or both: by bytes (any TCP), and by messages (worker streams).

Owns: what happens between who dials and who listens. Must not know: processes, sessions, when something fails.

TCP loses, doubles and reorders nothing, so that belongs to messages: `StreamRelay` parses batches, and does to each
what the protocol allows for (docs/chaos.md). What opens or ends a session keeps its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, Self

import grpc
import grpc.aio
from faults import Way

from specpipe.rpc.v1 import target_pb2
from specpipe.server import channel_options, server_options

MAX_LATE = 5  # messages that may overtake one


class Relay(Protocol):
    """Held: what is sent waits, and comes when the relay is released, unless the connection has ended."""

    delay_s: float  # each piece waits up to this long; pieces keep their order

    @property
    def address(self) -> str: ...

    def hold(self, ways: Iterable[Way]) -> None: ...

    def release(self) -> None: ...

    def cut(self) -> None:
        """Both ends of every connection are reset."""
        ...


class _Gates:
    """Which directions are open."""

    def __init__(self, seed: int) -> None:
        self.delay_s = 0.0
        self.random = random.Random(seed)
        self._is_open = {way: asyncio.Event() for way in Way}
        self.release()

    def hold(self, ways: Iterable[Way]) -> None:
        for way in ways:
            self._is_open[way].clear()

    def release(self) -> None:
        for gate in self._is_open.values():
            gate.set()

    async def passed(self, way: Way) -> None:
        if self.delay_s:
            await asyncio.sleep(self.random.uniform(0.0, self.delay_s))
        await self._is_open[way].wait()


class WireRelay(_Gates):
    """`async with WireRelay(address) as relay`: what is sent to `relay.address` goes to `address`, and back."""

    def __init__(self, to_address: str, *, seed: int = 0) -> None:
        super().__init__(seed)
        self._host, _, self._port = to_address.rpartition(":")
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the next turn of the loop

    def cut(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._join(reader, writer)
        finally:
            self._drop(writer)
            self._tasks.discard(task)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers.add(there_writer)
        pumps = [
            asyncio.create_task(self._pump(reader, there_writer, Way.THERE)),
            asyncio.create_task(self._pump(there_reader, writer, Way.BACK)),
        ]
        try:
            await asyncio.gather(*pumps)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._drop(there_writer)

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        while data := await reader.read(65536):
            await self.passed(way)
            writer.write(data)
            await writer.drain()
        await self.passed(way)
        with contextlib.suppress(OSError):
            writer.write_eof()


class StreamRelay(_Gates):
    """The same for the RPCs of one worker, message by message; `is_shuffling` loses, doubles and reorders them."""

    def __init__(self, to_address: str, *, seed: int = 0) -> None:
        super().__init__(seed)
        self.is_shuffling = False
        self.num_mangled = 0
        self._to_address = to_address
        self._cuts: set[asyncio.Event] = set()  # of running calls

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._to_address, options=channel_options())
        self._server = grpc.aio.server(options=server_options())
        self._server.add_generic_rpc_handlers((_AnyMethod(self._relay),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()
        self.cut()
        await self._server.stop(None)
        await self._channel.close()

    def cut(self) -> None:
        for cut in self._cuts:
            cut.set()

    async def _relay(self, method: str, context: Any) -> None:
        """A unary call is a stream of one message each way, so that one handler does for all."""
        call = self._channel.stream_stream(method)(timeout=context.time_remaining())
        cut = asyncio.Event()
        self._cuts.add(cut)
        there = asyncio.create_task(self._pump(context.read, call.write, Way.THERE, call.done_writing))
        back = asyncio.create_task(self._pump(call.read, context.write, Way.BACK))
        waiting = asyncio.create_task(cut.wait())
        try:
            await asyncio.wait([back, waiting], return_when=asyncio.FIRST_COMPLETED)
            if cut.is_set():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the relay was cut: connection reset by peer")
            code, details = await call.code(), await call.details()
            if code is not grpc.StatusCode.OK:
                await context.abort(code, details or "", tuple(await call.trailing_metadata() or ()))
        finally:
            self._cuts.discard(cut)
            call.cancel()
            for task in (there, back, waiting):
                task.cancel()
            await asyncio.gather(there, back, waiting, return_exceptions=True)

    async def _pump(
        self,
        read: Callable[[], Awaitable[Any]],
        write: Callable[[bytes], Awaitable[None]],
        way: Way,
        done: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        lane = Shuffler(self.random)
        while (message := await read()) is not grpc.aio.EOF:
            await self.passed(way)
            for passed in lane.passed(message) if self.is_shuffling else lane.flushed(message):
                await write(passed)
            self.num_mangled += lane.take_count()
        if done is not None:
            await done()


class _AnyMethod(grpc.GenericRpcHandler):
    def __init__(self, relay: Callable[[str, Any], Awaitable[None]]) -> None:
        self._relay = relay

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        async def relay(_: Any, context: Any) -> None:
            await self._relay(details.method, context)

        return grpc.stream_stream_rpc_method_handler(relay)


class Shuffler:
    """One direction of a worker stream, message after message. Pure, but for its random numbers."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng
        self._held: list[tuple[int, bytes]] = []  # after how many more messages it comes
        self._num_mangled = 0

    def take_count(self) -> int:
        """Messages lost, doubled or held back since it was asked last."""
        count, self._num_mangled = self._num_mangled, 0
        return count

    def flushed(self, message: bytes) -> list[bytes]:
        """What was held back, then the message."""
        held, self._held = self._held, []
        return [*(late for _, late in held), message]

    def passed(self, message: bytes) -> list[bytes]:
        """What goes out when `message` comes in: it may be lost, come later, and come again later."""
        due = [late for left, late in self._held if left <= 1]
        self._held = [(left - 1, late) for left, late in self._held if left > 1]
        return [*self._fate(message), *due]

    def _fate(self, message: bytes) -> list[bytes]:
        batch = _batch_of(message)
        if batch is None:
            return [message]
        chance = self._random.random()
        later = self._random.randint(1, MAX_LATE)
        if chance < 0.15:  # again, now or later
            self._held.append((later, message))
        elif _may_be_late(batch) and chance < 0.3:  # later
            self._held.append((later, message))
            self._num_mangled += 1
            return []
        elif _may_be_late(batch) and chance < 0.4:  # never
            self._num_mangled += 1
            return []
        self._num_mangled += chance < 0.15
        return [message]


def _batch_of(message: bytes) -> Any:
    """None for anything but a batch. Requests and responses of both kinds of worker look the same on the wire."""
    parsed = target_pb2.TargetServiceConnectRequest.FromString(message)
    return parsed.batch if parsed.WhichOneof("event") == "batch" else None


def _may_be_late(batch: Any) -> bool:
    """It neither opens a session nor ends one."""
    return not (batch.opens or batch.closes or batch.failures or batch.closed)
