"""One actor's work: it holds a bundle, and the first of a group starts, watches and ends the group's process there.

Owns: what only the node knows (address, folders, GPUs), the files that list workers to a coordinator, exit reasons, the
end of a process that hangs. Must not know: Ray, the other groups, when to start again.
A process ends with its keeper: see `specpipe.launcher.child`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specpipe import demo
from specpipe.cluster.health import Health, ProcessHealth
from specpipe.cluster.plan import DEMO_DRAFT, DEMO_TARGET, HOST, WORKERS
from specpipe.errors import WorkerUnavailableError
from specpipe.launcher.child import ERROR_PREFIX, KILL_AFTER_S, ChildProcess
from specpipe.launcher.plan import ProcessSpec
from specpipe.ports import EVERY_INTERFACE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A process that serves."""

    address: str  # HOST:PORT
    http: str = ""  # HOST:PORT of its pages; empty: none
    metrics: str = ""  # HOST:PORT of its /metrics; empty: none
    pid: int
    companions: tuple[int, ...] = ()  # pids of its ranks after the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A process that does not serve any more."""

    reason: str
    lines: tuple[str, ...] = ()  # the last of its stderr
    is_in_order: bool = False  # somebody told it to: its node is about to go (`leaving`)


class Keeper:
    """Holds a bundle on a node; at most one process at a time. All calls may be repeated."""

    def __init__(self, host: str) -> None:
        """`host`: at which the node is reached."""
        self._host = host
        self._child: ChildProcess | None = None
        self._health: ProcessHealth | None = None  # of the child
        self._hung: dict[ChildProcess, str] = {}  # why it was ended by us
        self._watch: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._parent_fd, self._life_fd = os.pipe()  # the child holds the first; the second closes when we are gone
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the lists of workers

    async def start(self, spec: ProcessSpec, port: int | None = None) -> Started:
        """Start the process unless it runs. Returns once it serves; raises as `ChildProcess.start`."""
        async with self._starting:
            if self._child is None:
                child = self._child = await ChildProcess.start(self._here(spec), self._parent_fd, port=port)
                self._health = ProcessHealth(child.address, child.spec)
                self._watch = asyncio.create_task(self._end_hung(child, self._health), name="health")
            return self._started(self._child)

    async def wait(self) -> Ended:
        """Returns when the process has ended. One that hangs is ended here."""
        child = self._child
        if child is None:
            return Ended(reason="it was not running")
        code = await child.wait()
        if self._child is child:
            self._child = None
            self._end_watch()
        reason = self._hung.get(child) or exit_reason(code, child.last_lines)
        return Ended(reason=reason, lines=child.last_lines, is_in_order=code == 0)

    async def health(self, known: Health) -> Health:
        """Of the process, as soon as it is not `known`. Raises WorkerUnavailableError if none runs, or when it ends."""
        if self._health is None:
            raise WorkerUnavailableError("no process runs")
        return await self._health.differs_from(known)

    async def stop(self, grace_s: float) -> None:
        """End the process in order, in `grace_s` seconds and a few at most."""
        self._end_watch()
        if self._child is not None:
            await self._child.terminate(grace_s + KILL_AFTER_S)
        if self._folder is not None:
            self._folder.cleanup()

    def lines(self) -> tuple[str, ...]:
        """The last that the running process has logged."""
        return self._child.last_lines if self._child else ()

    def list_workers(self, addresses: Mapping[str, Sequence[str]]) -> None:
        """Write the files that a coordinator reads: name of the file -> workers, HOST:PORT.

        Raises WorkerUnavailableError if they cannot be written.
        """
        try:
            folder = Path(self._lists())
            for name, listed in addresses.items():
                partial = folder / f".{name}"
                partial.write_text("".join(f"{address}\n" for address in listed))
                partial.replace(folder / name)  # a reader sees the whole file, old or new
        except OSError as error:
            raise WorkerUnavailableError(f"{error.filename}: {error.strerror}") from None

    async def _end_hung(self, child: ChildProcess, health: ProcessHealth) -> None:
        try:
            self._hung = {child: await health.hangs()}
            logger.warning("pid %d: %s: killed", child.pid, self._hung[child])
            await child.kill()
        except Exception:  # a fault of ours, which nobody else would hear of
            logger.exception("pid %d: nobody ends it any more if it hangs", child.pid)

    def _end_watch(self) -> None:
        if self._watch is not None and self._health is not None:
            self._watch.cancel()
            self._health.end()

    def _lists(self) -> str:
        """The folder of the lists of workers: coordinators alone have one."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="specpipe-", ignore_cleanup_errors=True)
        return self._folder.name

    def _here(self, spec: ProcessSpec) -> ProcessSpec:
        """With the words in braces replaced."""
        known = {HOST: self._host, DEMO_TARGET: str(demo.target_folder()), DEMO_DRAFT: str(demo.draft_folder())}
        if any(WORKERS in argument for argument in spec.arguments):
            known[WORKERS] = self._lists()
        return replace(spec, arguments=tuple(_replaced(argument, known) for argument in spec.arguments))

    def _started(self, child: ChildProcess) -> Started:
        return Started(
            address=self._reached(child.address),
            http=self._reached(child.http),
            metrics=self._reached(child.metrics),
            pid=child.pid,
            companions=child.companions,
        )

    def _reached(self, address: str) -> str:
        """Where others reach what listens on every interface."""
        host, _, port = address.rpartition(":")
        return f"{self._host}:{port}" if host in EVERY_INTERFACE else address


def exit_reason(code: int, lines: Sequence[str] = ()) -> str:
    """Why a process ended, as a clause for people: its own sentence where it said one."""
    said = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
    if said and code > 0:
        return said[-1]
    if code >= 0:
        return f"it ended with code {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _replaced(text: str, known: Mapping[str, str]) -> str:
    for word, value in known.items():
        text = text.replace(word, value)
    return text
