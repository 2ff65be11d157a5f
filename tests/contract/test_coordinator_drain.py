"""A coordinator that ends in order: its answers complete, and its clients' next requests go to another one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from coordinator_cluster import Cluster, Reading, ask, cluster, plain
from tcp_relay import TcpRelay, is_listening
from waiting import wait_until

from specpipe.client import GenerateClient
from specpipe.errors import WorkerUnavailableError
from specpipe.types import Mode

NUM_ASKING = 8
LONG = 300  # tokens
SHORT = 2


def port_of(service: Cluster) -> int:
    return int(service.address.rpartition(":")[2])


def reading_long(service: Cluster, client: GenerateClient) -> Reading:
    """Slowly, until `hurry`."""
    service.targets[0].gated.delay_s = 0.01
    return Reading(replace(service, client=client), ask(mode=Mode.OFF, max_tokens=LONG))


def hurry(service: Cluster) -> None:
    service.targets[0].gated.delay_s = 0.0
    service.targets[0].gate.set()


class Asking:
    """Short questions without a pause. The first that fails ends it, and is raised by `end`."""

    def __init__(self, client: GenerateClient) -> None:
        self.answers: list[list[int]] = []
        self._is_ending = False
        self._task = asyncio.create_task(self._ask_on(client))

    async def answers_more(self, count: int) -> None:
        enough = len(self.answers) + count
        await wait_until(lambda: len(self.answers) >= enough or self._task.done(), timeout_s=30)

    async def end(self) -> list[list[int]]:
        self._is_ending = True
        await self._task
        return self.answers

    async def _ask_on(self, client: GenerateClient) -> None:
        while not self._is_ending:
            self.answers.append((await client.answer(ask(mode=Mode.OFF, max_tokens=SHORT), timeout_s=60)).token_ids)


async def test_behind_one_address_no_request_fails_while_a_coordinator_drains() -> None:
    """As behind a Service of Kubernetes: connections lead to a coordinator that is ready, calls follow connections."""
    async with cluster() as service, cluster() as successor, TcpRelay(port_of(service)) as relay:
        expected, expected_short = await plain(successor, max_tokens=LONG), await plain(successor, max_tokens=SHORT)
        async with GenerateClient(relay.address) as client:
            long = reading_long(service, client)
            await long.has(10)
            asking = [Asking(client) for _ in range(NUM_ASKING)]
            await asking[0].answers_more(3)
            assert relay.num_connections == 1
            relay.target_port = port_of(successor)
            draining = asyncio.create_task(service.app.drain())
            await wait_until(lambda: relay.num_connections == 2 and service.coordinator.num_running <= 1)
            service.targets[0].gate.clear()
            for one in asking:
                await one.answers_more(2)
            assert (service.coordinator.num_running, draining.done()) == (1, False), "for the long answer"
            for one in asking:
                assert {tuple(answer) for answer in await one.end()} == {tuple(expected_short)}
            hurry(service)
            assert (await long.task).token_ids == expected
        await asyncio.wait_for(draining, 20)


async def test_with_two_addresses_no_request_fails_while_a_coordinator_drains() -> None:
    async with cluster() as service, cluster() as successor:
        expected = await plain(successor, max_tokens=LONG)
        async with GenerateClient([service.address, successor.address]) as client:
            long = reading_long(service, client)
            await long.has(10)
            service.targets[0].gate.clear()
            draining = asyncio.create_task(service.app.drain())
            await wait_until(lambda: not is_listening(service.address))
            for number in range(5):
                request = ask(mode=Mode.OFF, max_tokens=SHORT, trace=True, request_id=f"short {number}")
                assert (await client.answer(request, timeout_s=60)).finished is not None
                assert (await client.get_trace(request.request_id)).spans, "asked for where it was answered"
            assert not draining.done()
            hurry(service)
            assert (await long.task).token_ids == expected
        await asyncio.wait_for(draining, 20)


async def test_what_was_asked_before_the_drain_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it that its prompt is still being tokenized then."""
    async with cluster() as service:
        may_go_on, tokenize = asyncio.Event(), service.app._service._tokenize
        is_asked = asyncio.Event()

        async def tokenize_later(*args: Any) -> list[int]:
            is_asked.set()
            await may_go_on.wait()
            return await tokenize(*args)

        monkeypatch.setattr(service.app._service, "_tokenize", tokenize_later)
        reading = Reading(service, ask(mode=Mode.OFF, max_tokens=SHORT))
        await is_asked.wait()
        draining = asyncio.create_task(service.app.drain())
        await wait_until(lambda: not is_listening(service.address))
        may_go_on.set()
        assert len((await reading.task).token_ids) == SHORT
        await asyncio.wait_for(draining, 20)
        assert service.coordinator.num_running == 0


async def test_what_comes_after_the_last_word_is_refused() -> None:
    async with cluster() as service:
        service.coordinator.end_all(WorkerUnavailableError("the service is stopping"))
        with pytest.raises(WorkerUnavailableError, match="the service is stopping"):
            await service.client.answer(ask(), timeout_s=20)
