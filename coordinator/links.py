"""The links to workers: dialled for ever, checked, watched.

Owns: the tasks that dial and read, the pools of live connections, when a worker is taken for lost. Must not know:
requests, what a message means, which workers fit (`coordinator.fit`), what names stand for (`coordinator.discovery`).
What is read goes to the owner.

A worker that its name no longer stands for gets no new sessions; when it has none, it is not dialled any more. One that
has several addresses is connected at one of them, and its room counts once; another takes over when that one goes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from coordinator.discovery import Change, Name, Resolve, is_name, resolve_name
from coordinator.events import Kind
from coordinator.fit import Fit
from coordinator.pools import Backoff, Connection, Link, Pool
from coordinator.settings import DriverSettings
from specpipe.config import CoordinatorConfig, TlsConfig
from specpipe.errors import ModelMismatchError, SpecpipeError, WorkerUnavailableError
from specpipe.tls import NO_TLS
from specpipe.types import Batch, ModelInfo
from specpipe.worker_client import WorkerLink
from specpipe.worker_stream import new_incarnation

logger = logging.getLogger(__name__)

MAX_PROBLEMS_TOLD = 8  # of one worker that is not connected; then they are told anew
TWIN_PAUSES = 16  # between tries of an address whose worker is connected at another one, while it is
Connect = Callable[[str, Kind, int], AbstractAsyncContextManager[WorkerLink]]


class LinkOwner(Protocol):
    """Hears of each connection, in order, between its first batch and its loss."""

    def hear(self, connection: Connection, batch: Batch) -> None: ...

    def ask_for_missing(self, connection: Connection) -> None:
        """Batches were lost on the way here."""
        ...

    def lose(self, connection: Connection, reason: str) -> None:
        """It is in no pool any more, and its sessions are over."""
        ...


def connect_worker(
    address: str, kind: Kind, incarnation: int, *, tls: TlsConfig = NO_TLS
) -> AbstractAsyncContextManager[WorkerLink]:
    return WorkerLink.connect(address, kind.value, incarnation, tls=tls)


class WorkerLinks:
    """All links of a coordinator, one for each worker that its configuration names or that a name stands for."""

    def __init__(
        self,
        config: CoordinatorConfig,
        settings: DriverSettings,
        connect: Connect,
        owner: LinkOwner,
        resolve: Resolve = resolve_name,
    ) -> None:
        self.pools = {kind: Pool(kind) for kind in Kind}
        self.fit = Fit(self._target_link)
        self._resolve = resolve
        sources = {Kind.TARGET: config.targets, Kind.DRAFT: config.drafts}
        self._addresses = {kind: [s for s in dict.fromkeys(given) if not is_name(s)] for kind, given in sources.items()}
        self._names = {kind: [Name(s) for s in dict.fromkeys(given) if is_name(s)] for kind, given in sources.items()}
        self._workers = {(kind, address): None for kind in Kind for address in self._addresses[kind]}  # in order
        self._named: dict[tuple[Kind, str], set[str]] = {}  # names that stand for each, while it is dialled for them
        self._leaving: set[tuple[Kind, str]] = set()  # still dialled, but no name stands for them any longer
        self._twins: dict[tuple[Kind, str], int] = {}  # numbers of connections to the worker at another address of it
        self._dials: dict[tuple[Kind, str], asyncio.Task[None]] = {}  # of those that names stand for
        self._settings = settings
        self._connect = connect
        self._owner = owner
        self._incarnation = new_incarnation()
        self._numbers = itertools.count(1)
        self._first_tries: dict[tuple[Kind, str], asyncio.Future[str]] = {}  # why the worker does not fit; "": it does
        self._first_answers: list[asyncio.Future[None]] = []  # of the names
        self._problems: dict[tuple[Kind, str], str] = {}  # of workers that are not connected: what was wrong last
        self._patience: dict[int, asyncio.Timeout] = {}  # by connection number: ends the reading of a silent link

    def __iter__(self) -> Iterator[Connection]:
        for pool in self.pools.values():
            yield from pool

    @property
    def workers(self) -> list[tuple[Kind, str]]:
        """All that are dialled now, connected or not; one that is connected at another address only there."""
        return [(kind, address) for kind, address in list(self._workers) if not self._has_twin(kind, address)]

    def get(self, number: int) -> Connection | None:
        return self.pools[Kind.TARGET].get(number) or self.pools[Kind.DRAFT].get(number)

    def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Begin to dial every worker. The tasks run until they are cancelled."""
        tasks = [self._dial(group, kind, address) for kind in Kind for address in self._addresses[kind]]
        for kind, name in [(of, name) for of in Kind for name in self._names[of]]:
            answered = asyncio.get_running_loop().create_future()
            self._first_answers.append(answered)
            tasks.append(group.create_task(self._follow(group, kind, name, answered), name=f"follow {name.source}"))
        return tasks

    async def wait_ready(self) -> ModelInfo:
        """Returns when a target worker is there and every worker has been tried once.

        Raises ModelMismatchError if one of the first tries found a worker that does not fit.
        """
        model = await self.fit.target()
        if self._first_answers:
            await asyncio.wait(self._first_answers, timeout=self._settings.max_first_try_s)
        tries = list(self._first_tries.values())
        await asyncio.wait(tries, timeout=self._settings.max_first_try_s)
        for outcome in tries:
            if outcome.done() and outcome.result():
                raise ModelMismatchError(outcome.result())
        return model

    @property
    def awaited(self) -> str:
        """What a start waits for; see `wait_ready`."""
        if self.fit.model is None:
            return f"no target worker is connected ({'; '.join(dict.fromkeys(self._sought_targets()))})"
        untried = [f"{kind.value} worker {at}" for (kind, at), tried in self._first_tries.items() if not tried.done()]
        return f"it waits for {', '.join(untried)}" if untried else "its tokenizer is being loaded"

    def _sought_targets(self) -> Iterator[str]:
        """Each target worker, or what is wrong with it."""
        for name in self._names[Kind.TARGET]:
            if not name.addresses:
                yield f"{name.source} stands for no worker yet"
        found = [address for name in self._names[Kind.TARGET] for address in name.addresses]
        for address in (*self._addresses[Kind.TARGET], *found):
            yield self._problems.get((Kind.TARGET, address), f"target worker {address}")

    def watch(self, connection: Connection, passed_s: float) -> None:
        """Time has passed in which the coordinator itself was at work: count the silence."""
        connection.silent_s += passed_s
        step_s = connection.link.heartbeat.step_running_ms / 1000
        hangs = step_s > self._settings.suspect_step_s(connection.kind)
        connection.is_suspect = hangs or connection.silent_s > self._settings.suspect_after_s
        if connection.silent_s > self._settings.max_silence_s(connection.kind):
            self._patience[connection.number].reschedule(0.0)

    def _target_link(self) -> Link | None:
        return next((connection.link for connection in self.pools[Kind.TARGET] if not connection.is_suspect), None)

    def _dial(self, group: asyncio.TaskGroup, kind: Kind, address: str) -> asyncio.Task[None]:
        self._workers[kind, address] = None
        self._first_tries.setdefault((kind, address), asyncio.get_running_loop().create_future())
        return group.create_task(self._keep_connected(kind, address), name=f"keep {address}")

    async def _follow(self, group: asyncio.TaskGroup, kind: Kind, name: Name, answered: asyncio.Future[None]) -> None:
        """Dial whatever the name stands for, for ever. What it stood for once is left when it has no sessions."""
        try:
            while True:
                change = await name.ask(self._resolve)
                self._note_names(kind, name, change)
                for address in change.added:
                    if (kind, address) not in self._workers:
                        self._dials[kind, address] = self._dial(group, kind, address)
                for address in [at for of, at in self._leaving if of is kind and not self._has_sessions(kind, at)]:
                    self._forget(kind, address)
                if not answered.done():
                    answered.set_result(None)
                await asyncio.sleep(name.next_ask_s(self._settings.resolve_every_s))
        finally:
            for task in self._dials.values():
                task.cancel()

    def _note_names(self, kind: Kind, name: Name, change: Change) -> None:
        """A worker is found when the first name stands for it, and leaves when none does."""
        given = self._addresses[kind]  # those that are named for themselves are neither
        for address in (a for a in change.added if a not in given):
            names = self._named.setdefault((kind, address), set())
            if not names:
                self._leaving.discard((kind, address))
                logger.info("%s worker %s is found", kind.value, address)
            names.add(name.source)
        for address in (a for a in change.removed if a not in given):
            names = self._named[kind, address]
            names.discard(name.source)
            if not names:
                self._leaving.add((kind, address))
                logger.info("%s worker %s is leaving", kind.value, address)
        for connection in self.pools[kind]:
            connection.is_leaving = (kind, connection.address) in self._leaving

    def _has_sessions(self, kind: Kind, address: str) -> bool:
        return any(connection.sessions for connection in self.pools[kind] if connection.address == address)

    def _forget(self, kind: Kind, address: str) -> None:
        self._dials.pop((kind, address)).cancel()
        del self._named[kind, address]
        self._leaving.discard((kind, address))
        self._twins.pop((kind, address), None)
        self._problems.pop((kind, address), None)
        self._note_first_try(kind, address, "")
        del self._first_tries[kind, address], self._workers[kind, address]
        logger.info("%s worker %s has left", kind.value, address)

    async def _keep_connected(self, kind: Kind, address: str) -> None:
        """Dial for ever. What goes wrong is logged once until the worker is connected again."""
        backoff = Backoff()
        told: set[str] = set()
        while True:
            try:
                async with self._connect(address, kind, self._incarnation) as link:
                    await self._serve_link(kind, address, link, backoff)
            except SpecpipeError as error:
                self._note_first_try(kind, address, str(error) if isinstance(error, ModelMismatchError) else "")
                if (kind, address) not in self._problems or len(told) == MAX_PROBLEMS_TOLD:
                    told.clear()
                problem = self._problems[kind, address] = name_worker(kind, address, str(error))
                if problem not in told:
                    told.add(problem)
                    logger.warning("%s; it is dialled again", problem)
            await self._pause(kind, address, backoff)

    async def _pause(self, kind: Kind, address: str, backoff: Backoff) -> None:
        """Until the address is worth dialling again."""
        for _ in range(TWIN_PAUSES):
            await asyncio.sleep(spread(backoff.next_s()))
            if not self._has_twin(kind, address):
                return

    async def _serve_link(self, kind: Kind, address: str, link: WorkerLink, backoff: Backoff) -> None:
        """Returns never: a link ends with an error. Then its sessions are lost."""
        first = await self._first_batch(kind, link)
        await self.fit.check(kind, address, link)  # a target is in its pool as soon as drafts hear of it
        self._check_twin(kind, address, link)
        connection = Connection(next(self._numbers), kind, address, link)
        connection.is_leaving = (kind, address) in self._leaving
        self.pools[kind].add(connection)
        self._note_first_try(kind, address, "")
        self._problems.pop((kind, address), None)
        backoff.reset()
        logger.info("%s worker %s is connected", kind.value, address)
        reason = "the coordinator stops"
        try:
            self._hear(connection, first)
            await self._read_link(connection, link)
        except SpecpipeError as error:
            reason = str(error)
            raise
        finally:
            self.pools[kind].remove(connection)
            self._owner.lose(connection, reason)

    def _check_twin(self, kind: Kind, address: str, link: WorkerLink) -> None:
        """Raise WorkerUnavailableError if the worker is connected at another address, and that one is not leaving."""
        incarnation = link.hello.incarnation
        self._twins.pop((kind, address), None)
        for other in self.pools[kind]:
            is_same = incarnation != 0 and other.link.hello.incarnation == incarnation
            if is_same and other.address != address and not other.is_leaving:
                self._twins[kind, address] = other.number
                raise WorkerUnavailableError(f"it is the worker that is connected at {other.address}")

    def _has_twin(self, kind: Kind, address: str) -> bool:
        """The worker was found there, and is connected at another address that stands for it still."""
        twin = self.get(self._twins.get((kind, address), 0))
        return twin is not None and not twin.is_leaving

    async def _first_batch(self, kind: Kind, link: WorkerLink) -> Batch:
        """With it comes the first heartbeat: a worker that hangs in a step is found out before it gets sessions."""
        try:
            async with asyncio.timeout(self._settings.max_silence_s(kind)):
                batch = await anext(link)
        except TimeoutError:
            raise WorkerUnavailableError("it said hello and nothing else") from None
        self._check_step(kind, link)
        return batch

    def _note_first_try(self, kind: Kind, address: str, misfit: str) -> None:
        """NOTE: the error itself would keep alive whatever it passed, the link and its descriptor among it."""
        first_try = self._first_tries[kind, address]
        if not first_try.done():
            first_try.set_result(misfit)

    async def _read_link(self, connection: Connection, link: WorkerLink) -> None:
        num_holes = 0
        try:
            async with asyncio.timeout(None) as self._patience[connection.number]:
                async for batch in link:
                    connection.silent_s = 0.0
                    self._check_step(connection.kind, link)
                    if link.num_holes != num_holes:
                        num_holes = link.num_holes
                        self._owner.ask_for_missing(connection)
                    self._hear(connection, batch)
        except TimeoutError:
            raise WorkerUnavailableError(f"it has said nothing for {connection.silent_s:.1f} s") from None
        finally:
            del self._patience[connection.number]

    def _hear(self, connection: Connection, batch: Batch) -> None:
        if batch.heartbeat is not None:
            connection.count_others(batch.heartbeat)
        self._owner.hear(connection, batch)

    def _check_step(self, kind: Kind, link: WorkerLink) -> None:
        running_s = link.heartbeat.step_running_ms / 1000
        if running_s > self._settings.max_step_s(kind):
            raise WorkerUnavailableError(f"its step has run for {running_s:.0f} s")


def spread(wait_s: float) -> float:
    """Up to half of it less, so that not all coordinators dial a worker at the same moment that they lost at the same
    moment. Never more: requests wait for a target worker that is back."""
    return random.uniform(wait_s / 2, wait_s)


def name_worker(kind: Kind, address: str, problem: str) -> str:
    """The problem as a sentence that names its worker once: some do so already."""
    if problem.startswith(f"worker {address}"):
        return f"{kind.value} {problem}"
    return problem if f"worker {address}" in problem else f"{kind.value} worker {address}: {problem}"
