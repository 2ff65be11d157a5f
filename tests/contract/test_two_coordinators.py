"""Coordinators that share workers and know nothing of one another."""

from __future__ import annotations

import asyncio

from coordinator_cluster import Reading, Worker, ask, cluster, plain, target_model
from waiting import wait_until

from coordinator.events import Kind
from specpipe.types import Mode

ASKED = {"mode": Mode.OFF, "max_tokens": 200}


async def test_requests_beyond_the_room_of_a_worker_wait_in_the_queues_of_both() -> None:
    """Room that sessions of one take is none for the other, which finds out by heartbeats."""
    worker = Worker("target", target_model(), max_sessions=2)
    names = {"targets": (), "drafts": ()}
    async with cluster([worker], []) as one:
        names["targets"] = (worker.address,)
        async with cluster([], [], names=names) as other:
            expected = await plain(one, max_tokens=200)
            worker.gated.delay_s = 0.005
            readings = [Reading(one, ask(**ASKED)) for _ in range(4)]
            for reading in readings[:2]:
                await reading.has(1)
            worker.gate.clear()
            assert (one.coordinator.num_running, one.coordinator.num_waiting) == (2, 2)
            (connection,) = other.coordinator.pools[Kind.TARGET]
            await wait_until(lambda: not connection.has_room)
            readings += [Reading(other, ask(**ASKED)) for _ in range(3)]
            await wait_until(lambda: other.coordinator.num_running + other.coordinator.num_waiting == 3)
            assert other.coordinator.num_running == 0
            worker.gated.delay_s = 0.0
            worker.gate.set()
            for reading in readings:
                assert (await asyncio.wait_for(reading.task, 30)).token_ids == expected
            await wait_until(lambda: one.is_idle and other.is_idle)
