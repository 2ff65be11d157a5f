"""Workers that are found by a name: they come, go and come back while requests are answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from coordinator_cluster import FAST, Cluster, Worker, ask, cluster, draft_model, plain, target_model
from waiting import wait_until

from coordinator import links
from coordinator.events import Kind
from coordinator.pools import Backoff
from specpipe.types import Mode

SETTINGS = replace(FAST, resolve_every_s=0.02)


@dataclass
class Book:
    """A resolver that a test writes."""

    found: dict[str, list[str]] = field(default_factory=dict)
    num_asked: Counter[str] = field(default_factory=Counter)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.num_asked[host] += 1
        if host not in self.found:
            raise OSError(-2, "Name or service not known")
        return list(self.found[host])


@asynccontextmanager
async def found_by_name(targets: list[Worker], drafts: list[Worker], book: Book) -> AsyncIterator[Cluster]:
    """The coordinator knows two names; what they stand for is in `book`, at first all that is given."""

    def write() -> None:
        book.found = {"targets": [w.address for w in targets], "drafts": [w.address for w in drafts]}

    names = {"targets": ("dns:targets:1",), "drafts": ("dns:drafts:1",)}
    async with cluster(targets, drafts, settings=SETTINGS, resolve=book, names=names, on_started=write) as service:
        yield service


def connected(service: Cluster, kind: Kind) -> set[str]:
    return {connection.address for connection in service.coordinator.pools[kind]}


def sessions_at(service: Cluster) -> dict[str, int]:
    return {connection.address: len(connection.sessions) for connection in service.coordinator.pools[Kind.TARGET]}


async def test_all_workers_of_a_name_are_used() -> None:
    targets = [Worker("target", target_model()) for _ in range(2)]
    drafts = [Worker("draft", draft_model()) for _ in range(2)]
    async with found_by_name(targets, drafts, Book()) as service:
        await wait_until(lambda: connected(service, Kind.TARGET) == {w.address for w in targets})
        await wait_until(lambda: connected(service, Kind.DRAFT) == {w.address for w in drafts})
        answers = await asyncio.gather(*(service.client.answer(ask()) for _ in range(4)))
        assert {tuple(answer.token_ids) for answer in answers} == {tuple(await plain(service))}
        assert all(worker.gated.num_steps > 0 for worker in targets + drafts)


async def test_a_worker_that_its_name_left_finishes_its_sessions_and_is_left() -> None:
    targets = [Worker("target", target_model()) for _ in range(2)]
    book = Book()
    async with found_by_name(targets, [], book) as service:
        await wait_until(lambda: len(connected(service, Kind.TARGET)) == 2)
        for worker in targets:
            worker.gate.clear()
        first = asyncio.create_task(service.client.answer(ask(mode=Mode.OFF)))
        await wait_until(lambda: any(sessions_at(service).values()))
        busy = next(worker for worker in targets if sessions_at(service)[worker.address])
        idle = next(worker for worker in targets if worker is not busy)
        book.found["targets"] = [idle.address]
        await wait_until(lambda: any(c.is_leaving for c in service.coordinator.pools[Kind.TARGET]))
        others = [asyncio.create_task(service.client.answer(ask(mode=Mode.OFF))) for _ in range(3)]
        await wait_until(lambda: sum(sessions_at(service).values()) == 4)
        assert sessions_at(service) == {busy.address: 1, idle.address: 3}
        for worker in targets:
            worker.gate.set()
        answers = await asyncio.gather(first, *others)
        assert {tuple(answer.token_ids) for answer in answers} == {tuple(await plain(service))}
        await wait_until(lambda: connected(service, Kind.TARGET) == {idle.address})
        assert service.coordinator.workers == [(Kind.TARGET, idle.address)]


async def test_workers_come_back_under_their_name_or_another_address() -> None:
    targets = [Worker("target", target_model())]
    later = Worker("target", target_model())
    await later.start()
    book = Book()
    try:
        async with found_by_name(targets, [], book) as service:
            expected = await plain(service)
            book.found["targets"] = [later.address]
            await wait_until(lambda: connected(service, Kind.TARGET) == {later.address})
            assert await plain(service) == expected
            del book.found["targets"]  # a resolver that fails takes nothing away
            assert await plain(service) == expected
            book.found["targets"] = [targets[0].address, later.address]
            await wait_until(lambda: len(connected(service, Kind.TARGET)) == 2)
    finally:
        await later.end()


async def test_a_start_says_that_a_name_stands_for_nothing_yet() -> None:
    book = Book()
    names = {"targets": ("dns:targets:1",), "drafts": ()}
    worker = Worker("target", target_model())
    await worker.start()
    try:
        async with cluster([], [], settings=SETTINGS, resolve=book, names=names, must_be_ready=False) as service:
            ready = asyncio.create_task(service.app.wait_ready())
            await wait_until(lambda: "dns:targets:1" in service.coordinator.awaited)
            assert "stands for no worker yet" in service.coordinator.awaited
            book.found["targets"] = [worker.address]
            await ready
            assert len(await plain(service)) == 60
    finally:
        await worker.end()


@pytest.mark.parametrize("num_flaps", [20])
async def test_a_name_that_flaps_costs_no_answer(num_flaps: int) -> None:
    targets = [Worker("target", target_model()) for _ in range(2)]
    book = Book()
    async with found_by_name(targets, [], book) as service:
        expected = await plain(service)
        both = list(book.found["targets"])
        answers = [asyncio.create_task(service.client.answer(ask(mode=Mode.OFF))) for _ in range(8)]
        for i in range(num_flaps):
            book.found["targets"] = [both[i % 2]]
            await wait_until(lambda i=i: both[i % 2] in connected(service, Kind.TARGET))
        assert {tuple(answer.token_ids) for answer in await asyncio.gather(*answers)} == {tuple(expected)}


async def test_an_address_that_two_names_stand_for_is_one_worker_until_neither_does() -> None:
    targets = [Worker("target", target_model()) for _ in range(2)]
    book = Book()
    names = {"targets": ("dns:a:1", "dns:b:1"), "drafts": ()}

    def write() -> None:
        book.found = {"a": [worker.address for worker in targets], "b": [targets[0].address]}

    async with cluster(targets, [], settings=SETTINGS, resolve=book, names=names, on_started=write) as service:
        both = {worker.address for worker in targets}
        await wait_until(lambda: connected(service, Kind.TARGET) == both)
        assert len(service.coordinator.pools[Kind.TARGET]) == 2, "one connection each"
        expected = await plain(service)
        book.found["b"] = []
        await wait_until(lambda: book.num_asked["b"] > 0)
        book.num_asked.clear()
        await wait_until(lambda: book.num_asked["a"] > 2 and book.num_asked["b"] > 2)
        assert connected(service, Kind.TARGET) == both, "the other name stands for it"
        book.found = {"a": [targets[1].address], "b": [targets[1].address]}
        await wait_until(lambda: connected(service, Kind.TARGET) == {targets[1].address})
        book.found = {"a": [targets[0].address], "b": [targets[0].address]}
        await wait_until(lambda: connected(service, Kind.TARGET) == {targets[0].address})
        assert service.coordinator.workers == [(Kind.TARGET, targets[0].address)]
        assert await plain(service) == expected


async def test_a_worker_that_is_found_at_two_addresses_is_one_until_the_first_goes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "next_s", lambda self: 0.02)
    targets, book = [Worker("target", target_model(), is_relayed=True)], Book()
    async with found_by_name(targets, [], book) as service:
        (relayed,) = connected(service, Kind.TARGET)
        (target,), direct = targets, targets[0].server.address
        said, tried = f"worker {direct}: it is the worker that is connected at", []
        connect = service.coordinator._links._connect
        service.coordinator._links._connect = lambda address, *rest: (tried.append(address), connect(address, *rest))[1]
        book.found["targets"].append(direct)
        await wait_until(lambda: said in caplog.text)
        assert connected(service, Kind.TARGET) == {relayed}
        assert service.coordinator.workers == [(Kind.TARGET, relayed)]
        await wait_until(lambda: tried.count(direct) > 2)
        assert caplog.text.count(said) == 1
        expected = await plain(service)
        assert target.relay is not None
        await target.relay.__aexit__()
        await wait_until(lambda: connected(service, Kind.TARGET) == {direct})
        assert service.coordinator.workers == [(Kind.TARGET, relayed), (Kind.TARGET, direct)]
        assert await plain(service) == expected


async def test_a_worker_whose_name_left_one_of_its_addresses_is_connected_at_the_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "next_s", lambda self: 0.02)
    monkeypatch.setattr(links, "TWIN_PAUSES", 10_000)
    targets, book = [Worker("target", target_model(), is_relayed=True)], Book()
    async with found_by_name(targets, [], book) as service:
        direct = targets[0].server.address
        book.found["targets"].append(direct)
        await wait_until(lambda: "it is the worker that is connected at" in caplog.text)
        targets[0].gate.clear()
        answer = asyncio.create_task(service.client.answer(ask(mode=Mode.OFF)))
        await wait_until(lambda: any(sessions_at(service).values()))
        book.found["targets"] = [direct]
        await wait_until(lambda: direct in connected(service, Kind.TARGET))
        assert not answer.done()
        targets[0].gate.set()
        assert (await answer).token_ids == await plain(service)
        await wait_until(lambda: connected(service, Kind.TARGET) == {direct})
