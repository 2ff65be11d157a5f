"""A worker that says what a test wants: it speaks the protocol, and the rest is lies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from specpipe.codec_hello import hello_to_pb
from specpipe.config import ServerConfig
from specpipe.rpc.v1 import worker_pb2
from specpipe.server import create_server
from specpipe.types import Hello, ModelInfo
from specpipe.worker_stream import END, PROTOCOL_VERSION, WIRES, new_incarnation

Lie = Callable[[worker_pb2.Batch], Iterator[worker_pb2.Batch]]
"""What the worker answers to a batch of the coordinator; batches without a sequence get the next number."""


class LyingWorker:
    """Stands for a `coordinator_cluster.Worker`. Heartbeats are its only honest words."""

    num_sessions = 0

    def __init__(self, kind: Any, model: ModelInfo, lie: Lie, *, hello: dict[str, Any] | None = None) -> None:
        self.kind = kind
        self.num_heard = 0  # batches of coordinators
        self.num_streams = 0
        self._lie = lie
        self._hello = Hello(
            **{
                "protocol_version": PROTOCOL_VERSION,
                "incarnation": new_incarnation(),
                "model": model,
                "num_slots": 1000,
                "max_sessions": 0,  # any number: it never says that one is over
            }
            | (hello or {})
        )

    async def start(self) -> None:
        self.server = create_server(ServerConfig(), [WIRES[self.kind].service_name])
        WIRES[self.kind].add_to_server(self, self.server.grpc_server)
        await self.server.start()

    async def end(self) -> None:
        await self.server.stop(0.0)

    @property
    def address(self) -> str:
        return self.server.address

    async def GetInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return WIRES[self.kind].info_response(hello=hello_to_pb(self._hello))

    async def Connect(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        self.num_streams += 1
        wrap = WIRES[self.kind].response
        numbers = itertools.count(1)
        lock = asyncio.Lock()

        async def say(batch: worker_pb2.Batch) -> None:
            async with lock:
                batch.sequence = batch.sequence or next(numbers)
                await context.write(wrap(batch=batch))

        async def beat() -> None:
            while True:
                await say(worker_pb2.Batch(heartbeat=worker_pb2.Heartbeat()))
                await asyncio.sleep(0.1)

        await context.read()
        await context.write(wrap(hello=hello_to_pb(self._hello)))
        heart = asyncio.ensure_future(beat())
        try:
            while (message := await context.read()) is not END:
                self.num_heard += 1
                for batch in self._lie(message.batch):
                    await say(batch)
        finally:
            heart.cancel()
            await asyncio.gather(heart, return_exceptions=True)
