"""A target worker whose ranks are processes of several nodes: they begin together and end together.

Owns: the order of that, the rendezvous and the token of each start. Must not know: Ray, when to start again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

from specpipe.cluster.keeper import Ended, Started
from specpipe.cluster.plan import rank_process
from specpipe.launcher.plan import ProcessSpec

TOKEN_BYTES: Final = 32
LOSS_PATIENCE_S: Final = 12.0
"""A rank 0 that has lost a rank says so, and ends, within ten seconds."""


class NodeKeeper(Protocol):
    """A `RankKeeper`, wherever it is."""

    async def start(self, spec: ProcessSpec, port: int | None = None) -> Started: ...

    async def wait(self) -> Ended: ...

    async def stop(self, grace_s: float) -> None: ...

    async def is_running(self) -> bool: ...

    async def free_address(self) -> str: ...


class RankProcesses:
    """All calls raise what the keepers raise."""

    def __init__(self, keepers: Sequence[NodeKeeper], process: ProcessSpec) -> None:
        """`keepers`: one a rank. `process`: of any rank, but for what tells them from one another."""
        self._keepers = keepers
        self._process = process

    async def start(self, port: int | None = None) -> Started:
        """Start all ranks unless they run. Returns once rank 0 serves; raises what the first to fail has said, and then
        none runs."""
        if not all(await asyncio.gather(*(keeper.is_running() for keeper in self._keepers))):
            await self._stop_all()
        rendezvous, token = await self._keepers[0].free_address(), secrets.token_hex(TOKEN_BYTES)
        starts = [
            asyncio.ensure_future(
                keeper.start(rank_process(self._process, rank, rendezvous, token), port if rank == 0 else None)
            )
            for rank, keeper in enumerate(self._keepers)
        ]
        try:
            first, *others = await asyncio.gather(*starts)
        except BaseException:
            await self._stop_all()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        return replace(first, companions=tuple(other.pid for other in others))

    async def wait(self) -> Ended:
        """Returns when all ranks have ended, since one of them has. The reason is what rank 0 says and what the others
        have said by then."""
        waits = [asyncio.ensure_future(keeper.wait()) for keeper in self._keepers]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(waits[:1], timeout=LOSS_PATIENCE_S)
            told = [(rank, wait.result()) for rank, wait in enumerate(waits) if wait.done()]
            await self._stop_all()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        reasons = [ended.reason if rank == 0 else f"rank {rank}: {ended.reason}" for rank, ended in told]
        is_in_order = any(ended.is_in_order for _, ended in told)
        return Ended(reason="; ".join(reasons), lines=told[0][1].lines, is_in_order=is_in_order)

    async def stop(self, grace_s: float) -> None:
        """Rank 0 lets its sessions finish, and the others end with it."""
        await self._keepers[0].stop(grace_s)
        await asyncio.gather(*(keeper.stop(0.0) for keeper in self._keepers[1:]))

    async def _stop_all(self) -> None:
        """One that cannot be told is lost, which other calls say."""
        await asyncio.gather(*(keeper.stop(0.0) for keeper in self._keepers), return_exceptions=True)
