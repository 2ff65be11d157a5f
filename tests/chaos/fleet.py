"""A whole service of real processes whose every part and every link may fail: two coordinators over a pool of each kind
of worker, one target worker of which is a group of two ranks.

Owns: which processes there are, who reaches whom by which link, what the workers say that they hold, the end of it all.
Must not know: faults, requests. How links are made and what they can suffer is its network's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
from faults import Kind, Victims, Way
from members import Member
from reach import Reach, Span
from relays import Relay, StreamRelay, WireRelay
from running import READY_TIMEOUT_S
from scraping import Scrape, scrape
from tiny_models import TinyPair
from waiting import wait_until

from specpipe.rpc.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

NUM_SLOTS = 8192
MAX_BATCH_TOKENS = 128  # few, so that a long prompt takes several steps
GRACE_S = 2.0
RANK = "target-group rank 1"  # the one process that is no member: its rank 0 starts it

STUBS = {
    "draft-worker": (draft_pb2_grpc.DraftServiceStub, draft_pb2.DraftServiceGetInfoRequest),
    "target-worker": (target_pb2_grpc.TargetServiceStub, target_pb2.TargetServiceGetInfoRequest),
}
ENGINE = ("--dtype", "float32", "--num-slots", str(NUM_SLOTS), "--max-batch-tokens", str(MAX_BATCH_TOKENS))
COMMON = ("--grace", str(GRACE_S), "--log-level", "info")


class Network(Protocol):
    """Links by name: "WHO>WHOM". Entered before the fleet starts."""

    link_kinds: tuple[Kind, ...]

    def prefix(self, name: str) -> Sequence[str]:
        """Of the command line of the process with this name."""
        ...

    def host(self, name: str) -> Sequence[str]:
        """Flags: where it listens."""
        ...

    async def join(self, who: str, whom: str, address: str, *, is_worker: bool) -> str:
        """The address by which `who` reaches `whom`, who listens at `address`."""
        ...

    async def begin(self, kind: Kind, link: str, ways: Iterable[Way]) -> None:
        """The link suffers, until `end`. Raises KeyError for a link that was not joined."""
        ...

    async def end(self, link: str) -> None:
        """It is well again."""
        ...

    def shuffled(self) -> tuple[str, ...]:
        """Links that can suffer Kind.SHUFFLE."""
        ...


class RelayNetwork:
    """On loopback: a relay on every link. The second coordinator's worker links are relayed message by message."""

    link_kinds = (Kind.CUT, Kind.HOLD, Kind.SLOW)
    max_delay_s = 0.05

    def __init__(self, stack: AsyncExitStack, seed: int) -> None:
        self.relays: dict[str, Relay] = {}
        self._stack = stack
        self._seed = seed

    def prefix(self, name: str) -> Sequence[str]:
        return ()

    def host(self, name: str) -> Sequence[str]:
        return ()

    async def join(self, who: str, whom: str, address: str, *, is_worker: bool) -> str:
        make = StreamRelay if is_worker and who == "coordinator-2" else WireRelay
        relay = await self._stack.enter_async_context(make(address, seed=self._seed + len(self.relays)))
        self.relays[f"{who}>{whom}"] = relay
        return relay.address

    async def begin(self, kind: Kind, link: str, ways: Iterable[Way]) -> None:
        relay = self.relays[link]
        if kind is Kind.CUT:
            relay.cut()
        elif kind is Kind.HOLD:
            relay.hold(ways)
        elif kind is Kind.SLOW:
            relay.delay_s = self.max_delay_s
        elif isinstance(relay, StreamRelay):
            relay.is_shuffling = True

    async def end(self, link: str) -> None:
        relay = self.relays[link]
        relay.delay_s = 0.0
        relay.release()
        if isinstance(relay, StreamRelay):
            relay.is_shuffling = False

    def shuffled(self) -> tuple[str, ...]:
        return tuple(name for name, relay in self.relays.items() if isinstance(relay, StreamRelay))

    @property
    def num_mangled(self) -> int:
        return sum(relay.num_mangled for relay in self.relays.values() if isinstance(relay, StreamRelay))


