"""However a link ends, its connection is closed at once, and not when Python next collects cycles of references."""

import asyncio
import itertools
import os
import socket
from contextlib import suppress

import pytest
from collected import nothing_is_collected, num_calls
from fake_step_loop import HELLO, FakeWorker, Ticks, an_open, until
from grpc.aio._call import StreamStreamCall

from specpipe.errors import SpecpipeError, WorkerUnavailableError
from specpipe.types import Hello
from specpipe.worker_client import WorkerLink
from specpipe.worker_stream import Timing

IMPATIENT = Timing(interval_s=0.02, pause_after_s=0.04, close_after_s=0.08, hello_timeout_s=0.2)


def num_sockets():
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket")
    return count


async def read(link):
    async for _ in link:
        pass


async def speak(worker):
    async with worker.connect() as link:
        while True:
            link.send(an_open(1))
            await anext(link)


async def leave_at_once(worker):
    async with worker.connect():
        pass


async def leave_in_the_middle(worker):
    async with worker.connect() as link:
        link.send(an_open(1))
        reading = asyncio.ensure_future(read(link))
        await until(lambda: worker.loop.sessions)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading


async def be_left_in_silence(worker):
    async with worker.connect(timing=IMPATIENT) as link:
        await read(link)


async def be_closed(worker):
    async with worker.connect() as link:
        worker.service.close()
        await read(link)


async def be_refused(worker):
    worker.service.hello = None
    async with worker.connect():
        pass


async def be_of_another_version(worker):
    worker.service.hello = Hello(protocol_version=99, incarnation=1, model=HELLO.model)
    async with worker.connect():
        pass


ENDS = [leave_at_once, leave_in_the_middle, be_left_in_silence, be_closed, be_refused, be_of_another_version]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_a_link_that_ends_leaves_no_descriptor_and_no_call(end):
    async with FakeWorker(timing=Timing(sleep=Ticks().sleep)) as worker:
        with nothing_is_collected():
            before = num_sockets()
            for _ in range(3):
                with suppress(SpecpipeError):
                    await end(worker)
            await until(lambda: num_calls() == 0)
            await until(lambda: num_sockets() <= before)


async def test_dialling_a_frozen_process_leaves_none_either():
    """Its kernel takes the connection and nobody says a word on it."""
    with socket.socket() as frozen, nothing_is_collected():
        frozen.bind(("127.0.0.1", 0))
        frozen.listen()
        before = num_sockets()
        for _ in range(2):
            with pytest.raises(SpecpipeError):
                async with WorkerLink.connect(f"127.0.0.1:{frozen.getsockname()[1]}", "target", 1, timing=IMPATIENT):
                    pass
        await until(lambda: num_calls() == 0)
        await until(lambda: num_sockets() <= before)


@pytest.mark.parametrize("num_written", [0, 1, 3])
async def test_a_link_whose_write_fails_leaves_none_either(num_written, monkeypatch):
    """gRPC takes the call for ended then, though its core goes on with it. The first that is written is the hello."""
    write, count = StreamStreamCall.write, itertools.count()

    async def breaks(call, request):
        if next(count) % (num_written + 1) < num_written:
            await write(call, request)
            return
        call._cython_call.set_internal_error("execute_batch failed")
        await call._raise_for_status()

    monkeypatch.setattr(StreamStreamCall, "write", breaks)
    async with FakeWorker() as worker:
        with nothing_is_collected():
            before = num_sockets()
            for _ in range(3):
                with pytest.raises(WorkerUnavailableError, match="connection broke"):
                    await speak(worker)
            await until(lambda: num_calls() == 0)
            await until(lambda: num_sockets() <= before)
