"""The loop that measures and decides goes on whatever it meets. specpipe.cluster.scaler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from waiting import wait_until

from specpipe.cluster import scaler
from specpipe.cluster.autoscale import AutoscaleConfig, DraftBounds, TargetBounds
from specpipe.cluster.load import Counts, Page
from specpipe.cluster.scaler import Scaler
from specpipe.launcher.plan import COORDINATOR, DRAFT_WORKER, TARGET_WORKER

EAGER = AutoscaleConfig(
    draft_workers=DraftBounds(), target_workers=TargetBounds(), every_s=0.1, up_after_s=0, down_after_s=0, settle_s=0
)
IDLE = Page(counts=Counts())


@dataclass(slots=True, kw_only=True)
class MemoryCluster:
    """See `Scaled`; and what its processes say of themselves."""

    counts: dict[str, int] = field(default_factory=lambda: {TARGET_WORKER: 2, DRAFT_WORKER: 2})
    said: dict[str, Page | str] = field(default_factory=lambda: {"c:1": IDLE, "d:1": IDLE, "d:2": IDLE})
    errors: list[Exception] = field(default_factory=list)  # what the next looks raise
    num_looks: int = 0

    def count(self, role: str) -> int:
        return self.counts[role]

    def metrics(self) -> Mapping[str, Sequence[str]]:
        self.num_looks += 1
        if self.errors:
            raise self.errors.pop(0)
        return {TARGET_WORKER: ["t:1", "t:2"], DRAFT_WORKER: ["d:1", "d:2"], COORDINATOR: ["c:1"]}

    def scale(self, role: str, count: int) -> None:
        self.counts[role] = count

    async def fetch_pages(self, addresses: Sequence[str]) -> dict[str, Page | str]:
        return {address: self.said[address] for address in addresses}

    async def looked_at(self, times: int) -> None:
        """Returns when so many more looks are over."""
        wanted = self.num_looks + times + 1
        await wait_until(lambda: self.num_looks >= wanted)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    cluster = MemoryCluster()
    monkeypatch.setattr(scaler, "fetch_pages", cluster.fetch_pages)
    return cluster


@asynccontextmanager
async def scaled(cluster: MemoryCluster, config: AutoscaleConfig = EAGER) -> AsyncIterator[None]:
    running = asyncio.create_task(Scaler(config, cluster).run())
    try:
        yield
        assert not running.done(), "it goes on"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_an_idle_service_shrinks(cluster: MemoryCluster) -> None:
    async with scaled(cluster):
        await wait_until(lambda: cluster.counts == {TARGET_WORKER: 1, DRAFT_WORKER: 1})


async def test_nobody_leaves_while_a_coordinator_is_not_heard_of(
    cluster: MemoryCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.said["c:1"] = "Connection refused"
    async with scaled(cluster):
        await cluster.looked_at(4)
        assert cluster.counts == {TARGET_WORKER: 2, DRAFT_WORKER: 2}
        assert caplog.text.count("the metrics at c:1 cannot be read") == 1, "an outage is said once"
        assert "Connection refused" in caplog.text
        cluster.said["c:1"] = IDLE
        await wait_until(lambda: cluster.counts == {TARGET_WORKER: 1, DRAFT_WORKER: 1})
        assert caplog.text.count("the metrics at c:1 can be read again") == 1


async def test_no_draft_worker_leaves_while_one_of_them_is_not_heard_of(cluster: MemoryCluster) -> None:
    cluster.said["d:2"] = "timed out"
    async with scaled(cluster):
        await wait_until(lambda: cluster.counts[TARGET_WORKER] == 1)
        await cluster.looked_at(3)
        assert cluster.counts[DRAFT_WORKER] == 2


async def test_draft_workers_whose_number_stays_are_not_asked(
    cluster: MemoryCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.said["d:2"] = "timed out"
    config = AutoscaleConfig(target_workers=TargetBounds(), every_s=0.1, down_after_s=0, settle_s=0)
    async with scaled(cluster, config):
        await wait_until(lambda: cluster.counts[TARGET_WORKER] == 1)
    assert "cannot be read" not in caplog.text


async def test_an_error_that_nobody_expects_ends_one_look_and_is_said_once(
    cluster: MemoryCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.errors = [*(RuntimeError(f"no idea {number}") for number in range(4)), KeyError("another")]
    async with scaled(cluster):
        await wait_until(lambda: cluster.counts == {TARGET_WORKER: 1, DRAFT_WORKER: 1})
    assert caplog.text.count("autoscaling: an unexpected error") == 2, "one of each kind"
    assert "no idea 0" in caplog.text
    assert "no idea 1" not in caplog.text
