"""The tools of the chaos tests: what relays do to bytes and messages, and that a seed gives one schedule."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest
from faults import Kind, Phase, Victims, Way, draw_faults
from relays import MAX_LATE, Shuffler, WireRelay
from waiting import wait_until

from specpipe.rpc.v1 import target_pb2, worker_pb2

VICTIMS = Victims(
    processes=(("coordinator",), ("draft-1", "draft-2"), ("target-1",), ("rank",)),
    links=(("client>coordinator",), ("coordinator>draft-1", "coordinator>draft-2")),
    link_kinds=(Kind.CUT, Kind.HOLD),
    shuffled=("coordinator>draft-1",),
)


class Echo:
    """A server that says each piece again, and a connection to it through a relay."""

    def __init__(self, relay: WireRelay, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.relay = relay
        self.came = b""
        self.is_over = False
        self.send = writer.write
        self._writer = writer
        self._reading = asyncio.ensure_future(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(100):
                self.came += piece
        self.is_over = True

    async def end(self) -> None:
        self.relay.cut()
        await self._reading
        await close(self._writer)


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    async def say_again(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(100):
                writer.write(piece)
        await close(writer)

    server = await asyncio.start_server(say_again, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, WireRelay(f"{host}:{port}") as relay:
        connected = Echo(relay, *await asyncio.open_connection(*relay.address.split(":")))
        yield connected
        await connected.end()


async def test_a_relay_that_is_held_one_way_or_the_other_passes_on_all_when_it_is_released(echo: Echo) -> None:
    for way in Way:
        before = echo.came
        echo.relay.hold([way])
        echo.send(b"while held ")
        echo.relay.release()
        await wait_until(lambda before=before: echo.came == before + b"while held ")
    assert not echo.is_over


async def test_a_relay_that_is_cut_ends_the_connection(echo: Echo) -> None:
    echo.send(b"first")
    await wait_until(lambda: echo.came == b"first")
    echo.relay.cut()
    await wait_until(lambda: echo.is_over)


def a_message(sequence: int, *, opens: int = 0) -> bytes:
    batch = worker_pb2.Batch(sequence=sequence, opens=[worker_pb2.Open(session=1)] * opens)
    return target_pb2.TargetServiceConnectRequest(batch=batch).SerializeToString()


def sequence_of(message: bytes) -> int:
    return int(target_pb2.TargetServiceConnectRequest.FromString(message).batch.sequence)


@pytest.mark.parametrize("seed", range(20))
def test_what_opens_a_session_is_never_lost_or_late_though_other_messages_are(seed: int) -> None:
    shuffler = Shuffler(random.Random(seed))
    hello = target_pb2.TargetServiceConnectRequest(hello=worker_pb2.Hello(incarnation=1)).SerializeToString()
    assert shuffler.passed(hello) == [hello]
    came: list[int] = []
    for number in range(1, 201):
        passed = shuffler.passed(a_message(number, opens=number % 3 == 0))
        came += map(sequence_of, passed)
        assert number % 3 or sequence_of(passed[0]) == number
        assert all(number - sequence_of(message) <= MAX_LATE for message in passed)
    assert len(set(came)) < 200, "some are lost"
    assert len(came) > len(set(came)), "some are doubled"
    assert came != sorted(came), "some are late"
    assert shuffler.take_count() > 0


def test_the_rest_comes_when_shuffling_ends() -> None:
    shuffler = Shuffler(random.Random(1))
    for number in range(1, 50):
        shuffler.passed(a_message(number))
    *held, last = shuffler.flushed(a_message(50))
    assert held
    assert sequence_of(last) == 50
    assert shuffler.flushed(last) == [last]


def test_one_seed_is_one_schedule_and_every_kind_of_fault_comes_before_one_comes_again() -> None:
    faults = draw_faults(7, 18, VICTIMS)
    assert faults == draw_faults(7, 18, VICTIMS)
    assert faults != draw_faults(8, 18, VICTIMS)
    sorts = [(fault.kind, fault.victim.removesuffix("-1").removesuffix("-2")) for fault in faults]
    assert len(set(sorts)) == len(sorts) - 1  # shuffling is dealt twice
    assert {fault.phase for fault in faults} == set(Phase)
    assert all(fault.lasts_s > 0 for fault in faults if fault.kind in (Kind.FREEZE, Kind.HOLD, Kind.SHUFFLE))
    assert all(bool(fault.ways) is (fault.kind is Kind.HOLD) for fault in faults)
