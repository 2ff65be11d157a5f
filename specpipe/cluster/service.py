"""All workers and coordinators of a cluster: begun in order, kept alive, told of one another, scaled, ended.

Owns: the replicas, and the lists of workers that coordinators read. Must not know: Ray, what is wanted when
(`autoscale`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specpipe.cluster.backend import Backend, Group
from specpipe.cluster.config import ClusterConfig
from specpipe.cluster.keeper import one_line
from specpipe.cluster.plan import DRAFTS_FILE, ROLES, TARGETS_FILE, counts_at_start, plan_group
from specpipe.cluster.replica import Replica, ReplicaStatus
from specpipe.cluster.scaler import CountChange, Scaler
from specpipe.errors import SpecpipeError, WorkerUnavailableError
from specpipe.launcher.plan import COORDINATOR, DRAFT_WORKER, TARGET_WORKER

TELL_TIMEOUT_S: Final = 20.0  # for an actor to write two short files

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    name: str
    is_ready: bool  # every replica serves
    replicas: tuple[ReplicaStatus, ...]
    changes: tuple[CountChange, ...] = ()  # of the number of workers, by autoscaling; the latest last

    @property
    def coordinators(self) -> tuple[str, ...]:
        """Those that run, HOST:PORT, whether they answer or not."""
        return tuple(r.process.address for r in self.replicas if r.role == COORDINATOR and r.process)

    @property
    def answering(self) -> tuple[str, ...]:
        """Coordinators that answer requests now, by their own health, HOST:PORT."""
        return tuple(r.process.address for r in self.replicas if r.role == COORDINATOR and r.process and r.is_serving)


class ClusterService:
    """Made in a running event loop, in which all of it lives."""

    def __init__(self, config: ClusterConfig, backend: Backend) -> None:
        self.config = config
        self._backend = backend
        self._replicas: dict[str, Replica] = {}
        self._leaving: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._scaler = Scaler(config.autoscale, self)
        self._has_workers = asyncio.Event()  # all those of the start have served once
        self._background: set[asyncio.Task[None]] = set()  # kept from being collected
        self._stopping: asyncio.Task[None] | None = None

    @property
    def status(self) -> ClusterStatus:
        statuses = tuple(replica.status for replica in self._ordered())
        is_ready = bool(statuses) and all(status.is_serving for status in statuses)
        changes = tuple(self._scaler.changes)
        return ClusterStatus(name=self.config.name, is_ready=is_ready, replicas=statuses, changes=changes)

    async def start(self) -> None:
        """Returns once everything serves. Raises what the first process to fail has said; `stop` is still due.

        Groups that are there already (their controller was lost) go on as they are, and then no failure ends the start.
        """
        wanted = [f"{role}-{number}" for role, count in counts_at_start(self.config).items() for number in range(count)]
        found = [name for name in await self._backend.names() if _role_of(name) in ROLES]
        names = list(dict.fromkeys([*wanted, *found]))
        if found:
            logger.warning("%d groups are taken over", len(found))
        self._begin(names)
        if not found:  # else coordinators run already
            await self._first_of([name for name in names if _role_of(name) != COORDINATOR])
        self._has_workers.set()
        if found:  # requests are answered already, and what was lost may never find a place
            self._spawn(self._scaler.run(), "autoscale")
        await self._first_of(names, is_forgiving=bool(found))
        if not found:
            self._spawn(self._scaler.run(), "autoscale")

    def count(self, role: str) -> int:
        """Workers that there are, those that begin included and those that leave not."""
        return len(self._staying(role))

    def metrics(self) -> Mapping[str, Sequence[str]]:
        """HOST:PORT of every /metrics of a process that runs, by role."""
        running = [replica.status for replica in self._ordered()]
        return {role: [s.process.metrics for s in running if s.role == role and s.process] for role in ROLES}

    def scale(self, role: str, count: int) -> None:
        """Begin workers of a role, or let the last ones leave, until there are `count`."""
        names = self._staying(role)
        free = (f"{role}-{number}" for number in range(len(self._replicas) + count))
        self._begin([name for name in free if name not in self._replicas][: max(0, count - len(names))])
        for name in names[count:]:
            self._leaving.add(name)
            self._spawn(self._let_go(name), f"{name} leaves")

    async def stop(self, grace_s: float) -> None:
        """Coordinators first, so that answers finish; then the workers. A second call waits for the first.

        Raises the first error after all has been tried.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(grace_s), name="stop")
        await asyncio.shield(self._stopping)

    async def _stop(self, grace_s: float) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        is_coordinator = {name: replica.role == COORDINATOR for name, replica in self._replicas.items()}
        coordinators = (self._leave(name, grace_s) for name, is_one in is_coordinator.items() if is_one)
        outcomes = await asyncio.gather(*coordinators, return_exceptions=True)
        workers = (self._leave(name, 0.0) for name, is_one in is_coordinator.items() if not is_one)
        outcomes += await asyncio.gather(*workers, return_exceptions=True)
        for error in outcomes:
            if error is not None:
                raise error

    async def lines(self) -> dict[str, tuple[str, ...]]:
        """What each has logged last."""
        replicas = list(self._ordered())
        return dict(zip((r.name for r in replicas), await asyncio.gather(*(r.lines() for r in replicas)), strict=True))

    def _ordered(self) -> Iterable[Replica]:
        """By role in the order of starting, then by number."""
        return sorted(self._replicas.values(), key=lambda r: (ROLES.index(r.role), _number_of(r.name)))

    def _staying(self, role: str) -> list[str]:
        return [r.name for r in self._ordered() if r.role == role and r.name not in self._leaving]

    def _begin(self, names: Iterable[str]) -> None:
        for name in names:
            self._replicas[name] = replica = Replica(
                name,
                plan_group(self.config, _role_of(name)),
                self._backend,
                self.config.restarts,
                prepare=self._prepare if _role_of(name) == COORDINATOR else _prepare_nothing,
                on_change=self._tell_all,
            )
            self._tasks[name] = asyncio.create_task(self._keep(replica), name=name)

    async def _keep(self, replica: Replica) -> None:
        while True:
            try:
                await replica.run()
            except Exception as error:  # a fault of ours or of the engine: it must not end the care for the others
                logger.exception("%s: an unexpected error", replica.name)
                replica.fail_first(error)
            await asyncio.sleep(self.config.restarts.max_delay_s)

    async def _first_of(self, names: Sequence[str], *, is_forgiving: bool = False) -> None:
        firsts = [self._replicas[name].first for name in names]
        await asyncio.gather(*firsts, return_exceptions=is_forgiving)

    async def _let_go(self, name: str) -> None:
        """See `_leave`; what cannot be given back is tried again."""
        while True:
            try:
                await self._leave(name, self.config.grace_s)
                return
            except Exception:  # a fault of ours or of the engine: its place and its name would be taken for ever
                logger.exception("%s: it cannot leave", name)
            await asyncio.sleep(self.config.restarts.max_delay_s)

    async def _leave(self, name: str, grace_s: float) -> None:
        self._leaving.add(name)
        replica, task = self._replicas[name], self._tasks[name]
        task.cancel()
        await asyncio.wait([task])
        await replica.leave(grace_s)
        del self._replicas[name], self._tasks[name]
        self._leaving.discard(name)

    def _workers(self) -> Mapping[str, Sequence[str]]:
        serving = [replica.status for replica in self._ordered()]
        return {
            file: [s.process.address for s in serving if s.role == role and s.process]
            for file, role in ((TARGETS_FILE, TARGET_WORKER), (DRAFTS_FILE, DRAFT_WORKER))
        }

    async def _prepare(self, group: Group) -> None:
        """A coordinator begins when all workers of the start are there: it says then whether they fit together."""
        await self._has_workers.wait()
        await self._tell(group)

    async def _tell(self, group: Group) -> None:
        try:
            async with asyncio.timeout(TELL_TIMEOUT_S):
                await group.list_workers(self._workers())
        except TimeoutError:
            raise WorkerUnavailableError(f"its actor has not answered in {TELL_TIMEOUT_S:.0f} s") from None

    def _tell_all(self) -> None:
        """Tell every coordinator which workers serve now."""
        for replica in self._replicas.values():
            if replica.role == COORDINATOR and replica.group is not None:
                self._spawn(self._tell_one(replica.name, replica.group), f"tell {replica.name}")

    async def _tell_one(self, name: str, group: Group) -> None:
        """One that is lost hears it when it starts again."""
        try:
            await self._tell(group)
        except SpecpipeError as error:
            logger.warning("%s is not told of a change: %s", name, one_line(error))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s: it failed", task.get_name(), exc_info=error)


async def _prepare_nothing(_group: Group) -> None:
    """Before the start of a worker."""


def _role_of(name: str) -> str:
    return name.rpartition("-")[0]


def _number_of(name: str) -> int:
    return int(name.rpartition("-")[2])
