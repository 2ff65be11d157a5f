"""A cluster engine without a cluster: groups whose processes a test ends, refuses and loses as it likes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence

from specpipe.cluster.backend import Group, GroupLostError
from specpipe.cluster.health import Health
from specpipe.cluster.keeper import Ended, Started
from specpipe.cluster.plan import GroupPlan


class MemoryGroup:
    """One placed group. Addresses are never given twice, as with free ports."""

    def __init__(self, engine: MemoryEngine, name: str) -> None:
        self.node = "host"
        self.name = name
        self.num_starts = 0
        self.is_running = False
        self.listed: Mapping[str, Sequence[str]] = {}
        self._health = Health.SERVING
        self._health_error: Exception | None = None
        self._has_changed = asyncio.Event()
        self.grace_s: float | None = None  # of its end in order
        self._engine = engine
        self._ending: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

    async def start(self, port: int | None) -> Started:
        if refusals := self._engine.refusals.get(self.name):
            raise refusals.pop(0)
        await self._engine.may_start.wait()
        if not self.is_running:
            self.num_starts += 1
            self.is_running = True
            self._health = Health.SERVING
            self._ending = asyncio.get_running_loop().create_future()
            self._started = Started(
                address=f"{self.node}:{port or next(self._engine.ports)}", metrics=f"{self.name}:9", pid=1
            )
        self._engine.log.append(f"start {self.name}")
        return self._started

    async def wait(self) -> Ended:
        return await asyncio.shield(self._ending)

    async def health(self, known: Health) -> Health:
        while self._health is known:
            await self._has_changed.wait()
            if self._health_error is not None:
                raise self._health_error
        return self._health

    async def stop(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self._engine.log.append(f"stop {self.name}")
        if self._engine.cannot_stop:
            raise GroupLostError("its node is gone")

    async def list_workers(self, addresses: Mapping[str, Sequence[str]]) -> None:
        self.listed = addresses

    async def lines(self) -> tuple[str, ...]:
        return ("it works",)

    def become(self, health: Health) -> None:
        """Its process does."""
        self._health = health
        self._has_changed.set()
        self._has_changed = asyncio.Event()

    def break_health(self, error: Exception) -> None:
        """Whoever follows its health hears this."""
        self._health_error = error
        self._has_changed.set()

    def end(self, reason: str, *, is_in_order: bool = False) -> None:
        """Its process ends."""
        self.is_running = False
        self._ending.set_result(Ended(reason=reason, lines=("its last words",), is_in_order=is_in_order))

    def lose(self, reason: str) -> None:
        """One of its actors ends."""
        self._ending.set_exception(GroupLostError(reason))


class MemoryEngine:
    """See `specpipe.cluster.backend.Backend`."""

    def __init__(self) -> None:
        self.groups: dict[str, MemoryGroup] = {}
        self.refusals: dict[str, list[Exception]] = {}  # by group: what its next starts raise
        self.release_refusals: dict[str, list[Exception]] = {}  # by group: what giving it back raises next
        self.unplaceable: set[str] = set()  # groups that find no place
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.cannot_stop = False
        self.log: list[str] = []
        self.num_released = 0
        self.ports = itertools.count(1000)

    async def place(self, name: str, plan: GroupPlan) -> Group:
        if name in self.unplaceable:
            await asyncio.Event().wait()
        return self.groups.setdefault(name, MemoryGroup(self, name))

    async def release(self, name: str) -> None:
        if refusals := self.release_refusals.get(name):
            raise refusals.pop(0)
        self.num_released += 1
        self.groups.pop(name, None)

    async def names(self) -> list[str]:
        return list(self.groups)
