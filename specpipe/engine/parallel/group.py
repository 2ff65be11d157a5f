"""Rank 0's handle on the other ranks: starts their processes, loads together with them, notices when one is lost.

Owns: those processes and the watchdog. Must not know: sessions, what happens to the service when the group is lost.

A group that has lost a rank is lost: all ranks are killed, and whoever supervises this process starts a new group.
The watchdog is a thread of its own: it sees a dead rank at once (its socket closes) and a frozen one by its silence,
whether the model thread is idle or inside a collective.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from specpipe.config import EngineConfig
from specpipe.engine.parallel.channel import Channel, Frame, Kind
from specpipe.engine.parallel.mesh import MeshEnd, create_mesh
from specpipe.engine.parallel.rank import RankHello
from specpipe.errors import SpecpipeError, WorkerUnavailableError
from specpipe.process import cores_before_pinning

if TYPE_CHECKING:
    from specpipe.engine.parallel.model import ParallelModel
    from specpipe.engine.parallel.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 1.0
MAX_UNANSWERED_PINGS = 4
"""A rank that takes steps and lets more go by is frozen. Below the 8 s limit of a collective. Pings are counted, not
seconds: a pause of our own process is nobody's fault."""
LOAD_TIMEOUT_S = 600.0

OnFailure = Callable[[SpecpipeError], None]  # thread-safe, returns at once


@dataclass(slots=True, kw_only=True)
class Member:
    """One of the other ranks, as rank 0 sees it."""

    rank: int
    channel: Channel
    process: subprocess.Popen[bytes] | None  # None: lives in this process (in tests)
    num_unanswered: int = 0  # pings since it was last heard
    said: set[Kind] = field(default_factory=set)


