"""Pages of metrics as they are fetched: what cannot be read is said, and never raises. specpipe.cluster.load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from specpipe.cluster import load
from specpipe.cluster.load import QUEUED, Page, fetch_pages

PAGE = f"{QUEUED} 3.0\n".encode()


def answer(body: bytes, *, status: str = "200 OK", length: int | None = None) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


@asynccontextmanager
async def answering(said: bytes, may_end: asyncio.Event | None = None) -> AsyncIterator[str]:
    """HOST:PORT of what says this to any request, and closes when it may."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        await writer.drain()
        if may_end is not None:
            await may_end.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def fetched(address: str) -> Page | str:
    return (await fetch_pages([address]))[address]


async def test_a_page_is_fetched() -> None:
    async with answering(answer(PAGE)) as address:
        page = await fetched(address)
    assert isinstance(page, Page)
    assert page.num_queued == 3


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"", "without response"),
        (b"what do you want?\r\n", "what do you want?"),  # http.client.BadStatusLine
        (answer(PAGE, length=1000), "IncompleteRead"),
        (answer(b"", status="503 Busy"), "503"),
        (answer(b"{what is this"), ""),
        (answer(b"\xff\xfe"), "decode"),
        (answer(b"up 1\n"), "no metric there is specpipe's"),
        (answer(PAGE * 100), "more than"),
    ],
)
async def test_what_cannot_be_read_is_said(said: bytes, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MAX_PAGE_BYTES", 1000)
    async with answering(said) as address, answering(answer(PAGE)) as other:
        pages = await fetch_pages([address, other])
    told = pages[address]
    assert isinstance(told, str)
    assert told
    assert reason in told
    assert isinstance(pages[other], Page)


async def test_nobody_there_is_said() -> None:
    async with answering(b"") as address:
        pass
    assert "refused" in str(await fetched(address))


async def test_a_page_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "PAGE_TIMEOUT_S", 0.05)
    may_end = asyncio.Event()
    async with answering(answer(PAGE, length=1000), may_end) as address:
        assert await fetched(address) == "TimeoutError"
        may_end.set()


async def test_no_proxy_is_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering(answer(b"", status="502 I am the proxy")) as proxy, answering(answer(PAGE)) as address:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://{proxy}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        assert isinstance(await fetched(address), Page)
