"""Health for probes: on a port of its own, and apart from it whether the process goes on."""

from __future__ import annotations

import asyncio
import socket
import threading

import grpc.aio
import pytest
from coordinator_cluster import cluster
from fake_step_loop import FakeWorker, an_open, until
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.tokenization import Tokenization
from specpipe.client import GenerateRequest
from specpipe.config import ServerConfig
from specpipe.errors import ConfigError
from specpipe.server import LIVENESS, create_channel, create_server
from specpipe.worker_stream import WIRES, Timing

SERVING = health_pb2.HealthCheckResponse.SERVING


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def is_well(address: str, service: str = "") -> bool:
    async with create_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=20)
    return bool(response.status == SERVING)


async def test_the_health_port_tells_the_same_and_serves_nothing_else() -> None:
    port, wire = free_port(), WIRES["target"]
    address = f"127.0.0.1:{port}"
    server = create_server(ServerConfig(health_port=port), [wire.service_name])
    await server.start()
    try:
        assert not await is_well(address)
        assert not await is_well(server.address)
        await server.set_serving(True)
        assert await is_well(address)
        assert await is_well(address, wire.service_name)
        async with create_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await wire.stub(channel).GetInfo(wire.info_request(num_vocabulary_ids=0), timeout=20)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop()


async def test_the_health_port_answers_while_a_server_closes() -> None:
    port = free_port()
    server = create_server(ServerConfig(health_port=port), [])
    await server.start()
    try:
        await server.close()
        assert not await is_well(f"127.0.0.1:{port}")
        assert await is_well(f"127.0.0.1:{port}", LIVENESS)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await is_well(server.address)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop()


async def test_a_taken_health_port_is_told() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is already in use"):
            create_server(ServerConfig(health_port=port), [])


async def test_a_process_that_is_not_ready_is_alive() -> None:
    server = create_server(ServerConfig(), [])
    await server.start()
    try:
        assert not await is_well(server.address)
        assert await is_well(server.address, LIVENESS)
    finally:
        await server.stop()


async def test_a_worker_whose_step_hangs_is_neither_ready_nor_alive_and_one_that_drains_is_alive() -> None:
    async with FakeWorker(timing=Timing(interval_s=0.01)) as worker:
        watch = asyncio.create_task(worker.service.watch_health(worker.server))
        async with worker.connect() as link:
            await until(lambda: worker.server.is_serving)
            link.send(an_open(1))
            await until(lambda: worker.loop.sessions)
            worker.loop.step_running_ms = 31_000.0
            await until(lambda: not worker.server.is_alive)
            assert not worker.server.is_serving
            assert not await is_well(worker.address, LIVENESS)
            worker.loop.step_running_ms = 0.0
            await until(lambda: worker.server.is_alive and worker.server.is_serving)
            drain = asyncio.create_task(worker.service.drain(worker.server))
            await until(lambda: not worker.server.is_serving)
            assert await is_well(worker.address, LIVENESS)
            drain.cancel()
        watch.cancel()


async def test_a_coordinator_whose_tokenizer_hangs_is_neither_ready_nor_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    encode = Tokenization.encode

    def hang(tokens: Tokenization, text: str) -> list[int]:
        may_end.wait(60)
        return encode(tokens, text)

    async with cluster() as service:
        address = service.app.server.address
        await until(lambda: service.app.server.is_serving)
        monkeypatch.setattr(Tokenization, "encode", hang)
        monkeypatch.setattr("coordinator.tokenization.STUCK_JOB_S", 0.0)
        asking = asyncio.create_task(service.client.answer(GenerateRequest(prompt="Hello", max_tokens=2), timeout_s=60))
        try:
            await until(lambda: not service.app.server.is_alive)
            assert not await is_well(address)
            assert not await is_well(address, LIVENESS)
        finally:
            may_end.set()
        assert (await asking).token_ids
        await until(lambda: service.app.server.is_alive and service.app.server.is_serving)
