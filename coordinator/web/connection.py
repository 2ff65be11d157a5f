"""One HTTP connection, with limits that keep it from harming the rest of the process.

Owns: how many connections there are, and how long one may take nothing or ask nothing. Must not know: routes.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS: Final = 128  # each holds a file descriptor; gRPC needs some too
MAX_STALL_S: Final = 10.0  # a reader takes nothing although it could
MAX_REQUEST_S: Final = 15.0  # until the head of a request is there


class BoundedProtocol(H11Protocol):
    """Ends connections that are too many, too slow to ask, or too slow to read."""

    max_connections = MAX_CONNECTIONS
    max_stall_s = MAX_STALL_S
    max_request_s = MAX_REQUEST_S

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stalled: asyncio.TimerHandle | None = None
        self._silent: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self._silent)
        _stop(self._stalled)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            _stop(self._silent)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering:
            self._expect_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.max_stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        _stop(self._stalled)
        super().resume_writing()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_request(self) -> None:
        _stop(self._silent)
        self._silent = self.loop.call_later(self.max_request_s, self.transport.abort)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
