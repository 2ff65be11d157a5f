"""The page's server, inside the coordinator's event loop.

Owns: its port, its start and end. Must not know: routes. It handles no signals: the process does (`specpipe.process`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from coordinator.web.connection import BoundedProtocol
from specpipe.errors import ConfigError
from specpipe.ports import check_port, join_address

STOP_GRACE_S: Final = 1  # for last events to reach readers, after every stream has ended
BACKLOG: Final = 64


class PageServer:
    """Takes the port at once."""

    def __init__(self, app: ASGIApp, host: str, port: int, *, is_preferred: bool = False) -> None:
        """Raises ConfigError if the port cannot be had; but if it is only preferred, takes a free one then."""
        self._socket = _take(host, port, is_preferred=is_preferred)
        self.address = join_address(host, self._socket.getsockname()[1])
        """HOST:PORT, with the port that was taken."""
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=STOP_GRACE_S,
        )
        self._server = _QuietServer(config)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serves while inside. Streams must have been told to end before it is left."""
        serving = asyncio.create_task(self._server.serve([self._socket]), name="page")
        try:
            yield
        finally:
            self._server.should_exit = True
            await serving

    def close(self) -> None:
        """For a server that never ran."""
        self._socket.close()


class _QuietServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's business."""
        yield


def _take(host: str, port: int, *, is_preferred: bool) -> socket.socket:
    try:
        check_port(host, port)
        return _listen(host, port)
    except (ConfigError, OSError) as error:
        if is_preferred:
            return _take(host, 0, is_preferred=False)
        raise error if isinstance(error, ConfigError) else ConfigError(f"port {port} cannot be had: {error}") from error


def _listen(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    with contextlib.ExitStack() as undo:
        undo.callback(listener.close)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        undo.pop_all()
    return listener
