"""Starts, supervises and stops the processes of a local service.

Owns: the order of starting (workers together, then the coordinator) and ending (coordinator first, so that answers
finish), and restarts. Must not know: what the processes do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from specpipe.errors import SpecpipeError, WorkerUnavailableError
from specpipe.launcher.child import KILL_AFTER_S, ChildProcess
from specpipe.launcher.plan import (
    COORDINATOR,
    DRAFT_WORKER,
    TARGET_RANK,
    TARGET_WORKER,
    ProcessSpec,
    ServiceConfig,
    plan_coordinator,
    plan_workers,
    usable_cores,
)
from specpipe.launcher.restarts import RestartDelays

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    role: str
    pid: int
    address: str | None
    metrics: str | None = None  # HOST:PORT of its /metrics


OnProgress = Callable[[str, str], None]  # (name of a process, "loading" or "ready")


class LocalService:
    """A service on this machine: `async with LocalService(config) as service: await service.start()`.

    Nothing of it is left after the block.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.address = ""
        self.failure: asyncio.Future[SpecpipeError] = asyncio.get_running_loop().create_future()
        """Done when the service cannot go on as a whole: its coordinator has ended, or a process is not watched any
        more."""
        self._workers: list[ChildProcess] = []
        self._coordinator: ChildProcess | None = None
        self._supervisors: list[asyncio.Task[None]] = []
        self._parent_fd, self._life_fd = os.pipe()  # children hold the first; the second closes when we are gone

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.stop(grace_s=None if error else 0.0)
        finally:
            os.close(self._parent_fd)
            os.close(self._life_fd)

    @property
    def http(self) -> str:
        """HOST:PORT of the live page; empty if there is none."""
        return self._coordinator.http if self._coordinator else ""

    @property
    def processes(self) -> list[ProcessInfo]:
        children = [self._coordinator, *self._workers] if self._coordinator else self._workers
        return [info for child in children for info in _infos_of(child)]

    async def start(self, on_progress: OnProgress | None = None) -> None:
        """Returns once requests are answered at `address`.

        Raises ConfigError or WorkerUnavailableError, with the failing process's own sentence, if that cannot be.
        """
        report = on_progress or _ignore_progress
        await self._start_workers(report)
        addresses: dict[str, list[str]] = {TARGET_WORKER: [], DRAFT_WORKER: []}
        for worker in self._workers:
            addresses[worker.spec.role].append(worker.address)
        spec = plan_coordinator(self.config, addresses[TARGET_WORKER], addresses[DRAFT_WORKER])
        report(spec.role, "loading")
        self._coordinator = await self._start_child(spec)
        report(spec.role, "ready")
        self.address = self._coordinator.address
        for index, name in enumerate(process_names([worker.spec for worker in self._workers])):
            self._supervise(self._keep_alive(index), name)
        self._supervise(self._watch_coordinator(self._coordinator), COORDINATOR)

    async def stop(self, *, grace_s: float | None) -> None:
        """Let answers finish for `grace_s` seconds (None: kill at once), then end all processes. Idempotent."""
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        self._supervisors.clear()
        if self._coordinator is not None:
            await _end(self._coordinator, grace_s)
            self._coordinator = None
        await asyncio.gather(*(_end(worker, None if grace_s is None else 0.0) for worker in self._workers))
        self._workers.clear()

    async def _start_workers(self, on_progress: OnProgress) -> None:
        """All or none: the first failure ends the others and is what the caller sees."""
        specs = plan_workers(self.config, usable_cores())

        async def start(spec: ProcessSpec, name: str) -> ChildProcess:
            on_progress(name, "loading")
            child = await self._start_child(spec)
            on_progress(name, "ready")
            return child

        names = process_names(specs)
        tasks = [asyncio.create_task(start(spec, name)) for spec, name in zip(specs, names, strict=True)]
        try:
            self._workers = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(child.kill() for child in outcomes if isinstance(child, ChildProcess)))
            raise

    async def _start_child(self, spec: ProcessSpec, port: int | None = None) -> ChildProcess:
        """See `ChildProcess.start`. WorkerUnavailableError, too, where no memory, process or descriptor is left."""
        try:
            return await ChildProcess.start(spec, self._parent_fd, port=port)
        except OSError as error:
            raise WorkerUnavailableError(f"{spec.role} cannot be started: {error}") from None

    async def _keep_alive(self, index: int) -> None:
        """Start worker `index` again each time it ends: on the same port, so that the coordinator finds it."""
        delays = RestartDelays()
        while True:
            worker = self._workers[index]
            started = time.monotonic()
            code = await worker.wait()
            logger.warning("%s (pid %d) ended with code %d", worker.spec.role, worker.pid, code)
            await self._restart(index, worker, delays, lived_s=time.monotonic() - started)

    async def _restart(self, index: int, worker: ChildProcess, delays: RestartDelays, lived_s: float) -> None:
        """Try until it serves."""
        port = int(worker.address.rpartition(":")[2])
        while True:
            delay_s = delays.after(lived_s)
            logger.warning("%s starts again in %.0f s", worker.spec.role, delay_s)
            await asyncio.sleep(delay_s)
            try:
                self._workers[index] = await self._start_child(worker.spec, port)
            except SpecpipeError as error:
                logger.warning("%s did not start: %s", worker.spec.role, error)
                lived_s = 0.0
                continue
            logger.warning("%s is back at %s", worker.spec.role, worker.address)
            return

    async def _watch_coordinator(self, coordinator: ChildProcess) -> None:
        code = await coordinator.wait()
        self._fail(f"the coordinator ended with code {code}")

    def _supervise(self, watch: Coroutine[Any, Any, None], name: str) -> None:
        """`watch` ends by itself only when the service cannot go on."""
        task = asyncio.create_task(watch, name=name)
        task.add_done_callback(self._note_end)
        self._supervisors.append(task)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s is not watched any more", task.get_name(), exc_info=error)
            self._fail(f"{task.get_name()} is not watched any more: {str(error) or type(error).__name__}")

    def _fail(self, reason: str) -> None:
        if not self.failure.done():
            self.failure.set_result(WorkerUnavailableError(reason))


def _infos_of(child: ChildProcess) -> list[ProcessInfo]:
    """The process itself, then the ranks that it started."""
    ranks = [ProcessInfo(role=TARGET_RANK, pid=pid, address=None) for pid in child.companions]
    metrics = child.metrics or None
    return [ProcessInfo(role=child.spec.role, pid=child.pid, address=child.address, metrics=metrics), *ranks]


async def _end(child: ChildProcess, grace_s: float | None) -> None:
    await (child.kill() if grace_s is None else child.terminate(grace_s + KILL_AFTER_S))


def process_names(specs: list[ProcessSpec]) -> list[str]:
    """Roles, numbered where there are several of one."""
    totals = {spec.role: sum(other.role == spec.role for other in specs) for spec in specs}
    seen: dict[str, int] = {}
    names = []
    for spec in specs:
        seen[spec.role] = seen.get(spec.role, 0) + 1
        names.append(spec.role if totals[spec.role] == 1 else f"{spec.role} {seen[spec.role]}")
    return names


def _ignore_progress(_name: str, _state: str) -> None:
    """The default of `on_progress`."""
