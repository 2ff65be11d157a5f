"""A keeper whose process may be one rank of several: it can be told to end while it begins, and finds a free port.

Must not know: Ray, the other ranks.
"""

from __future__ import annotations

import asyncio
import socket

from specpipe.cluster.keeper import Keeper, Started
from specpipe.errors import WorkerUnavailableError
from specpipe.launcher.plan import ProcessSpec


class RankKeeper(Keeper):
    """See `Keeper`."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self._beginning: asyncio.Future[Started] | None = None

    async def start(self, spec: ProcessSpec, port: int | None = None) -> Started:
        """See `Keeper.start`. Raises WorkerUnavailableError, too, if it is told to end before it serves."""
        self._beginning = asyncio.ensure_future(super().start(spec, port))
        try:
            return await self._beginning
        except asyncio.CancelledError:
            raise WorkerUnavailableError("it was told to end before it served") from None

    async def stop(self, grace_s: float) -> None:
        """See `Keeper.stop`. A process that has not served yet is killed."""
        beginning = self._beginning
        if beginning is not None and not beginning.done():
            beginning.cancel()
            await asyncio.wait([beginning])
        await super().stop(grace_s)

    def is_running(self) -> bool:
        return self._child is not None

    def free_address(self) -> str:
        """HOST:PORT of this node at which nothing listens now."""
        with socket.socket() as probe:
            probe.bind((self._host, 0))
            return f"{self._host}:{probe.getsockname()[1]}"
