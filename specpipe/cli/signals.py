"""What SIGINT and SIGTERM do to a command.

Owns: both handlers while a command's event loop runs. A signal cancels the command, whose `finally` blocks end what it
started; a command that wants to finish in order defers the first one, and a second cancels it all the same.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from specpipe.exit_codes import EXIT_INTERRUPTED


class Signals:
    """Made by `run_with_signals`."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.received: signal.Signals | None = None
        self._task = task
        self._deferred: asyncio.Event | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)

    def defer(self) -> asyncio.Event:
        """From now on the first signal sets this event and cancels nothing."""
        self._deferred = asyncio.Event()
        return self._deferred

    def _receive(self, number: signal.Signals) -> None:
        is_first = self.received is None
        self.received = self.received or number
        if is_first and self._deferred is not None:
            self._deferred.set()
        else:
            self._task.cancel()


def run_with_signals(main: Callable[[Signals], Awaitable[int]], *, terminated: int) -> int:
    """Run a command's coroutine. Returns its exit code: 130 if Ctrl-C cancelled it, `terminated` if SIGTERM did."""

    async def guarded() -> int:
        task = asyncio.current_task()
        assert task is not None
        signals = Signals(task)
        try:
            return await main(signals)
        except asyncio.CancelledError:
            if signals.received is None:
                raise
            return EXIT_INTERRUPTED if signals.received is signal.SIGINT else terminated

    return asyncio.run(guarded())
