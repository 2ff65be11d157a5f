"""What happens, told to whoever watches.

Owns: the watchers and their bounded buffers, and when requests are watched. Must not know: HTTP, what spans mean.

Nothing is traced for the page, and nothing runs here, while nobody watches. Each event is made once for all watchers.
One that does not keep up is dropped (its browser connects again): no answer ever waits for a watcher.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from coordinator.web.answers import frame
from coordinator.web.messages import span_json
from specpipe.errors import CapacityError, WorkerUnavailableError
from specpipe.spans import Span

MAX_PENDING_SPANS: Final = 500  # between two events (13 us each to tell); the oldest give way
SpanSink = Callable[[Sequence[Span]], None]


class SpanSource(Protocol):
    def subscribe(self, sink: SpanSink) -> Callable[[], None]:
        """`sink` gets spans as they end, on the event loop, until what is returned is called."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSettings:
    interval_s: float = 0.1  # between events with spans
    state_every: int = 10  # intervals between events with the state
    max_watchers: int = 32
    max_waiting_bytes: int = 1024 * 1024  # of one watcher


class Feed:
    """`async with feed.running():`, then `watch` for each reader."""

    def __init__(
        self, spans: SpanSource, state: Callable[[], dict[str, Any]], settings: FeedSettings | None = None
    ) -> None:
        self._spans = spans
        self._state = state
        self._settings = settings or FeedSettings()
        self._watchers: set[_Watcher] = set()
        self._pending: deque[Span] = deque(maxlen=MAX_PENDING_SPANS)
        self._num_received = 0
        self._is_watched = asyncio.Event()
        self._is_over = False

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """On leaving, all watchers end."""
        telling = asyncio.create_task(self._keep_telling(), name="feed")
        try:
            yield
        finally:
            self._is_over = True
            telling.cancel()
            await asyncio.wait([telling])
            for watcher in self._watchers:
                watcher.end()

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Frames: the state at once and every second, spans as they come. Ends when the watcher is too slow.

        Raises CapacityError or WorkerUnavailableError before the first frame.
        """
        if self._is_over:
            raise WorkerUnavailableError("the service is stopping")
        if len(self._watchers) >= self._settings.max_watchers:
            raise CapacityError(f"{len(self._watchers)} pages watch, which is the limit; close one")
        watcher = _Watcher(self._settings.max_waiting_bytes)
        self._watchers.add(watcher)
        self._is_watched.set()
        watcher.put(self._state_frame())
        try:
            while (data := await watcher.take()) is not None:
                yield data
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._is_watched.clear()

    async def _keep_telling(self) -> None:
        while True:
            await self._is_watched.wait()
            unsubscribe = self._spans.subscribe(self._receive)
            try:
                await self._tell_while_watched()
            finally:
                unsubscribe()
                self._pending.clear()
                self._num_received = 0

    async def _tell_while_watched(self) -> None:
        num_told = 0
        while self._is_watched.is_set():
            await asyncio.sleep(self._settings.interval_s)
            num_told += 1
            if self._pending:
                self._tell(self._spans_frame())
            if num_told % self._settings.state_every == 0:
                self._tell(self._state_frame())

    def _receive(self, spans: Sequence[Span]) -> None:
        self._num_received += len(spans)
        self._pending.extend(spans)

    def _tell(self, data: bytes) -> None:
        for watcher in tuple(self._watchers):
            watcher.put(data)

    def _spans_frame(self) -> bytes:
        spans = [span_json(span) for span in self._pending]
        num_dropped = self._num_received - len(spans)
        self._pending.clear()
        self._num_received = 0
        return frame("spans", {"now": _now_ms(), "spans": spans, "num_dropped": num_dropped})

    def _state_frame(self) -> bytes:
        return frame("state", {"now": _now_ms(), **self._state()})


class _Watcher:
    """The frames that wait for one reader."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_over = False
        self._wake = asyncio.Event()

    def put(self, data: bytes) -> None:
        """A reader with too much to catch up with is better off with a new connection."""
        self._waiting.append(data)
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            self._waiting.clear()
            self._is_over = True
        self._wake.set()

    def end(self) -> None:
        self._is_over = True
        self._wake.set()

    async def take(self) -> bytes | None:
        """All that waits, at once; None: it is over."""
        while not self._waiting:
            if self._is_over:
                return None
            self._wake.clear()
            await self._wake.wait()
        data = b"".join(self._waiting)
        self._waiting.clear()
        self._num_bytes = 0
        return data


def _now_ms() -> float:
    return time.time_ns() / 1e6
