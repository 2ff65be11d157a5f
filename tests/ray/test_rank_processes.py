"""The ranks of a target worker on several nodes begin together and end together. specpipe.cluster.rank_processes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from waiting import wait_until

from specpipe.cluster import rank_processes
from specpipe.cluster.backend import GroupLostError
from specpipe.cluster.keeper import Ended, Started
from specpipe.cluster.rank_keeper import RankKeeper
from specpipe.cluster.rank_processes import RankProcesses
from specpipe.config import RANK_TOKEN_VARIABLE
from specpipe.errors import ConfigError, WorkerUnavailableError
from specpipe.launcher.plan import TARGET_WORKER, ProcessSpec

PROCESS = ProcessSpec(role=TARGET_WORKER, arguments=("--tensor-parallel-size", "3"))


@dataclass(slots=True, kw_only=True)
class MemoryKeeper:
    """See `NodeKeeper`. Its process serves once all of its group have begun."""

    rank: int
    log: list[str]
    spec: ProcessSpec | None = None  # of the process that runs
    refusal: Exception | None = None  # what its next start raises
    ending: asyncio.Future[Ended] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_stuck: bool = False  # its process does not serve

    async def start(self, spec: ProcessSpec, port: int | None = None) -> Started:
        if self.spec is not None:
            return Started(address="kept", pid=self.rank)
        self.log.append(f"start {self.rank}")
        self.ending = asyncio.get_running_loop().create_future()
        if self.refusal is not None:
            raise self.refusal
        self.spec = spec
        if self.is_stuck:
            await asyncio.shield(self.ending)
            raise WorkerUnavailableError("it was told to end before it served")
        return Started(address=f"node-{self.rank}:{port or 1}", pid=100 + self.rank)

    async def wait(self) -> Ended:
        return await asyncio.shield(self.ending)

    async def stop(self, grace_s: float) -> None:
        self.log.append(f"stop {self.rank} {grace_s:g}")
        self.end("it was told to end")

    async def is_running(self) -> bool:
        return self.spec is not None

    async def free_address(self) -> str:
        return f"node-{self.rank}:6003"

    def end(self, reason: str, *, is_in_order: bool = False) -> None:
        self.spec = None
        if not self.ending.done():
            lines = (f"last words of {self.rank}",)
            self.ending.set_result(Ended(reason=reason, lines=lines, is_in_order=is_in_order))


class Group:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.keepers = [MemoryKeeper(rank=rank, log=self.log) for rank in range(3)]
        self.ranks = RankProcesses(self.keepers, PROCESS)


@pytest.fixture
async def group() -> Group:
    return Group()


async def test_all_ranks_begin_with_one_rendezvous_and_one_secret_of_their_own(group: Group) -> None:
    started = await group.ranks.start(7)
    assert (started.address, started.companions) == ("node-0:7", (101, 102))
    specs = [keeper.spec for keeper in group.keepers]
    ends = [spec.arguments[-4:] for spec in specs if spec]
    assert ends == [("--rank", str(rank), "--rendezvous", "node-0:6003") for rank in range(3)]
    (secrets,) = {spec.environment for spec in specs if spec}
    assert secrets[0][0] == RANK_TOKEN_VARIABLE
    again = Group()
    await again.ranks.start()
    assert again.keepers[0].spec is not None
    assert again.keepers[0].spec.environment != secrets


async def test_ranks_that_run_are_found_as_they_are(group: Group) -> None:
    await group.ranks.start()
    group.log.clear()
    assert (await RankProcesses(group.keepers, PROCESS).start()).address == "kept"
    assert group.log == []


async def test_ranks_of_a_group_that_is_not_whole_begin_anew(group: Group) -> None:
    await group.ranks.start()
    group.keepers[1].end("it was lost while nobody looked")
    group.log.clear()
    await group.ranks.start()
    assert sorted(group.log) == ["start 0", "start 1", "start 2", "stop 0 0", "stop 1 0", "stop 2 0"]


async def test_a_rank_that_cannot_begin_ends_all_and_its_reason_is_told(group: Group) -> None:
    group.keepers[0].is_stuck = True  # it waits for the others
    group.keepers[2].refusal = ConfigError("/models/target: no such model folder")
    with pytest.raises(ConfigError, match="no such model folder"):
        await group.ranks.start()
    assert not any([await keeper.is_running() for keeper in group.keepers])


async def test_a_rank_that_ends_ends_all_and_rank_0_says_why(group: Group) -> None:
    await group.ranks.start()
    waiting = asyncio.create_task(group.ranks.wait())
    group.keepers[1].end("it was ended by SIGKILL")
    group.keepers[0].end("rank 1 (10.0.0.2) ended")
    ended = await waiting
    assert ended.reason == "rank 1 (10.0.0.2) ended; rank 1: it was ended by SIGKILL"
    assert ended.lines == ("last words of 0",)
    assert not ended.is_in_order
    assert "stop 2 0" in group.log


@pytest.mark.parametrize("rank", [0, 2])
async def test_a_rank_that_was_told_to_end_makes_it_an_end_in_order(rank: int, group: Group) -> None:
    """Its node leaves, whichever of the group's nodes that is."""
    await group.ranks.start()
    waiting = asyncio.create_task(group.ranks.wait())
    group.keepers[rank].end("it ended with code 0", is_in_order=True)
    group.keepers[0].end("rank 2 (10.0.0.3) ended")
    assert (await waiting).is_in_order


async def test_a_rank_0_that_says_nothing_is_waited_for_so_long(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "LOSS_PATIENCE_S", 0.05)
    await group.ranks.start()
    waiting = asyncio.create_task(group.ranks.wait())
    group.keepers[2].end("rank 2 ends: rank 0 has been silent for too long")
    assert (await waiting).reason == "rank 2: rank 2 ends: rank 0 has been silent for too long"
    assert not await group.keepers[0].is_running()


async def test_a_node_that_is_lost_is_the_loss_of_the_group(group: Group) -> None:
    await group.ranks.start()
    group.keepers[1].ending.set_exception(GroupLostError("its node is gone"))
    group.keepers[0].end("rank 1 (10.0.0.2) has been silent for 5 s")
    with pytest.raises(GroupLostError, match="its node is gone"):
        await group.ranks.wait()


async def test_rank_0_ends_in_order_and_then_the_others(group: Group) -> None:
    await group.ranks.start()
    group.log.clear()
    await group.ranks.stop(9)
    assert group.log == ["stop 0 9", "stop 1 0", "stop 2 0"]


async def test_a_real_rank_that_waits_for_rank_0_is_ended_when_it_is_told() -> None:
    keeper = RankKeeper("127.0.0.1")
    address = keeper.free_address()  # nobody will listen there
    flags = ("--tensor-parallel-size", "2", "--rank", "1", "--rendezvous", address)  # of the demo pair's target
    spec = ProcessSpec(
        role=TARGET_WORKER, arguments=flags, environment=((RANK_TOKEN_VARIABLE, "a secret of this group"),)
    )
    starting = asyncio.create_task(keeper.start(spec))
    await wait_until(lambda: keeper._starting.locked(), timeout_s=60)
    await keeper.stop(0.0)
    with pytest.raises(WorkerUnavailableError, match="told to end before it served"):
        await starting
    assert not keeper.is_running()
