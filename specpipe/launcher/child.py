"""One process of a local service, from spawn to end.

Owns: the handshake (the child writes its address to a pipe once it serves), the tie of its life to ours, its stderr.
Must not know: what else runs.

A child sits in a session of its own, so that Ctrl-C in a terminal reaches us alone and we decide the order of ending.
It learns that we are gone by end-of-file on `parent_fd`, even after SIGKILL.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import specpipe
from specpipe.errors import ConfigError, SpecpipeError, WorkerUnavailableError
from specpipe.exit_codes import EXIT_INVALID
from specpipe.launcher.plan import ProcessSpec
from specpipe.process import HTTP_PREFIX, METRICS_PREFIX
from specpipe.telemetry.logs import FORWARDED

KILL_AFTER_S: Final = 5.0
ERROR_PREFIX: Final = "error: "  # how every specpipe command begins the sentence that says why it failed

logger = logging.getLogger(__name__)


class ChildProcess:
    """A running process. Made by `start`, which returns once the process serves."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process) -> None:
        self.spec = spec
        self.address = ""
        self.http = ""  # HOST:PORT where it serves pages; empty: nowhere
        self.metrics = ""  # HOST:PORT of its /metrics; empty: there are none
        self.companions: tuple[int, ...] = ()  # pids of the processes that it started itself
        self._process = process
        self._last_lines: collections.deque[str] = collections.deque(maxlen=50)
        self._stderr = asyncio.create_task(self._forward_stderr())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_lines(self) -> tuple[str, ...]:
        """Of its stderr."""
        return tuple(self._last_lines)

    @classmethod
    async def start(cls, spec: ProcessSpec, parent_fd: int, *, port: int | None = None) -> Self:
        """Spawn and wait until the process serves. `port` replaces the one in the spec (a restart keeps its address).

        Raises ConfigError if the process says that it was asked for something invalid, WorkerUnavailableError if it
        failed otherwise; the message is the process's own sentence. WorkerUnavailableError, too, if it does not serve
        in the time that the spec gives it. Cancelling kills the process.
        """
        ready, ready_child = os.pipe()
        try:
            process = await _spawn(spec, port, ready_child, parent_fd)
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(ready_child)
        child = cls(spec, process)
        try:
            words = (await asyncio.wait_for(_read_line(ready), spec.start_timeout_s)).split()
            if not words:
                raise await child._start_failure()
            child._hear(words)
        except TimeoutError:
            await child.kill()
            raise WorkerUnavailableError(f"{spec.role} was not ready after {spec.start_timeout_s:g} s") from None
        except BaseException:
            await child.kill()
            raise
        return child

    def _hear(self, words: Sequence[str]) -> None:
        """The ready line: see `specpipe.process.Lifecycle.announce`."""
        self.address = words[0]
        self.http = _place(words, HTTP_PREFIX)
        self.metrics = _place(words, METRICS_PREFIX)
        self.companions = tuple(int(word) for word in words[1:] if word.isdecimal())

    async def wait(self) -> int:
        """Returns the exit code (negative: the signal) once the process has ended and its stderr is forwarded."""
        await asyncio.shield(self._stderr)  # whoever stops waiting must not stop the forwarding
        return await self._process.wait()

    async def terminate(self, patience_s: float) -> int:
        """SIGTERM, and SIGKILL if that did not help in time. Returns the exit code."""
        self._signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(asyncio.shield(self._process.wait()), patience_s)
        except TimeoutError:
            logger.warning("%s (pid %d) did not end in %.0f s: killed", self.spec.role, self.pid, patience_s)
            return await self.kill()

    async def kill(self) -> int:
        self._signal(signal.SIGKILL)
        return await self.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:  # ended in between
                logger.debug("%s (pid %d) had already ended", self.spec.role, self.pid)

    async def _start_failure(self) -> SpecpipeError:
        code = await self.wait()
        reasons = [line.removeprefix(ERROR_PREFIX) for line in self._last_lines if line.startswith(ERROR_PREFIX)]
        if not reasons:
            for line in self._last_lines:
                logger.error("[%s] %s", self.spec.role, line)
        reason = reasons[-1] if reasons else f"{self.spec.role} ended with code {code} before it was ready"
        return ConfigError(reason) if code == EXIT_INVALID else WorkerUnavailableError(reason)

    async def _forward_stderr(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        while line_bytes := await _read_log_line(stderr):
            line = line_bytes.decode(errors="replace").rstrip()
            self._last_lines.append(line)
            if not line.startswith(ERROR_PREFIX):
                logger.info("[%s %d] %s", self.spec.role, self.pid, line, extra=FORWARDED)


def _place(words: Sequence[str], prefix: str) -> str:
    return next((word.removeprefix(prefix) for word in words if word.startswith(prefix)), "")


async def _spawn(spec: ProcessSpec, port: int | None, ready_fd: int, parent_fd: int) -> asyncio.subprocess.Process:
    arguments = [*spec.arguments, *(("--port", str(port)) if port is not None else ())]
    descriptors = ["--ready-fd", str(ready_fd), "--parent-fd", str(parent_fd)]
    return await asyncio.create_subprocess_exec(
        *_command(spec.role, arguments + descriptors),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=(ready_fd, parent_fd),
        start_new_session=True,
        env=_environment(spec),
    )


def _command(role: str, arguments: Sequence[str]) -> list[str]:
    # -P: a folder of the user's working directory must not shadow ours.
    return [sys.executable, "-P", "-m", "specpipe", role, *arguments]


def _environment(spec: ProcessSpec) -> dict[str, str]:
    """Ours, with specpipe importable from where we found it, and no thread pools that were not asked for."""
    root = str(Path(specpipe.__file__).resolve().parents[1])
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **dict(spec.environment),
    }


async def _read_line(descriptor: int) -> str:
    """One line from a pipe, without its end; "" at end-of-file. Closes the descriptor."""
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        return (await reader.readline()).decode().strip()
    finally:
        transport.close()


async def _read_log_line(reader: asyncio.StreamReader) -> bytes:
    """A line, or what there is of one that is longer than the reader's buffer."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await reader.readexactly(error.consumed)
