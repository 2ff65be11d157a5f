"""Workers that end in order: they get nothing more, and what they do not finish goes on elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from coordinator_cluster import Cluster, Reading, Worker, ask, cluster, draft_model, plain, target_model
from waiting import wait_until

from coordinator.events import Kind
from coordinator.pools import AVOID_MS, Connection
from specpipe.types import Mode
from specpipe.worker_service import WorkerService


def pair_of_each() -> tuple[list[Worker], list[Worker]]:
    return [Worker("target", target_model()) for _ in range(2)], [Worker("draft", draft_model()) for _ in range(2)]


def connection_to(service: Cluster, worker: Worker) -> Connection | None:
    pool = service.coordinator.pools[Kind(worker.kind)]
    return next((connection for connection in pool if connection.address == worker.address), None)


def num_sessions(service: Cluster, worker: Worker) -> int:
    """As the coordinator counts them."""
    connection = connection_to(service, worker)
    return 0 if connection is None else len(connection.sessions)


@pytest.mark.parametrize("kind", list(Kind))
async def test_a_worker_that_says_it_drains_gets_nothing_more_however_long_it_stays(kind: Kind) -> None:
    targets, drafts = pair_of_each()
    async with cluster(targets, drafts) as service:
        expected = await plain(service)
        leaving, staying = targets if kind is Kind.TARGET else drafts
        await wait_until(lambda: leaving.num_sessions + staying.num_sessions == 0)  # of the plain answer
        for worker in targets:
            worker.gate.clear()
        first = Reading(service, ask(mode=Mode.SYNC))
        await wait_until(lambda: leaving.num_sessions + staying.num_sessions == 1)
        if staying.num_sessions:
            leaving, staying = staying, leaving
        draining = asyncio.create_task(leaving.service.drain(leaving.server))
        connection = connection_to(service, leaving)
        assert connection is not None
        await wait_until(lambda: connection.is_draining)
        assert connection.avoided_until_ms == 0, "it had to refuse nothing"
        more = [Reading(service, ask(mode=Mode.SYNC)) for _ in range(4)]
        left = (1, 4) if kind is Kind.TARGET else (0, 5)  # drafting goes elsewhere at once
        await wait_until(lambda: (num_sessions(service, leaving), num_sessions(service, staying)) == left)
        for worker in targets:
            worker.gate.set()
        for reading in (first, *more):
            assert (await asyncio.wait_for(reading.task, 30)).token_ids == expected
        await draining
        assert connection_to(service, leaving) is connection, "it has ended its session, and is still there"


@pytest.mark.parametrize("kind", list(Kind))
async def test_a_refusal_is_enough_where_the_worker_does_not_say_that_it_drains(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerService, "heartbeat", lambda service: service._thread.heartbeat())
    targets, drafts = pair_of_each()
    async with cluster(targets, drafts) as service:
        expected = await plain(service)
        connection = min(service.coordinator.pools[kind], key=lambda connection: connection.number)  # is asked first
        (leaving,) = [worker for worker in targets + drafts if worker.address == connection.address]
        leaving.service._is_draining = True
        for _ in range(4):
            assert (await service.client.answer(ask(mode=Mode.SYNC), timeout_s=30)).token_ids == expected
        assert not connection.is_draining
        assert connection.avoided_until_ms > 1000 * time.monotonic() + AVOID_MS, "not only for a moment"


async def test_a_rolling_restart_of_every_worker_ends_no_answer() -> None:
    """One after the other, each with sessions that outlive its grace, under requests that never cease."""
    targets, drafts = pair_of_each()
    async with cluster(targets, drafts) as service:
        expected = await plain(service)
        stream = Stream(service, num_at_once=4)
        for worker in (*targets, *drafts):
            before = connection_to(service, worker)
            await wait_until(lambda worker=worker: num_sessions(service, worker) > 0)
            await end_in_order(worker)
            await worker.start()
            await wait_until(
                lambda worker=worker, before=before: connection_to(service, worker) not in (None, before), timeout_s=20
            )
            await stream.answers_more()
        assert {tuple(answer) for answer in await stream.end()} == {tuple(expected)}
        await wait_until(lambda: service.is_idle)


async def end_in_order(worker: Worker, grace_s: float = 0.05) -> None:
    """As on SIGTERM, with little patience."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            await worker.service.drain(worker.server)
    await worker.stop()


class Stream:
    """Requests without end, so many at once. One that fails fails the test that reads the answers."""

    def __init__(self, service: Cluster, num_at_once: int) -> None:
        self._service = service
        self._is_ending = False
        self.answers: list[list[int]] = []
        self._tasks = [asyncio.create_task(self._ask_on()) for _ in range(num_at_once)]

    async def answers_more(self) -> None:
        num_before = len(self.answers)
        await wait_until(lambda: len(self.answers) >= num_before + 4 or self._has_failed, timeout_s=30)

    async def end(self) -> list[list[int]]:
        self._is_ending = True
        await asyncio.gather(*self._tasks)
        return self.answers

    @property
    def _has_failed(self) -> bool:
        return any(task.done() for task in self._tasks)

    async def _ask_on(self) -> None:
        while not self._is_ending:
            answer = await self._service.client.answer(ask(mode=Mode.PIPELINED), timeout_s=60)
            assert answer.finished is not None
            self.answers.append(answer.token_ids)
