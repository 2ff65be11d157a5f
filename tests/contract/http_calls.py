"""Asking the live page's server: JSON in, events out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2


def client(address: str) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=f"http://{address}", timeout=30, trust_env=False)


class Events:
    """Server-sent events as they come."""

    def __init__(self, response: httpx2.Response) -> None:
        self._response = response
        self._lines = response.aiter_lines()
        self.status = response.status_code

    async def next(self, *names: str) -> Any:
        """What the next event says; with `names` the next one of these. Raises EOFError if the stream ends before."""
        async for name, data in self:
            if not names or name in names:
                return data
        raise EOFError(f"the stream ended and no {' or '.join(names)} came")

    async def __aiter__(self) -> AsyncIterator[tuple[str, Any]]:
        name = ""
        async for line in self._lines:
            kind, _, value = line.partition(": ")
            if kind == "event":
                name = value
            elif kind == "data":
                yield name, json.loads(value)

    async def refusal(self) -> str:
        """The sentence of an answer that is no stream."""
        await self._response.aread()
        return message_of(self._response)


def message_of(response: httpx2.Response) -> str:
    assert response.headers["content-type"] == "application/json"
    return str(response.json()["error"]["message"])


@asynccontextmanager
async def events(web: httpx2.AsyncClient) -> AsyncIterator[Events]:
    """Watch until the block ends."""
    async with web.stream("GET", "/ui/api/events") as response:
        yield Events(response)


@asynccontextmanager
async def asking(
    web: httpx2.AsyncClient, headers: dict[str, str] | None = None, **question: Any
) -> AsyncIterator[Events]:
    """Ask, and leave when the block ends."""
    async with web.stream("POST", "/ui/api/generate", json=question, headers=headers) as response:
        yield Events(response)
