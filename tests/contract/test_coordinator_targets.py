"""Target workers that die, hang, return or drain: answers go on elsewhere, or end in time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from coordinator_cluster import (
    FAST,
    Reading,
    Worker,
    ask,
    cluster,
    plain,
    target_model,
)
from waiting import wait_until

from coordinator.events import Kind
from coordinator.settings import DriverSettings
from specpipe.errors import ErrorCode, WorkerUnavailableError
from specpipe.types import Batch, Failed, Mode

DRAFT = Kind.DRAFT


async def test_a_target_worker_that_dies_hands_its_sessions_to_another() -> None:
    targets = [Worker("target", target_model()), Worker("target", target_model())]
    async with cluster(targets) as service:
        expected = await plain(service)
        readings = [Reading(service, ask(mode=Mode.PIPELINED)) for _ in range(4)]
        for reading in readings:
            await reading.has(15)
        assert all(target.num_sessions for target in targets), "load is shared"
        await targets[0].stop()
        for reading in readings:
            answer = await reading.task
            assert answer.token_ids == expected
            assert answer.finished is not None
        await targets[0].start()
        await wait_until(lambda: service.is_idle)


async def test_a_target_worker_that_returns_in_time_goes_on_where_it_was() -> None:
    async with cluster(settings=DriverSettings(tick_s=0.01)) as service:
        expected = await plain(service)
        reading = Reading(service, ask(mode=Mode.SYNC))
        await reading.has(15)
        await service.targets[0].stop()
        await wait_until(lambda: not service.app.server.is_serving)
        await service.targets[0].start()
        assert (await asyncio.wait_for(reading.task, 30)).token_ids == expected


async def test_what_an_earlier_incarnation_says_does_not_reach_the_sessions_of_the_next() -> None:
    async with cluster(settings=DriverSettings(tick_s=0.01)) as service:
        expected = await plain(service)
        reading = Reading(service, ask(mode=Mode.SYNC))
        await reading.has(15)
        (before,) = service.coordinator.pools[Kind.TARGET]
        await service.targets[0].stop()
        await wait_until(lambda: not list(service.coordinator.pools[Kind.TARGET]))
        await service.targets[0].start()
        service.targets[0].gated.delay_s = 0.02
        num_tokens = len(reading.answer.token_ids)
        await reading.has(num_tokens + 5)
        (after,) = service.coordinator.pools[Kind.TARGET]
        assert before.link.hello.incarnation != after.link.hello.incarnation
        (session,) = after.sessions
        assert session not in before.sessions
        lie = Failed(session=session, code=ErrorCode.INTERNAL, message="from the one that died")
        service.coordinator.hear(before, Batch(sequence=99, failures=(lie,)))
        assert (await asyncio.wait_for(reading.task, 60)).token_ids == expected


async def test_a_target_worker_that_hangs_is_left() -> None:
    targets = [Worker("target", target_model()), Worker("target", target_model())]
    async with cluster(targets) as service:
        expected = await plain(service)
        readings = [Reading(service, ask(mode=Mode.OFF)) for _ in range(2)]
        for reading in readings:
            await reading.has(10)
        targets[0].freeze()
        for reading in readings:
            assert (await asyncio.wait_for(reading.task, 30)).token_ids == expected


async def test_a_step_longer_than_silence_may_be_is_no_silence() -> None:
    """Heartbeats come from the event loop, so a target worker at a long step is not taken for lost."""
    async with cluster() as service:
        expected = await plain(service)
        before = [connection.number for connection in service.coordinator.pools[Kind.TARGET]]
        reading = Reading(service, ask(mode=Mode.OFF))
        await reading.has(10)
        service.targets[0].gate.clear()
        (connection,) = service.coordinator.pools[Kind.TARGET]
        limit_ms = 1000 * FAST.max_target_silence_s
        await wait_until(lambda: connection.link.heartbeat.step_running_ms > 1.5 * limit_ms)
        assert not connection.is_suspect
        service.targets[0].gate.set()
        assert (await reading.task).token_ids == expected
        assert [connection.number for connection in service.coordinator.pools[Kind.TARGET]] == before


async def test_a_target_that_hangs_with_nowhere_to_go_ends_its_answers_in_time() -> None:
    async with cluster() as service:
        reading = Reading(service, ask(mode=Mode.OFF))
        await reading.has(10)
        service.targets[0].freeze()
        frozen_at = time.monotonic()
        with pytest.raises(WorkerUnavailableError, match="no target worker took the request"):
            await asyncio.wait_for(reading.task, 30)
        assert time.monotonic() - frozen_at < FAST.max_target_wait_s + 1.5, "silence counts as waiting"
        assert reading.answer.finished is None


async def test_what_waits_in_the_queue_ends_as_soon_when_a_target_hangs_with_nowhere_to_go() -> None:
    """Not in waves, each as large as the number of requests that are answered at once."""
    async with cluster(max_sessions=1) as service:
        service.targets[0].gate.clear()
        readings = [Reading(service, ask(mode=Mode.OFF)) for _ in range(4)]
        await wait_until(lambda: (service.coordinator.num_running, service.coordinator.num_waiting) == (1, 3))
        service.targets[0].freeze()
        frozen_at = time.monotonic()
        for reading in readings:
            with pytest.raises(WorkerUnavailableError, match="no target worker took the request"):
                await asyncio.wait_for(reading.task, 30)
        assert time.monotonic() - frozen_at < FAST.max_target_wait_s + 1.5


async def test_a_worker_that_hangs_in_a_step_gets_no_sessions_when_it_is_dialled_again() -> None:
    impatient = replace(FAST, max_target_step_s=0.5)
    targets = [Worker("target", target_model()), Worker("target", target_model())]
    async with cluster(targets, [], settings=impatient) as service:
        expected = await plain(service)
        readings = [Reading(service, ask(mode=Mode.OFF)) for _ in range(2)]
        for reading in readings:
            await reading.has(5)
        targets[0].gate.clear()
        for reading in readings:
            assert (await asyncio.wait_for(reading.task, 30)).token_ids == expected
        for _ in range(6):  # the hanging one is dialled again and again, and has the fewest sessions
            assert (await service.client.answer(ask(mode=Mode.OFF), timeout_s=30)).token_ids == expected
        assert len(service.coordinator.pools[Kind.TARGET]) == 1


async def test_without_any_target_requests_end_as_unavailable_in_time() -> None:
    async with cluster() as service:
        reading = Reading(service, ask(mode=Mode.OFF))
        await reading.has(5)
        service.targets[0].gate.clear()
        await service.targets[0].stop()
        with pytest.raises(WorkerUnavailableError, match="no target worker took the request"):
            await asyncio.wait_for(reading.task, 15)
        assert reading.answer.finished is None
        assert not service.app.server.is_serving
        with pytest.raises(WorkerUnavailableError):
            await asyncio.wait_for(service.client.answer(ask()), 15)
        await service.targets[0].start()
        await wait_until(lambda: service.app.server.is_serving, timeout_s=20)
        assert (await service.client.answer(ask(max_tokens=3), timeout_s=30)).token_ids


async def test_before_a_target_is_there_requests_are_refused_at_once() -> None:
    async with cluster([], [], must_be_ready=False) as service:
        assert not service.app.server.is_serving
        with pytest.raises(WorkerUnavailableError, match="starting"):
            await service.client.answer(ask(), timeout_s=10)


async def test_a_worker_that_drains_gets_no_new_sessions_and_ends_its_own() -> None:
    targets = [Worker("target", target_model()), Worker("target", target_model())]
    async with cluster(targets) as service:
        expected = await plain(service)
        readings = [Reading(service, ask(mode=Mode.SYNC)) for _ in range(2)]
        for reading in readings:
            await reading.has(5)
        targets[0].service._is_draining = True
        more = [Reading(service, ask(mode=Mode.SYNC)) for _ in range(4)]
        for reading in [*readings, *more]:
            assert (await asyncio.wait_for(reading.task, 30)).token_ids == expected