class RankGroup:
    """All ranks of one target worker. Used as a context: after it no process of it runs.

    `start` belongs to the main thread (ranks die with the thread that starts them), `load` to the model thread.
    """

    def __init__(self, engine: EngineConfig, size: int, cores: Sequence[int] = ()) -> None:
        """`cores`: of the ranks after the first, as far as there are any."""
        self.size = size
        self._engine = engine
        self._cores = cores
        self._members: list[Member] = []
        self._mesh: list[MeshEnd] = []
        self._shared: SharedMemory | None = None
        self._changed = threading.Condition()
        self._failure: SpecpipeError | None = None
        self._is_closing = False
        self._on_failure: OnFailure = lambda _: None
        self._watchdog = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [member.process.pid for member in self._members if member.process is not None]

    def start(self) -> None:
        """Start the processes of the other ranks; they load at once."""
        self.connect()
        for rank in range(1, self.size):
            ours, theirs = socket.socketpair()
            with theirs:
                self.add(rank, ours, _spawn(theirs.fileno(), self._mesh[rank].fds if self._mesh else []))
            if self._mesh:
                self._mesh[rank].close()

    def connect(self) -> None:
        """Before ranks are added: on a CPU they get memory to share, where the system has it."""
        if self._engine.device == "cpu" and hasattr(os, "memfd_create"):
            self._mesh = create_mesh(self.size)

    def add(self, rank: int, end: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        """A rank whose end of the control socket is the other one of `end`."""
        member = Member(rank=rank, channel=Channel(end), process=process)
        self._members.append(member)
        core = self._cores[rank - 1] if rank - 1 < len(self._cores) else None
        hello = RankHello(
            rank=rank,
            size=self.size,
            engine=asdict(replace(self._engine, core=core)),
            log_level=logging.getLevelName(logging.getLogger().level).lower(),
            memory_fd=self._mesh[rank].memory_fd if self._mesh else -1,
            peer_fds=self._mesh[rank].peer_fds if self._mesh else [],
            cores=sorted(cores_before_pinning()),
        )
        member.channel.send(Kind.HELLO, 0, hello.to_bytes())

    def watch(self, on_failure: OnFailure) -> None:
        """From now on a lost rank is told to `on_failure`, before the others are killed. Called before `load`."""
        self._on_failure = on_failure
        self._watchdog.start()

    def load(self) -> ParallelModel:
        """Load rank 0's shard and prepare together with the others. Watches them, if nobody asked for that before.

        Raises what one rank could not do, or WorkerUnavailableError if one is lost.
        """
        import torch

        from specpipe.engine.parallel.collective import Collective, create_store
        from specpipe.engine.parallel.load import create_rank_runner, load_rank, rank_device
        from specpipe.engine.parallel.model import ParallelModel
        from specpipe.engine.parallel.shared_memory import open_end

        if self._watchdog.ident is None:  # it is what hears the ranks
            self._watchdog.start()
        torch.set_num_threads(self._engine.num_threads)
        loaded = load_rank(self._engine, 0, self.size)
        self._wait_for(Kind.LOADED)
        self._shared = open_end(self._mesh.pop(0), 0) if self._mesh else None
        store = None if self._shared else create_store(None)
        self.send(Kind.MEET, store.port if store else 0)
        collective = Collective(store, 0, self.size, rank_device(self._engine, 0), self._shared)
        runner = create_rank_runner(loaded, self._engine, collective)
        self._wait_for(Kind.READY)
        return ParallelModel(runner, self, self._shared)

    def send(self, kind: Kind, number: int = 0, payload: bytes = b"") -> None:
        """Tell all other ranks. Raises WorkerUnavailableError if one is gone."""
        for member in self._members:
            member.channel.send(kind, number, payload)

    def close(self) -> None:
        """Kill all other ranks: they hold nothing that is worth a farewell. Idempotent."""
        with self._changed:
            self._is_closing = True
        self._kill()
        if self._watchdog.is_alive():
            self._watchdog.join()
        for member in self._members:
            member.channel.close()
        if self._shared is not None:
            self._shared.close()

    def _kill(self) -> None:
        for member in self._members:
            if member.process is not None:
                member.process.kill()
                member.process.wait()

    # The watchdog.

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for member in self._members:
                selector.register(member.channel, selectors.EVENT_READ, member)
            next_ping = time.monotonic()
            while not self._is_closing and self._failure is None:
                if time.monotonic() >= next_ping:
                    next_ping = time.monotonic() + PING_INTERVAL_S
                    self._ping()
                for key, _ in selector.select(max(0.0, next_ping - time.monotonic())):
                    self._hear(key.data)

    def _ping(self) -> None:
        for member in self._members:
            if Kind.READY in member.said and member.num_unanswered > MAX_UNANSWERED_PINGS:
                seconds = member.num_unanswered * PING_INTERVAL_S
                self._lose(WorkerUnavailableError(f"rank {member.rank} has been silent for {seconds:.0f} s"))
            member.num_unanswered += 1
            member.channel.ping(Kind.PING)

    def _hear(self, member: Member) -> None:
        try:
            frame = member.channel.receive(0.0)
        except TimeoutError:
            return
        member.num_unanswered = 0
        if frame is None:
            self._lose(WorkerUnavailableError(f"rank {member.rank} ended{_exit_of(member)}"))
        elif frame.kind is Kind.FAILED:
            self._lose(_failure_of(member, frame))
        else:
            with self._changed:
                member.said.add(frame.kind)
                self._changed.notify_all()

    def _lose(self, error: SpecpipeError) -> None:
        with self._changed:
            if self._is_closing or self._failure is not None:
                return
            self._failure = error
            self._changed.notify_all()
        logger.error("%s: the rank group ends", error)
        self._on_failure(error)
        self._kill()

    def _wait_for(self, kind: Kind) -> None:
        """Until all other ranks have said so. Raises the group's failure."""

        def is_over() -> bool:
            return self._failure is not None or all(kind in member.said for member in self._members)

        with self._changed:
            if not self._changed.wait_for(is_over, LOAD_TIMEOUT_S):
                raise WorkerUnavailableError(f"not all ranks were {kind.name.lower()} after {LOAD_TIMEOUT_S:.0f} s")
            if self._failure is not None:
                raise self._failure


def _spawn(fd: int, mesh_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """-P: a folder of the user's working directory must not shadow ours."""
    import specpipe

    root = str(Path(specpipe.__file__).resolve().parents[1])
    path = os.environ.get("PYTHONPATH")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "specpipe.engine.parallel.rank", "--role", "target-rank", str(fd)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(fd, *mesh_fds),
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root},
    )


def _exit_of(member: Member) -> str:
    """How its process ended, if that is known by now."""
    code = member.process.poll() if member.process is not None else None
    return "" if code is None else f" with code {code}"


def _failure_of(member: Member, frame: Frame) -> SpecpipeError:
    return WorkerUnavailableError(f"rank {member.rank}: {frame.payload.decode(errors='replace')}")
