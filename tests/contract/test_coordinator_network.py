"""Networks that delay, block and cut, and a relay that loses, doubles and reorders drafts: answers stay."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from coordinator_cluster import Cluster, Reading, Worker, ask, cluster, draft_model, plain, target_model
from tcp_relay import TcpRelay
from waiting import wait_until

from coordinator.events import Kind
from specpipe.client import GenerateClient
from specpipe.errors import WorkerUnavailableError
from specpipe.types import Extension, Mode


def relayed(**options: Any) -> Worker:
    return Worker("draft", draft_model(), is_relayed=True, **options)


def relay_of(service: Cluster) -> TcpRelay:
    relay = service.drafts[0].relay
    assert relay is not None
    return relay


@pytest.mark.parametrize("when", ["before the session opens", "in the middle"])
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
async def test_a_blocked_network_to_the_draft_worker_costs_bounded_time(mode: Mode, when: str) -> None:
    async with cluster(drafts=[relayed()]) as service:
        expected = await plain(service)
        relay = relay_of(service)
        if when == "before the session opens":
            relay.block()
        reading = Reading(service, ask(mode=mode))
        await reading.has(20)
        relay.block()
        assert (await asyncio.wait_for(reading.task, 30)).token_ids == expected
        await wait_until(lambda: service.drafts[0].num_sessions == 0, timeout_s=15)  # by the worker's own patience
        relay.unblock()
        await wait_until(lambda: service.coordinator.pools[Kind.DRAFT].is_ready, timeout_s=30)
        again = await service.client.answer(ask(mode=Mode.SYNC), timeout_s=60)
        assert again.token_ids == expected
        assert again.finished is not None
        assert again.finished.speculation.accepted_tokens > 0
        await wait_until(lambda: service.is_idle)


async def test_a_connection_to_the_draft_worker_that_is_cut_again_and_again_changes_no_answer() -> None:
    async with cluster(drafts=[relayed()]) as service:
        expected = await plain(service)
        readings = [Reading(service, ask(mode=mode)) for mode in (Mode.SYNC, Mode.PIPELINED, Mode.SYNC)]
        while not all(reading.task.done() for reading in readings):
            await asyncio.sleep(0.1)
            relay_of(service).cut()
        assert [reading.task.result().token_ids for reading in readings] == [expected] * 3
        await wait_until(lambda: service.is_idle)


async def test_delays_lengths_and_modes_in_any_mixture_give_the_plain_answers() -> None:
    async with cluster(drafts=[relayed()]) as service:
        requests = [
            ask(prompt=(7, 8, 9 + number), seed=number, max_tokens=6 + 7 * number, mode=list(Mode)[number % 3])
            for number in range(8)
        ]
        expected = [
            await plain(service, prompt=request.prompt, seed=request.seed, max_tokens=request.max_tokens)
            for request in requests
        ]
        relay_of(service).max_delay_s = 0.05
        readings = [Reading(service, request) for request in requests]
        assert [(await reading.task).token_ids for reading in readings] == expected
        await wait_until(lambda: service.is_idle)


async def test_lost_doubled_late_and_reordered_extensions_change_no_answer() -> None:
    async with cluster() as service:
        expected = await plain(service)
        loop = service.drafts[0].thread._step_loop
        assert loop is not None
        send = loop._send  # type: ignore[attr-defined]
        chance, held = random.Random(4), []

        def mangle(link: int, message: Any) -> None:
            """On the draft worker's thread. What is sent late may name a session that is over."""
            if not isinstance(message, Extension):
                send(link, message)
                return
            held.append(message)
            for _ in range(chance.choice([0, 1, 1, 2])):
                send(link, held[chance.randrange(max(0, len(held) - 12), len(held))])

        loop._send = mangle  # type: ignore[attr-defined]
        for _ in range(3):
            readings = [Reading(service, ask(mode=mode)) for mode in (Mode.SYNC, Mode.PIPELINED)]
            assert [(await reading.task).token_ids for reading in readings] == [expected] * 2
        await wait_until(lambda: service.is_idle)


async def test_a_client_whose_connection_is_reset_frees_both_workers() -> None:
    async with cluster() as service, TcpRelay(int(service.address.split(":")[1])) as relay:
        free = [worker.num_free_slots for worker in service.workers]
        for mode in Mode:
            async with GenerateClient(relay.address) as client:
                events = client.generate(ask(mode=mode, max_tokens=400), timeout_s=30)
                await anext(events)
                await anext(events)
                relay.cut()
                with pytest.raises(WorkerUnavailableError):
                    async for _ in events:
                        pass
                await wait_until(lambda: service.is_idle)
        assert [worker.num_free_slots for worker in service.workers] == free


async def test_a_target_behind_a_blocked_network_is_left_and_used_again() -> None:
    targets = [Worker("target", target_model(), is_relayed=True), Worker("target", target_model())]
    async with cluster(targets) as service:
        expected = await plain(service)
        readings = [Reading(service, ask(mode=Mode.PIPELINED)) for _ in range(4)]
        for reading in readings:
            await reading.has(10)
        assert targets[0].relay is not None
        targets[0].relay.block()
        for reading in readings:
            assert (await asyncio.wait_for(reading.task, 30)).token_ids == expected
        targets[0].relay.unblock()
        await wait_until(lambda: len(service.coordinator.pools[Kind.TARGET]) == 2, timeout_s=30)
        await wait_until(lambda: service.is_idle, timeout_s=15)
