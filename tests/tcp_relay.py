"""A network between a client and a server of the tests: it may be slow, blocked, or cut."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from typing import Self


class TcpRelay:
    """`async with TcpRelay(port) as relay`: what is sent to `relay.port` goes to `port` on this machine, and back."""

    def __init__(self, port: int, *, max_delay_s: float = 0.0, seed: int = 0) -> None:
        self.max_delay_s = max_delay_s  # each piece of a stream waits up to this long; pieces keep their order
        self.target_port = port  # where connections lead that are made from now on
        self._random = random.Random(seed)
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

        self.num_connections = 0  # that were ever made

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def block(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        self._is_open.clear()

    def unblock(self) -> None:
        """What was sent meanwhile arrives now."""
        self._is_open.set()

    def cut(self) -> None:
        """Both ends of every connection are reset."""
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.num_connections += 1
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            await self._is_open.wait()
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
            self._writers.add(there_writer)
            try:
                await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
            finally:
                self._drop(there_writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._drop(writer)
            self._tasks.discard(task)

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self.max_delay_s:
                await asyncio.sleep(self._random.uniform(0.0, self.max_delay_s))
            await self._is_open.wait()
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()


def is_listening(address: str) -> bool:
    """Whether connections to HOST:PORT are accepted."""
    host, _, port = address.rpartition(":")
    with socket.socket() as trial:
        return trial.connect_ex((host, int(port))) == 0
