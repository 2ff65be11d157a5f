"""What watchers of the live page hear, and that no reader, however many or slow, harms anybody else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from coordinator_cluster import Cluster, cluster, plain
from http_calls import Events, asking, client, events
from waiting import wait_until

from coordinator.web.connection import BoundedProtocol
from coordinator.web.feed import Feed, FeedSettings
from specpipe.client import GenerateRequest
from specpipe.config import TelemetryConfig
from specpipe.errors import CapacityError
from specpipe.spans import Process, Role, Span

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUESTION = {"prompt": "def add(left, right):\n", "max_tokens": 24, "ignore_eos": True, "seed": 5}
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[Cluster]:
    async with cluster(http_port=0) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web(service: Cluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with client(service.app.http_address) as opened:
        yield opened


# What is heard


async def test_a_watcher_hears_the_spans_of_every_request(service: Cluster, web: httpx2.AsyncClient) -> None:
    async with events(web) as watching:
        assert len((await watching.next("state"))["workers"]) == 2
        await wait_until(lambda: service.coordinator.tracing.is_watched)
        await service.client.answer(GenerateRequest(**{**QUESTION, "temperature": 0}), timeout_s=30)
        spans = await spans_until(watching, lambda span: span["name"] == "generate")
    names = {span["name"] for span in spans}
    assert {"queue", "tokenize", "prefill", "round", "verify", "draft", "generate"} <= names
    rounds = {span["id"]: span["attributes"] for span in spans if span["name"] == "round"}
    assert sum(told["num_committed"] - told.get("num_cut", 0) for told in rounds.values()) == 24
    for span in spans:
        assert span["start"] <= span["end"]
        if span["name"] == "verify":
            assert (span["role"], span["address"]) == ("target-worker", service.targets[0].address)
            assert span["parent"] in rounds
            assert span["attributes"]["step"] > 0
        if span["name"] == "draft":
            assert (span["role"], span["address"]) == ("draft-worker", service.drafts[0].address)


async def spans_until(watching: Events, is_last: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    while not any(map(is_last, spans)):
        spans += (await watching.next("spans"))["spans"]
    return spans


async def test_prompts_and_answers_are_told_to_no_watcher() -> None:
    async with (
        cluster(http_port=0, telemetry=TelemetryConfig(has_content=True)) as running,
        client(running.app.http_address) as web,
        events(web) as watching,
    ):
        await watching.next("state")
        await wait_until(lambda: running.coordinator.tracing.is_watched)
        await running.client.answer(GenerateRequest(prompt="secret_word", max_tokens=4), timeout_s=30)
        spans = await spans_until(watching, lambda span: span["name"] == "generate")
    assert "secret_word" not in repr(spans)


async def test_nobody_is_watched_once_the_last_page_is_closed(service: Cluster, web: httpx2.AsyncClient) -> None:
    tracing = service.coordinator.tracing
    await wait_until(lambda: not tracing.is_watched)
    async with events(web) as first, events(web) as second:
        await first.next("state")
        await second.next("state")
        await wait_until(lambda: tracing.is_watched)
    await wait_until(lambda: not tracing.is_watched)


async def test_a_caller_s_trace_goes_on_through_the_page(service: Cluster, web: httpx2.AsyncClient) -> None:
    async with events(web) as watching:
        await wait_until(lambda: service.coordinator.tracing.is_watched)
        async with asking(web, {"traceparent": TRACEPARENT}, **QUESTION, request_id="traced") as asked:
            await asked.next("finished")
        await spans_until(watching, lambda span: span["name"] == "generate")
    trace = service.coordinator.tracing.find("traced")
    assert trace is not None
    assert f"{trace.trace_id:032x}" == TRACEPARENT[3:35]
    await wait_until(lambda: any(span.name == "generate" for span in find(service, "traced")))
    (generate,) = [span for span in find(service, "traced") if span.name == "generate"]
    assert f"{generate.parent_id:016x}" == TRACEPARENT[36:52]


def find(service: Cluster, request_id: str) -> Sequence[Span]:
    trace = service.coordinator.tracing.find(request_id)
    return () if trace is None else trace.spans


# Bounds


class Source:
    """Spans by hand."""

    def __init__(self) -> None:
        self.sinks: list[Callable[[Sequence[Span]], None]] = []

    def subscribe(self, sink: Callable[[Sequence[Span]], None]) -> Callable[[], None]:
        self.sinks.append(sink)
        return lambda: self.sinks.remove(sink)


def span(number: int) -> Span:
    return Span(
        name="round",
        trace_id=1,
        span_id=number,
        process=Process(role=Role.COORDINATOR),
        start_unix_nanos=number,
        end_unix_nanos=number + 1,
    )


async def test_a_watcher_that_does_not_keep_up_is_dropped_and_others_hear_on() -> None:
    source = Source()
    feed = Feed(source, lambda: {"padding": "x" * 1000}, FeedSettings(interval_s=0.001, max_waiting_bytes=20_000))
    async with feed.running():
        slow, quick = feed.watch(), feed.watch()
        assert (await anext(slow)).startswith(b"event: state")
        await anext(quick)
        for _ in range(40):
            await anext(quick)
        assert [frame async for frame in slow] == []
        assert feed.num_watchers == 1
        await quick.aclose()
        await wait_until(lambda: source.sinks == [])


async def test_more_spans_than_anyone_could_look_at_are_counted_not_kept() -> None:
    source = Source()
    feed = Feed(source, dict, FeedSettings(interval_s=0.001, max_waiting_bytes=2**30))
    async with feed.running():
        watching = feed.watch()
        await anext(watching)
        await wait_until(lambda: source.sinks != [])
        source.sinks[0]([span(number) for number in range(1, 5001)])
        frame = b""
        while b"event: spans" not in frame:
            frame = await anext(watching)
        assert b'"num_dropped":4500' in frame
        assert f'"id":"{5000:x}"'.encode() in frame
        await watching.aclose()


async def test_watchers_are_bounded_and_the_next_one_is_told_so() -> None:
    feed = Feed(Source(), dict, FeedSettings(max_watchers=2))
    async with feed.running():
        watchers = [feed.watch(), feed.watch()]
        for watcher in watchers:
            await anext(watcher)
        with pytest.raises(CapacityError, match="2 pages watch, which is the limit; close one"):
            await anext(feed.watch())
        await watchers[0].aclose()
        another = feed.watch()
        await anext(another)
        await another.aclose()
        await watchers[1].aclose()


async def test_a_flood_of_watchers_leaves_the_service_as_it_was(service: Cluster, web: httpx2.AsyncClient) -> None:
    expected = await plain(service)
    async with AsyncExitStack() as flood:
        watching = []
        for _ in range(60):
            opened = await flood.enter_async_context(client(service.app.http_address))
            watching.append(await flood.enter_async_context(events(opened)))
        statuses = [each.status for each in watching]
        assert statuses.count(200) == 32
        assert statuses.count(429) == 28
        assert await watching[-1].refusal() == "32 pages watch, which is the limit; close one"
        assert await plain(service) == expected
        assert (await web.get("/healthz")).status_code == 200
    await wait_until(lambda: not service.coordinator.tracing.is_watched)


async def test_readers_that_are_refused_hold_no_place_of_the_page(service: Cluster, web: httpx2.AsyncClient) -> None:
    host, _, port = service.app.http_address.rpartition(":")
    async with AsyncExitStack() as flood:
        for _ in range(32):
            opened = await flood.enter_async_context(client(service.app.http_address))
            assert (await flood.enter_async_context(events(opened))).status == 200
        for _ in range(200):  # more than there are connections; none hangs up
            reader, writer = await asyncio.open_connection(host, int(port))
            flood.callback(writer.close)
            writer.write(b"GET /ui/api/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 30)  # ends only with the connection
            assert answer.startswith(b"HTTP/1.1 429 ")
            assert b"connection: close" in answer.lower()
            assert b"32 pages watch, which is the limit; close one" in answer
        page = await web.get("/ui")
        assert page.status_code == 200
        assert (await web.get(page.text.partition('href="')[2].partition('"')[0])).status_code == 200
    await wait_until(lambda: not service.coordinator.tracing.is_watched)


async def test_connections_are_bounded_and_grpc_goes_on(service: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "max_connections", 20)
    host, _, port = service.app.http_address.rpartition(":")
    async with AsyncExitStack() as flood:
        readers = []
        for _ in range(60):
            reader, writer = await asyncio.open_connection(host, int(port))
            flood.callback(writer.close)
            readers.append(reader)
        ended = await asyncio.gather(*(is_ended(reader) for reader in readers[20:]))
        assert all(ended)
        assert len(await plain(service)) > 0


async def is_ended(reader: asyncio.StreamReader) -> bool:
    with suppress(ConnectionResetError):
        return await reader.read() == b""
    return True


async def test_who_connects_and_asks_nothing_is_sent_away(
    service: Cluster, web: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "max_request_s", 0.1)
    host, _, port = service.app.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /ui HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
    assert await is_ended(reader)
    writer.close()
    async with events(web) as watching:  # a request that is answered slowly is another matter
        await watching.next("state")
        await watching.next("state")


async def test_a_reader_that_takes_nothing_is_cut_off(service: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "max_stall_s", 0.2)
    lost: set[Any] = set()
    connection_lost = BoundedProtocol.connection_lost

    def note(self: BoundedProtocol, error: Exception | None) -> None:
        lost.add(self.client)
        connection_lost(self, error)

    monkeypatch.setattr(BoundedProtocol, "connection_lost", note)
    version = await version_of(service)
    host, _, port = service.app.http_address.rpartition(":")
    with socket.socket() as stalled:
        stalled.setblocking(False)
        await asyncio.get_running_loop().sock_connect(stalled, (host, int(port)))
        request = f"GET /ui/assets/{version}/style.css HTTP/1.1\r\nhost: localhost\r\n\r\n"
        await asyncio.get_running_loop().sock_sendall(stalled, request.encode() * 1200)  # 14 MB of answers
        await wait_until(lambda: stalled.getsockname() in lost)


async def version_of(service: Cluster) -> str:
    async with client(service.app.http_address) as web:
        return (await web.get("/ui")).text.partition("/ui/assets/")[2].partition("/")[0]
