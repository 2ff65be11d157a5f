"""Coordinators that die while they answer: clients ask another with the same request id, and the answer goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from coordinator_cluster import Cluster, ask, cluster
from coordinator_process import coordinator_process, free_port
from tcp_relay import TcpRelay
from waiting import wait_until

from coordinator.codec import event_to_pb
from coordinator.service import SERVICE_NAMES
from coordinator.validation import seed_of
from specpipe.answers import AnswerEvent, Chunk, Finished, Started
from specpipe.client import Answer, GenerateClient, GenerateRequest
from specpipe.config import ServerConfig
from specpipe.errors import DuplicateRequestError, WorkerUnavailableError
from specpipe.rpc.v1 import generate_pb2_grpc
from specpipe.server import create_server
from specpipe.types import Mode, Rule


def ask_unseeded(**options: Any) -> GenerateRequest:
    return ask(**{"seed": None, "temperature": 0.8, "max_tokens": 80, **options})


class Following:
    """Reads an answer in the background, every event of it."""

    def __init__(self, client: GenerateClient, request: GenerateRequest) -> None:
        self.events: list[AnswerEvent] = []
        self.answer = Answer()
        self.task = asyncio.ensure_future(self._read(client, request))

    async def _read(self, client: GenerateClient, request: GenerateRequest) -> Answer:
        async for event in client.generate(request, timeout_s=60):
            self.events.append(event)
            self.answer.add(event)
        return self.answer

    async def has(self, num_tokens: int) -> None:
        await wait_until(lambda: len(self.answer.token_ids) >= num_tokens or self.task.done())
        assert not self.task.done(), "still in mid-answer"


def set_slow(service: Cluster, is_slow: bool) -> None:
    for target in service.targets:
        target.gated.delay_s = 0.03 if is_slow else 0.0


async def test_the_answer_of_a_killed_coordinator_goes_on_at_another_token_for_token() -> None:
    async with cluster() as service:
        workers = (service.targets[0].address, service.drafts[0].address)
        async with coordinator_process(*workers) as first, GenerateClient([first.address, service.address]) as client:
            await wait_until(lambda: first.is_ready, timeout_s=60)
            set_slow(service, True)
            modes = (None, Mode.SYNC, Mode.OFF)
            readings = [Following(client, ask_unseeded(request_id=f"r{mode}", mode=mode)) for mode in modes]
            for reading in readings:
                await reading.has(10)
            first.process.kill()
            set_slow(service, False)
            for mode, reading in zip(modes, readings, strict=True):
                answer = await reading.task
                plain = await service.client.answer(ask_unseeded(mode=Mode.OFF, seed=seed_of(f"r{mode}")), timeout_s=60)
                assert (answer.token_ids, answer.text) == (plain.token_ids, plain.text)
                assert len(answer.token_ids) == 80
                kinds = [type(event) for event in reading.events]
                assert kinds[0] is Started
                assert kinds[-1] is Finished
                assert set(kinds[1:-1]) == {Chunk}
        await wait_until(lambda: service.is_idle)


async def test_two_coordinators_answer_a_request_id_without_a_seed_alike() -> None:
    async with cluster() as service:
        workers = (service.targets[0].address, service.drafts[0].address)
        async with coordinator_process(*workers) as other, GenerateClient(other.address) as client:
            await wait_until(lambda: other.is_ready, timeout_s=60)
            request = ask_unseeded(request_id="the same", max_tokens=40)
            there, here = await client.answer(request, timeout_s=60), await service.client.answer(request, timeout_s=60)
            assert there.token_ids == here.token_ids
            assert there.started == here.started
            assert here.started is not None
            assert here.started.seed == seed_of("the same")


async def test_an_answer_goes_on_at_its_own_coordinator_when_only_the_connection_broke() -> None:
    async with cluster() as service, TcpRelay(port_of(service)) as relay:
        set_slow(service, True)
        async with GenerateClient([relay.address, service.address]) as client:
            reading = Following(client, ask_unseeded())
            await reading.has(10)
            relay.cut()
            set_slow(service, False)
            answer = await reading.task
            assert answer.started is not None
            expected = await service.client.answer(ask_unseeded(mode=Mode.OFF, seed=answer.started.seed), timeout_s=60)
            assert answer.token_ids == expected.token_ids
        await wait_until(lambda: service.is_idle)


class Holding(generate_pb2_grpc.GenerateServiceServicer):
    """Refuses a question twice because it still has it, and then answers."""

    num_asked = 0

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - the RPC's names
        self.num_asked += 1
        if self.num_asked <= 2:
            raise DuplicateRequestError("still live")
        yield event_to_pb(Started(request_id=request.request_id, model="m", prompt_tokens=1, seed=1))


async def test_a_request_that_the_coordinator_still_holds_is_waited_for() -> None:
    """The client has lost its connection, and the coordinator has not heard of it yet."""
    holding, server = Holding(), create_server(ServerConfig(), SERVICE_NAMES)
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(holding, server.grpc_server)
    await server.start()
    try:
        async with GenerateClient([f"127.0.0.1:{free_port()}", server.address]) as client:
            answer = await client.answer(GenerateRequest(prompt="x", request_id="held"), timeout_s=60)
    finally:
        await server.stop()
    assert answer.started is not None
    assert (answer.started.request_id, holding.num_asked) == ("held", 3)


class Dropping(generate_pb2_grpc.GenerateServiceServicer):
    """Drops the first call as gRPC does where a server begins to end, and answers the next."""

    num_asked = 0

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - the RPC's names
        self.num_asked += 1
        if self.num_asked == 1:
            await context.abort(grpc.StatusCode.CANCELLED)
        yield event_to_pb(Started(request_id="r", model="m", prompt_tokens=1, seed=1))


async def test_a_call_that_is_dropped_before_anything_was_said_is_made_again_at_the_same_address() -> None:
    dropping, server = Dropping(), create_server(ServerConfig(), SERVICE_NAMES)
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(dropping, server.grpc_server)
    await server.start()
    try:
        async with GenerateClient(server.address) as client:
            answer = await client.answer(GenerateRequest(prompt="x"), timeout_s=60)
    finally:
        await server.stop()
    assert answer.started is not None
    assert dropping.num_asked == 2


async def test_a_live_request_id_is_refused_at_once_where_it_is_first_asked_for() -> None:
    async with cluster() as service:
        set_slow(service, True)
        held = Following(service.client, ask_unseeded(request_id="held"))
        await held.has(1)
        async with GenerateClient([service.address, service.address]) as client:
            with pytest.raises(DuplicateRequestError):
                await client.answer(ask_unseeded(request_id="held"), timeout_s=60)
        set_slow(service, False)
        await held.task


@pytest.mark.parametrize("temperature", [0.8, 0.0])
async def test_under_the_rejection_rule_only_a_greedy_answer_goes_on_elsewhere(temperature: float) -> None:
    async with cluster() as service, TcpRelay(port_of(service)) as relay:
        set_slow(service, True)
        request = ask_unseeded(rule=Rule.REJECTION, temperature=temperature)
        async with GenerateClient([relay.address, service.address]) as client:
            reading = Following(client, request)
            await reading.has(5)
            relay.cut()
            set_slow(service, False)
            if temperature:
                with pytest.raises(WorkerUnavailableError, match="tokens were delivered, and under the rejection rule"):
                    await reading.task
                assert reading.answer.finished is None
            else:
                answer = await reading.task
                assert answer.token_ids == (await service.client.answer(request, timeout_s=60)).token_ids
        await wait_until(lambda: service.is_idle)


async def test_with_every_coordinator_dead_there_is_one_error_that_names_each() -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    async with GenerateClient(addresses) as client:
        with pytest.raises(WorkerUnavailableError) as caught:
            await client.answer(ask(), timeout_s=60)
        told = "; ".join(
            f"{address}: nothing listens there: it is not started, or the address is wrong" for address in addresses
        )
        assert str(caught.value) == f"no coordinator answers: {told}"


async def test_traces_are_asked_for_at_every_address() -> None:
    async with cluster() as service:
        async with GenerateClient([f"127.0.0.1:{free_port()}", service.address]) as client:
            await client.answer(ask(request_id="traced", trace=True), timeout_s=60)
        async with GenerateClient([f"127.0.0.1:{free_port()}", service.address]) as client:
            assert (await client.get_trace("traced")).spans


def port_of(service: Cluster) -> int:
    return int(service.address.rpartition(":")[2])
