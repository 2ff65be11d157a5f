"""One process of the fleet, kept alive as a supervisor would: whatever ends it, it starts again at the same address.

Owns: start, ready line, restart after a pause, signals, what is known of its state. Must not know: faults, requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from running import READY_TIMEOUT_S, environment

RESTART_PAUSE_S = 0.5
LAST_LINES = 12  # of a log, shown with a failure


class Member:
    """Made by its fleet. `start` returns once it serves; from then on it is kept alive until `end`."""

    def __init__(
        self, name: str, role: str, arguments: Sequence[str], *, folder: Path, prefix: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.role = role
        self.address = ""  # the same after each restart
        self.metrics = ""
        self.num_starts = 0
        self.is_ready = False  # it serves, as far as it has said and has not ended or been told to end
        self.is_frozen = False
        self.changed_s = time.monotonic()  # when one of the two changed last
        self.exit_codes: list[int] = []
        self._arguments = tuple(arguments)
        self._prefix = tuple(prefix)
        self._log = folder / f"{name}.log"
        self._outages: list[tuple[float, float]] = []
        self._out_since_s = self.changed_s
        self._ranks: list[int] = []
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Nothing that we have done keeps it from working."""
        return self.is_ready and not self.is_frozen

    @property
    def outages(self) -> list[tuple[float, float]]:
        """From when to when it was not usable; to infinity if it is not now."""
        return [*self._outages, *([] if self.is_usable else [(self._out_since_s, math.inf)])]

    @property
    def processes(self) -> list[psutil.Process]:
        """Itself and its ranks, as far as they live."""
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.pid)
            return [own, *own.children(recursive=True)]
        return []

    def rank_pid(self) -> int | None:
        """Of its second rank; None if there is none now."""
        return next((pid for pid in self._ranks if psutil.pid_exists(pid)), None)

    async def start(self, parent_fd: int) -> None:
        """Raises AssertionError with the end of its log if it is not ready in time."""
        await self._launch(parent_fd)
        self._supervisor = asyncio.create_task(self._keep_alive(parent_fd), name=f"keep {self.name}")

    async def end(self) -> None:
        """SIGTERM, then SIGKILL if that does not help soon."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        process = self._process
        if process is None or process.returncode is not None:
            return
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 20)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await process.wait()

    def signal(self, number: signal.Signals) -> None:
        """To the process itself. One that has ended in between hears nothing."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def note(self, *, is_ready: bool | None = None, is_frozen: bool | None = None) -> None:
        was_usable = self.is_usable
        self.is_ready = self.is_ready if is_ready is None else is_ready
        self.is_frozen = self.is_frozen if is_frozen is None else is_frozen
        self.changed_s = time.monotonic()
        if was_usable and not self.is_usable:
            self._out_since_s = self.changed_s
        elif self.is_usable and not was_usable:
            self._outages.append((self._out_since_s, self.changed_s))

    def log_text(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def last_lines(self) -> str:
        return "\n".join([f"--- {self.name}", *self.log_text().splitlines()[-LAST_LINES:]])

    async def _keep_alive(self, parent_fd: int) -> None:
        while True:
            assert self._process is not None
            self.exit_codes.append(await self._process.wait())
            self.note(is_ready=False, is_frozen=False)
            await asyncio.sleep(RESTART_PAUSE_S)
            with contextlib.suppress(AssertionError):  # it did not start: its log says why, and it is tried again
                await self._launch(parent_fd)

    async def _launch(self, parent_fd: int) -> None:
        ready, ready_child = os.pipe()
        port = self.address.rpartition(":")[2]
        arguments = [*self._arguments, *(("--port", port) if port else ())]
        descriptors = ["--ready-fd", str(ready_child), "--parent-fd", str(parent_fd)]
        try:
            with self._log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._prefix,
                    *(sys.executable, "-P", "-m", "specpipe", self.role, *arguments, *descriptors),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=log,
                    pass_fds=(ready_child, parent_fd),
                    start_new_session=True,
                    env=environment(),
                )
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(ready_child)
        self._hear(await _read_line(ready))

    def _hear(self, line: str) -> None:
        """The ready line: see `specpipe.process.Lifecycle.announce`."""
        words = line.split()
        assert words, f"{self.name} is not ready\n{self.last_lines()}"
        self.address = words[0]
        self.metrics = next((word.removeprefix("metrics=") for word in words if word.startswith("metrics=")), "")
        self._ranks = [int(word) for word in words[1:] if word.isdecimal()]
        self.num_starts += 1
        self.note(is_ready=True, is_frozen=False)


async def _read_line(descriptor: int) -> str:
    """From a pipe, which is closed; "" at its end, or after too long a wait."""
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        return (await asyncio.wait_for(reader.readline(), READY_TIMEOUT_S)).decode().strip()
    except TimeoutError:
        return ""
    finally:
        transport.close()
