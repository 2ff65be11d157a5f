"""A local service watches its processes, and says so when it cannot. specpipe.launcher.service."""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest
from waiting import wait_until

from specpipe.errors import WorkerUnavailableError
from specpipe.launcher import LocalService, ServiceConfig, service
from specpipe.launcher.plan import COORDINATOR, DRAFT_WORKER, TARGET_WORKER, ProcessSpec
from specpipe.launcher.restarts import RestartDelays

NO_MEMORY = OSError(errno.ENOMEM, "Cannot allocate memory")


class MemoryChild:
    """See `ChildProcess`. A test ends it, and says what the next starts of its role raise."""

    ports = itertools.count(1000)
    refusals: ClassVar[dict[str, list[Exception]]]
    starts: ClassVar[list[str]]

    def __init__(self, spec: ProcessSpec, port: int | None) -> None:
        self.spec = spec
        self.address = f"127.0.0.1:{port or next(self.ports)}"
        self.http = self.metrics = ""
        self.companions: tuple[int, ...] = ()
        self.pid = 1
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, spec: ProcessSpec, parent_fd: int, *, port: int | None = None) -> MemoryChild:
        cls.starts.append(spec.role)
        if refusals := cls.refusals.get(spec.role):
            raise refusals.pop(0)
        return cls(spec, port)

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    async def terminate(self, patience_s: float) -> int:
        return 0

    async def kill(self) -> int:
        return -9


@pytest.fixture(autouse=True)
def _processes_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    MemoryChild.refusals, MemoryChild.starts = {}, []
    monkeypatch.setattr(service, "ChildProcess", MemoryChild)
    monkeypatch.setattr(service, "RestartDelays", lambda: RestartDelays(first_s=0.001, max_s=0.002))


@asynccontextmanager
async def started() -> AsyncIterator[LocalService]:
    async with LocalService(ServiceConfig(target="t", draft="d")) as local:
        await local.start()
        yield local


def child(local: LocalService, role: str) -> MemoryChild:
    children = [local._coordinator, *local._workers]
    return next(each for each in children if isinstance(each, MemoryChild) and each.spec.role == role)


async def test_a_worker_starts_again_once_the_machine_can() -> None:
    async with started() as local:
        first = child(local, DRAFT_WORKER)
        MemoryChild.refusals[DRAFT_WORKER] = [NO_MEMORY, OSError(errno.EAGAIN, "try again"), NO_MEMORY]
        first.ended.set_result(-9)
        await wait_until(lambda: child(local, DRAFT_WORKER) is not first)
        assert MemoryChild.starts.count(DRAFT_WORKER) == 5
        assert child(local, DRAFT_WORKER).address == first.address
        assert not local.failure.done()
        second = child(local, DRAFT_WORKER)
        second.ended.set_result(1)  # it is watched as before
        await wait_until(lambda: child(local, DRAFT_WORKER) is not second)


@pytest.mark.parametrize("role", [TARGET_WORKER, DRAFT_WORKER, COORDINATOR])
async def test_a_process_that_cannot_be_started_at_all_is_one_sentence(role: str) -> None:
    MemoryChild.refusals[role] = [NO_MEMORY]
    with pytest.raises(WorkerUnavailableError, match=f"^{role} cannot be started: .*Cannot allocate memory"):
        async with started():
            pass


async def test_a_service_that_cannot_watch_a_worker_any_more_says_so_and_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with started() as local:
        MemoryChild.refusals[DRAFT_WORKER] = [RuntimeError("no idea")]
        child(local, DRAFT_WORKER).ended.set_result(1)
        error = await asyncio.wait_for(asyncio.shield(local.failure), 10.0)
        assert str(error) == "draft-worker is not watched any more: no idea"
        assert "RuntimeError: no idea" in caplog.text
        child(local, COORDINATOR).ended.set_exception(ValueError("nor this"))  # fails as the second
        await wait_until(lambda: "coordinator is not watched any more" in caplog.text)
        assert local.failure.result() is error
        assert "Exception in callback" not in caplog.text


async def test_a_coordinator_that_ends_ends_the_service() -> None:
    async with started() as local:
        child(local, COORDINATOR).ended.set_result(3)
        assert str(await asyncio.wait_for(asyncio.shield(local.failure), 10.0)) == "the coordinator ended with code 3"