class Fleet:
    """Made by `running_fleet`."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.members: dict[str, Member] = {}
        self.client_addresses: list[str] = []  # of the coordinators, by links of their own
        self.links: list[str] = []
        self.at_start: dict[str, tuple[int, int]] = {}  # `holdings` before the first request

    def of(self, role: str) -> list[Member]:
        return [member for member in self.members.values() if member.role == role]

    @property
    def workers(self) -> list[Member]:
        return [*self.of("target-worker"), *self.of("draft-worker")]

    def victims(self) -> Victims:
        roles = ("coordinator", "draft-worker", "target-worker")
        processes = [tuple(member.name for member in self.of(role)) for role in roles]
        ends = ("coordinator", "draft", "target")
        links = [tuple(link for link in self.links if link.partition(">")[2].startswith(end)) for end in ends]
        return Victims(
            processes=(*processes, (RANK,)),
            links=tuple(links),
            link_kinds=self.network.link_kinds,
            shuffled=self.network.shuffled(),
        )

    def reaches(self, suffered: Mapping[str, Sequence[Span]]) -> list[Reach]:
        """By the coordinators' places: `suffered` tells when links were cut or held, and when members were anyway."""
        return [
            Reach(
                own=self._out_of_reach("client", coordinator, suffered),
                targets=tuple(
                    self._out_of_reach(coordinator.name, target, suffered) for target in self.of("target-worker")
                ),
            )
            for coordinator in self.of("coordinator")
        ]

    def _out_of_reach(self, who: str, member: Member, suffered: Mapping[str, Sequence[Span]]) -> tuple[Span, ...]:
        names = (member.name, f"{who}>{member.name}")
        return (*member.outages, *(span for name in names for span in suffered.get(name, ())))

    # What its parts say

    async def info(self, worker: Member) -> Any:
        """GetInfo, asked without any link between. Raises AioRpcError if it does not answer."""
        stub, request = STUBS[worker.role]
        async with grpc.aio.insecure_channel(worker.address) as channel:
            return await stub(channel).GetInfo(request(), timeout=10)

    async def holdings(self) -> dict[str, tuple[int, int]]:
        """(sessions, free slots) of each worker. Raises AioRpcError if one does not answer."""
        infos = await asyncio.gather(*(self.info(worker) for worker in self.workers))
        return {
            worker.name: (info.heartbeat.num_sessions, info.heartbeat.num_free_slots)
            for worker, info in zip(self.workers, infos, strict=True)
        }

    async def scrapes(self) -> list[Scrape]:
        """Of the coordinators."""
        return [await asyncio.to_thread(scrape, member.metrics) for member in self.of("coordinator")]

    async def is_whole(self) -> bool:
        """Every process serves, and every coordinator is connected with every worker."""
        if not all(member.is_usable for member in self.members.values()):
            return False
        try:
            scrapes = await self.scrapes()
        except OSError:
            return False
        connected = [page.sum("specpipe_worker_state", state="connected") for page in scrapes]
        return connected == [len(self.workers)] * len(scrapes)

    async def become_whole(self) -> None:
        """Nobody does anything for it. Raises AssertionError if it does not."""
        try:
            await wait_until(self.is_whole, timeout_s=4 * READY_TIMEOUT_S)
        except TimeoutError:
            raise AssertionError(f"not whole again without a hand\n{self.last_lines()}") from None

    async def is_idle(self) -> bool:
        """No part holds anything of any request, by its own word."""
        try:
            holdings, scrapes = await self.holdings(), await self.scrapes()
        except (grpc.aio.AioRpcError, OSError):
            return False
        counts = ("specpipe_requests_running", "specpipe_requests_queued", "specpipe_worker_sessions")
        return holdings == self.at_start and not any(page.sum(name) for page in scrapes for name in counts)

    def last_lines(self) -> str:
        return "\n".join(member.last_lines() for member in self.members.values())


@asynccontextmanager
async def running_fleet(
    network: Network, pair: TinyPair, folder: Path, *, num_targets: int = 1, num_drafts: int = 2
) -> AsyncIterator[Fleet]:
    """A fleet that is whole: `num_targets` target workers of one rank, and the group. Nothing runs after the block."""
    fleet = Fleet(network)
    parent_fd, life_fd = os.pipe()  # members hold the first; the second closes when we are gone, whatever ends us
    try:
        async with AsyncExitStack() as stack:
            await _start_workers(fleet, stack, pair, folder, parent_fd, num_targets, num_drafts)
            await _start_coordinators(fleet, stack, pair, folder, parent_fd)
            await fleet.become_whole()
            fleet.at_start = await fleet.holdings()
            yield fleet
    finally:
        os.close(parent_fd)
        os.close(life_fd)


async def _start_workers(
    fleet: Fleet, stack: AsyncExitStack, pair: TinyPair, folder: Path, parent_fd: int, num_targets: int, num_drafts: int
) -> None:
    target, draft = ("--target", str(pair.target), *ENGINE), ("--draft", str(pair.draft), *ENGINE)
    plan = {f"target-{number}": ("target-worker", target) for number in range(1, num_targets + 1)}
    plan["target-group"] = ("target-worker", (*target, "--tensor-parallel-size", "2"))
    plan |= {f"draft-{number}": ("draft-worker", draft) for number in range(1, num_drafts + 1)}
    for name, (role, arguments) in plan.items():
        _add(fleet, folder, name, role, arguments)
    stack.push_async_callback(_end_all, workers := list(fleet.members.values()))
    await asyncio.gather(*(worker.start(parent_fd) for worker in workers))


async def _start_coordinators(
    fleet: Fleet, stack: AsyncExitStack, pair: TinyPair, folder: Path, parent_fd: int
) -> None:
    workers, started = fleet.workers, []
    for name in ("coordinator-1", "coordinator-2"):
        flags = ["--tokenizer", str(pair.target), "--metrics-port", "0"]
        for worker in workers:
            address = await fleet.network.join(name, worker.name, worker.address, is_worker=True)
            fleet.links.append(f"{name}>{worker.name}")
            flags += ["--target" if worker.role == "target-worker" else "--draft", address]
        started.append(_add(fleet, folder, name, "coordinator", flags))
    stack.push_async_callback(_end_all, started)
    await asyncio.gather(*(member.start(parent_fd) for member in started))
    for member in started:
        address = await fleet.network.join("client", member.name, member.address, is_worker=False)
        fleet.links.append(f"client>{member.name}")
        fleet.client_addresses.append(address)


def _add(fleet: Fleet, folder: Path, name: str, role: str, arguments: Sequence[str]) -> Member:
    flags = (*arguments, *COMMON, *fleet.network.host(name))
    member = Member(name, role, flags, folder=folder, prefix=fleet.network.prefix(name))
    fleet.members[name] = member
    return member


async def _end_all(members: Sequence[Member]) -> None:
    await asyncio.gather(*(member.end() for member in members))
