"""Workers and coordinators through starts, ends and changes of number, on an engine in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from memory_engine import MemoryEngine
from waiting import wait_until

from specpipe.cluster import replica, scaler
from specpipe.cluster import service as cluster_service
from specpipe.cluster.autoscale import Load
from specpipe.cluster.backend import GroupLostError
from specpipe.cluster.health import Health
from specpipe.cluster.load import Counts, Page
from specpipe.cluster.reading import fill_cluster
from specpipe.cluster.replica import ReplicaState, ReplicaStatus
from specpipe.cluster.scaler import Scaler
from specpipe.cluster.service import ClusterService
from specpipe.errors import ConfigError, WorkerUnavailableError
from specpipe.launcher.plan import COORDINATOR, DRAFT_WORKER, TARGET_WORKER

AT_ONCE = {"first_delay_s": 0.001, "max_delay_s": 0.004}


def service_on(engine: MemoryEngine, **content: Any) -> ClusterService:
    return ClusterService(fill_cluster({"restarts": AT_ONCE, **content}, "cluster.yaml"), engine)


@asynccontextmanager
async def started(engine: MemoryEngine, **content: Any) -> AsyncIterator[ClusterService]:
    service = service_on(engine, **content)
    try:
        await service.start()
        yield service
    finally:
        await service.stop(0.0)


def of(service: ClusterService, name: str) -> ReplicaStatus:
    return next(replica for replica in service.status.replicas if replica.name == name)


def address(service: ClusterService, name: str) -> str | None:
    process = of(service, name).process
    return process.address if process else None


async def test_coordinators_begin_when_all_workers_serve_and_know_them() -> None:
    engine = MemoryEngine()
    content: dict[str, Any] = {"target_workers": {"count": 2}, "draft_workers": {"count": 2}}
    async with started(engine, **content) as service:
        assert engine.log[-1] == "start coordinator-0"
        assert service.status.is_ready
        assert engine.groups["coordinator-0"].listed == {
            "target": [address(service, f"target-worker-{i}") for i in range(2)],
            "draft": [address(service, f"draft-worker-{i}") for i in range(2)],
        }
        assert service.status.coordinators == (address(service, "coordinator-0"),)


async def test_a_start_that_fails_is_told_in_the_words_of_the_process() -> None:
    engine = MemoryEngine()
    engine.refusals["target-worker-0"] = [ConfigError("/models/none: no such folder")]
    service = service_on(engine)
    with pytest.raises(ConfigError, match="/models/none: no such folder"):
        await service.start()
    await service.stop(0.0)
    assert engine.groups == {}, "nothing is left"


async def test_a_worker_that_ends_starts_again_where_it_is_and_coordinators_hear_of_both() -> None:
    engine = MemoryEngine()
    async with started(engine, target_workers={"count": 2}) as service:
        first = address(service, "target-worker-0")
        coordinator = engine.groups["coordinator-0"]
        engine.may_start.clear()
        engine.groups["target-worker-0"].end("it was ended by SIGKILL")
        await wait_until(lambda: coordinator.listed["target"] == [address(service, "target-worker-1")])
        assert not service.status.is_ready
        engine.may_start.set()
        await wait_until(lambda: service.status.is_ready)
        assert address(service, "target-worker-0") != first
        await wait_until(lambda: len(coordinator.listed["target"]) == 2)
        status = of(service, "target-worker-0")
        assert (status.num_restarts, status.ends[0].reason) == (1, "it was ended by SIGKILL")
        assert status.ends[0].lines == ("its last words",)
        assert engine.num_released == 0


@pytest.mark.parametrize("health", [Health.NOT_SERVING, Health.SILENT])
async def test_a_process_that_runs_and_does_not_serve_is_not_called_ready(health: Health) -> None:
    engine = MemoryEngine()
    async with started(engine) as service:
        engine.groups["target-worker-0"].become(health)
        await wait_until(lambda: not service.status.is_ready)
        assert of(service, "target-worker-0").health is health
        engine.groups["target-worker-0"].become(Health.SERVING)
        await wait_until(lambda: service.status.is_ready)


async def test_what_hung_and_was_ended_is_well_when_it_is_back() -> None:
    engine = MemoryEngine()
    async with started(engine) as service:
        engine.groups["draft-worker-0"].become(Health.SILENT)
        await wait_until(lambda: not service.status.is_ready)
        engine.groups["draft-worker-0"].end("it has not answered for 30 s")
        await wait_until(lambda: service.status.is_ready)
        assert of(service, "draft-worker-0").ends[0].reason == "it has not answered for 30 s"


async def test_a_group_that_has_lost_a_rank_is_given_back_and_placed_anew_as_one() -> None:
    engine = MemoryEngine()
    async with started(engine, target_workers={"tensor_parallel_size": 4}) as service:
        lost = engine.groups["target-worker-0"]
        lost.lose("its node is gone")
        await wait_until(lambda: service.status.is_ready and engine.groups.get("target-worker-0") is not lost)
        assert engine.num_released == 1
        assert of(service, "target-worker-0").ends[0].reason == "its node is gone"


async def test_what_was_told_to_end_is_given_back_since_its_node_leaves() -> None:
    """It would begin again on the node that is about to go. Coordinators hear of it before a place is sought."""
    engine = MemoryEngine()
    async with started(engine, target_workers={"count": 2}) as service:
        left, coordinator = engine.groups["target-worker-0"], engine.groups["coordinator-0"]
        engine.may_start.clear()
        left.end("it ended with code 0", is_in_order=True)
        await wait_until(lambda: engine.groups.get("target-worker-0") not in (None, left))
        assert coordinator.listed["target"] == [address(service, "target-worker-1")]
        engine.may_start.set()
        await wait_until(lambda: service.status.is_ready)
        assert engine.num_released == 1
        assert left.num_starts == 1


async def test_a_coordinator_keeps_its_port_over_restarts() -> None:
    engine = MemoryEngine()
    async with started(engine) as service:
        before = address(service, "coordinator-0")
        engine.groups["coordinator-0"].end("it ended with code 1")
        await wait_until(lambda: of(service, "coordinator-0").num_restarts == 1 and service.status.is_ready)
        assert address(service, "coordinator-0") == before


async def test_what_does_not_start_again_is_tried_again_and_again() -> None:
    engine = MemoryEngine()
    async with started(engine) as service:
        engine.refusals["draft-worker-0"] = [WorkerUnavailableError(f"failure {i}") for i in range(3)]
        engine.groups["draft-worker-0"].end("it was ended by SIGSEGV")
        await wait_until(lambda: of(service, "draft-worker-0").num_restarts == 4 and service.status.is_ready)
        reasons = [end.reason for end in of(service, "draft-worker-0").ends]
        assert reasons == ["it was ended by SIGSEGV", "failure 0", "failure 1", "failure 2"]


async def test_an_error_that_nobody_expects_ends_neither_the_worker_nor_the_care_for_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = MemoryEngine()
    async with started(engine) as service:
        engine.refusals["draft-worker-0"] = [RuntimeError("no idea")]
        engine.groups["draft-worker-0"].end("it was ended by SIGKILL")
        await wait_until(lambda: "no idea" in caplog.text)
        await wait_until(lambda: service.status.is_ready)


async def test_workers_come_and_go_by_number_and_the_last_ones_leave_in_order() -> None:
    engine = MemoryEngine()
    async with started(engine, grace_s=7) as service:
        coordinator = engine.groups["coordinator-0"]
        service.scale(DRAFT_WORKER, 3)
        assert service.count(DRAFT_WORKER) == 3
        await wait_until(lambda: len(coordinator.listed["draft"]) == 3)
        leaving = engine.groups["draft-worker-2"]
        service.scale(DRAFT_WORKER, 2)
        assert service.count(DRAFT_WORKER) == 2
        await wait_until(lambda: "draft-worker-2" not in engine.groups)
        assert leaving.grace_s == 7
        await wait_until(lambda: len(coordinator.listed["draft"]) == 2)
        service.scale(DRAFT_WORKER, 3)
        await wait_until(lambda: len(coordinator.listed["draft"]) == 3)


async def test_the_end_lets_coordinators_finish_first_and_gives_everything_back() -> None:
    engine = MemoryEngine()
    async with started(engine) as service:
        await service.stop(5.0)
        order = [line for line in engine.log if line.startswith("stop")]
        assert order[0] == "stop coordinator-0"
        assert set(order[1:]) == {"stop target-worker-0", "stop draft-worker-0"}
        assert engine.groups == {}


async def test_what_cannot_end_in_order_is_given_back_all_the_same() -> None:
    engine = MemoryEngine()
    async with started(engine) as service:
        engine.cannot_stop = True
        await service.stop(5.0)
        assert engine.groups == {}


async def test_a_new_controller_takes_over_what_runs_and_what_was_scaled() -> None:
    engine = MemoryEngine()
    async with started(engine) as first:
        first.scale(TARGET_WORKER, 2)
        await wait_until(lambda: first.status.is_ready and len(first.status.replicas) == 4)
        async with started(engine) as second:
            await wait_until(lambda: second.status.is_ready)
            assert [replica.name for replica in second.status.replicas] == [r.name for r in first.status.replicas]
            assert all(group.num_starts == 1 for group in engine.groups.values()), "none was disturbed"


async def test_a_new_controller_scales_while_what_was_lost_finds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def two_undrafted(addresses: list[str]) -> dict[str, Page]:
        return {address: Page(counts=Counts(), num_undrafted=2) for address in addresses}

    monkeypatch.setattr(scaler, "fetch_pages", two_undrafted)
    engine = MemoryEngine()
    scaling = {"draft_workers": {"max": 3}, "every_s": 0.1, "up_after_s": 0, "settle_s": 0}
    async with started(engine, target_workers={"count": 2}):
        await engine.release("target-worker-1")
        engine.unplaceable.add("target-worker-1")
        second = service_on(engine, target_workers={"count": 2}, autoscale=scaling)
        starting = asyncio.create_task(second.start())
        try:
            await wait_until(lambda: second.count(DRAFT_WORKER) == 3)
            assert not starting.done(), "it waits for the worker that was lost"
            second.scale(TARGET_WORKER, 1)
            await asyncio.wait_for(starting, 10.0)
        finally:
            starting.cancel()
            await second.stop(0.0)


async def test_a_start_hears_that_what_it_waits_for_was_told_to_end() -> None:
    engine = MemoryEngine()
    engine.may_start.clear()
    service = service_on(engine)
    starting = asyncio.create_task(service.start())
    await wait_until(lambda: "target-worker-0" in engine.groups)
    await service.stop(0.0)
    with pytest.raises(WorkerUnavailableError, match="was told to end before it served"):
        await starting


async def test_a_worker_that_cannot_be_given_back_leaves_when_it_can(caplog: pytest.LogCaptureFixture) -> None:
    engine = MemoryEngine()
    async with started(engine, draft_workers={"count": 2}) as service:
        engine.release_refusals["draft-worker-1"] = [GroupLostError("Ray does not answer"), RuntimeError("no idea")]
        service.scale(DRAFT_WORKER, 1)
        await wait_until(lambda: len(service.status.replicas) == 3)
        assert "draft-worker-1" not in engine.groups
        assert caplog.text.count("draft-worker-1: it cannot leave") == 2


async def test_an_end_that_fails_for_one_ends_the_others_all_the_same() -> None:
    engine = MemoryEngine()
    service = service_on(engine)
    await service.start()
    engine.release_refusals["coordinator-0"] = [GroupLostError("Ray does not answer")]
    with pytest.raises(GroupLostError, match="Ray does not answer"):
        await service.stop(0.0)
    assert list(engine.groups) == ["coordinator-0"]
    assert {"stop target-worker-0", "stop draft-worker-0"} <= set(engine.log)


async def hang(*_: object) -> None:
    """In place of what a group is asked: its actor does not answer."""
    await asyncio.Event().wait()


async def test_an_actor_that_does_not_answer_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster_service, "TELL_TIMEOUT_S", 0.01)
    monkeypatch.setattr(replica, "LINES_TIMEOUT_S", 0.01)
    engine = MemoryEngine()
    async with started(engine) as service:
        monkeypatch.setattr(engine.groups["coordinator-0"], "list_workers", hang)
        monkeypatch.setattr(engine.groups["draft-worker-0"], "lines", hang)
        service.scale(TARGET_WORKER, 2)
        await wait_until(lambda: "coordinator-0 is not told of a change: its actor has not answered" in caplog.text)
        lines = await service.lines()
        assert lines["target-worker-0"] == ("it works",)
        assert lines["draft-worker-0"][0].startswith("its actor has not answered")


async def test_health_that_cannot_be_followed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    engine = MemoryEngine()
    async with started(engine) as service:
        engine.groups["draft-worker-0"].break_health(RuntimeError("no idea"))
        await wait_until(lambda: "draft-worker-0: its health cannot be followed any more" in caplog.text)
        assert service.status.is_ready


async def test_an_end_while_a_start_hangs_leaves_nothing() -> None:
    engine = MemoryEngine()
    engine.may_start.clear()
    service = service_on(engine)
    starting = asyncio.create_task(service.start())
    await wait_until(lambda: "target-worker-0" in engine.groups)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await service.stop(0.0)
    assert engine.groups == {}
    assert service.status.replicas == ()


async def test_the_log_is_what_runs_or_what_was_said_last() -> None:
    engine = MemoryEngine()
    async with started(engine) as service:
        engine.may_start.clear()
        engine.groups["draft-worker-0"].end("it was ended by SIGKILL")
        await wait_until(lambda: of(service, "draft-worker-0").state is not ReplicaState.READY)
        lines = await service.lines()
        assert lines["target-worker-0"] == ("it works",)
        assert lines["draft-worker-0"] == ("its last words",)


async def test_a_load_changes_the_number_and_the_change_is_told_with_its_reason() -> None:
    engine = MemoryEngine()
    scaling = {"draft_workers": {"max": 3}, "up_after_s": 0, "settle_s": 0}
    async with started(engine, autoscale=scaling) as service:
        own_scaler = Scaler(service.config.autoscale, service)
        own_scaler.look(Load(num_undrafted=2), now_s=100.0)
        assert service.count(DRAFT_WORKER) == 2
        assert service.count(TARGET_WORKER) == 1, "their number is not to be changed"
        (change,) = own_scaler.changes
        assert (change.before, change.after, change.reason) == (1, 2, "2 requests have no draft worker")
        await wait_until(lambda: len(engine.groups["coordinator-0"].listed["draft"]) == 2)


async def test_every_process_is_asked_for_its_metrics() -> None:
    engine = MemoryEngine()
    async with started(engine) as service:
        expected = {role: [f"{role}-0:9"] for role in (TARGET_WORKER, DRAFT_WORKER, COORDINATOR)}
        assert service.metrics() == expected
        engine.may_start.clear()
        engine.groups["draft-worker-0"].end("it was ended by SIGKILL")
        await wait_until(lambda: service.metrics() == {**expected, DRAFT_WORKER: []})


async def test_two_that_end_it_at_once_end_it_once() -> None:
    engine = MemoryEngine()
    async with started(engine) as service:
        await asyncio.gather(service.stop(3.0), service.stop(0.0))
        assert [line for line in engine.log if line.startswith("stop")].count("stop coordinator-0") == 1
        assert engine.groups == {}
