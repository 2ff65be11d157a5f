"""The health of a process as its keeper sees it: told as it is, and when it is past waiting for."""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from tcp_relay import TcpRelay
from waiting import wait_until

from specpipe.cluster.health import Health, HealthPatience, ProcessHealth, answers_grpc, tls_of
from specpipe.cluster.keeper import Keeper
from specpipe.config import ServerConfig, TlsConfig
from specpipe.errors import WorkerUnavailableError
from specpipe.health_client import HealthClient
from specpipe.launcher.plan import DRAFT_WORKER, TARGET_WORKER, ProcessSpec
from specpipe.server import Server, create_channel, create_server

SPEC = ProcessSpec(role=DRAFT_WORKER, arguments=("--model", "x"))
QUICK = HealthPatience(every_s=0.01, answer_s=5.0, hung_s=0.1)


@asynccontextmanager
async def served() -> AsyncIterator[Server]:
    server = create_server(ServerConfig(), [])
    await server.start()
    await server.set_serving(True)
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def watched(
    address: str, patience: HealthPatience = QUICK
) -> AsyncIterator[tuple[ProcessHealth, asyncio.Task[str]]]:
    health = ProcessHealth(address, SPEC, patience)
    hangs = asyncio.create_task(health.hangs())
    try:
        yield health, hangs
    finally:
        hangs.cancel()
        await asyncio.gather(hangs, return_exceptions=True)


async def test_it_is_told_as_it_changes() -> None:
    async with served() as server, watched(server.address) as (health, hangs):
        await server.set_serving(False)
        assert await health.differs_from(Health.SERVING) is Health.NOT_SERVING
        await server.set_serving(True)
        assert await health.differs_from(Health.NOT_SERVING) is Health.SERVING
        assert not hangs.done(), "what lives and does not serve is left alone"


async def test_whoever_follows_it_hears_that_the_process_has_ended() -> None:
    health = ProcessHealth("127.0.0.1:1", SPEC, QUICK)
    following = asyncio.create_task(health.differs_from(Health.SERVING))
    await asyncio.sleep(0)
    health.end()
    for asked in (following, health.differs_from(Health.SILENT)):
        with pytest.raises(WorkerUnavailableError, match="the process has ended"):
            await asked


async def test_what_says_that_it_hangs_is_past_waiting_for_after_a_while() -> None:
    async with served() as server, watched(server.address) as (_, hangs):
        await server.set_alive(False)
        assert (await hangs).startswith("it has said that it hangs for")


async def test_what_does_not_answer_is_silent_and_then_past_waiting_for() -> None:
    patience = HealthPatience(every_s=0.01, answer_s=0.2, hung_s=1.0)
    async with (
        served() as server,
        TcpRelay(int(server.address.rpartition(":")[2])) as relay,
        watched(relay.address, patience) as (health, hangs),
    ):
        await server.set_serving(False)
        await health.differs_from(Health.SERVING)  # it has answered
        relay.block()
        assert await health.differs_from(Health.NOT_SERVING) is Health.SILENT
        assert (await hangs).startswith("it has not answered for")


async def test_what_has_closed_its_port_is_about_to_end_and_does_not_hang() -> None:
    """A coordinator does so as soon as it is told to end, and its answers go on for the grace."""
    async with served() as server, watched(server.address) as (health, hangs):
        await server.set_serving(False)
        await health.differs_from(Health.SERVING)  # it has answered
        await server.close()
        await asyncio.wait([hangs], timeout=5 * QUICK.hung_s)
        assert not hangs.done()
        assert health.now is Health.NOT_SERVING


async def test_what_has_never_answered_is_not_judged() -> None:
    """Who asks may be kept away from it: that is no fault of the process."""
    asked = HealthPatience(every_s=0.01, answer_s=0.05, hung_s=0.02)
    async with watched("127.0.0.1:1", asked) as (health, hangs):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await hangs
        assert health.now is Health.SERVING


async def test_an_answer_that_cannot_be_read_is_none() -> None:
    async def answer(_request: bytes, _context: object) -> bytes:
        return b"\xff"

    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with create_channel(f"127.0.0.1:{port}") as channel:
        assert await HealthClient(channel, timeout_s=10.0).is_well("") is None
    await server.stop(0)


async def test_health_that_cannot_be_asked_for_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ProcessHealth):
        async def hangs(self) -> str:
            raise RuntimeError("no idea")

    child = types.SimpleNamespace(pid=7)
    await Keeper("127.0.0.1")._end_hung(child, Broken("127.0.0.1:1", SPEC, QUICK))  # type: ignore[arg-type]
    assert "pid 7: nobody ends it any more if it hangs" in caplog.text
    assert "no idea" in caplog.text


async def test_certificates_that_are_not_there_end_nothing(tmp_path: Path) -> None:
    spec = ProcessSpec(role=DRAFT_WORKER, arguments=("--tls-ca", str(tmp_path / "none.crt")))
    hangs = asyncio.create_task(ProcessHealth("127.0.0.1:1", spec, QUICK).hangs())
    await asyncio.wait([hangs], timeout=0.1)
    assert not hangs.done()
    hangs.cancel()
    await wait_until(hangs.done)


def test_certificates_are_those_of_the_process() -> None:
    arguments = ("--model", "x", "--tls-cert", "/a", "--tls-key", "/b", "--tls-ca", "/c")
    assert tls_of(ProcessSpec(role=DRAFT_WORKER, arguments=arguments)) == TlsConfig(cert="/a", key="/b", ca="/c")
    assert not tls_of(SPEC).is_on


def test_a_rank_that_is_no_server_is_not_asked() -> None:
    for rank, is_server in ((0, True), (1, False)):
        spec = ProcessSpec(role=TARGET_WORKER, arguments=("--rank", str(rank), "--rendezvous", "10.0.0.1:1"))
        assert answers_grpc(spec) is is_server
    assert answers_grpc(SPEC)
