"""Tests wait for conditions, never for time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable


async def wait_until(condition: Callable[[], bool | Awaitable[bool]], *, timeout_s: float = 10.0) -> None:
    """Returns as soon as `condition` holds. Raises TimeoutError if it does not in time."""
    async with asyncio.timeout(timeout_s):
        while True:
            holds = condition()
            if await holds if inspect.isawaitable(holds) else holds:
                return
            await asyncio.sleep(0.02)
