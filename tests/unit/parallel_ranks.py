"""All ranks of a group in one process: rank 0's real handle, the other ranks' real work on threads."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from specpipe.config import EngineConfig
from specpipe.engine.parallel.channel import Channel, Kind
from specpipe.engine.parallel.group import RankGroup
from specpipe.engine.parallel.mesh import create_mesh
from specpipe.engine.parallel.model import ParallelModel
from specpipe.engine.parallel.rank import Mailbox, RankHello, run
from specpipe.engine.parallel.shared_memory import SharedMemory, open_end
from specpipe.errors import SpecpipeError
from specpipe.ports import LOOPBACK


class RankThread:
    """A rank that is not a process."""

    def __init__(self, end: socket.socket) -> None:
        self.channel = Channel(end)
        self.mailbox = Mailbox(self.channel, lambda _ending: None)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            hello = RankHello.from_bytes(self.mailbox.next(Kind.HELLO).payload)
            run(self.mailbox, hello, EngineConfig(**hello.engine))
        except SpecpipeError as error:
            self._say(str(error))
        self.channel.close()

    def _say(self, reason: str) -> None:
        with contextlib.suppress(SpecpipeError):
            self.channel.send(Kind.FAILED, 0, reason.encode())


class ThreadRanks:
    """See `OtherRanks`."""

    has_one_host = True

    def __init__(self, engine: EngineConfig, size: int, *, is_shared: bool = True) -> None:
        self.threads: list[RankThread] = []
        self._engine = engine
        self._size = size
        self._mesh = create_mesh(size) if is_shared else []

    def bring(self, group: RankGroup) -> None:
        for rank in range(1, self._size):
            ours, theirs = socket.socketpair()
            self.threads.append(RankThread(theirs))
            end = self._mesh[rank] if self._mesh else None
            own = {"memory_fd": end.memory_fd, "peer_fds": end.peer_fds} if end else {}
            group.add(rank, Channel(ours), RankHello.create(rank, self._size, self._engine, **own))

    def open_shared(self) -> SharedMemory | None:
        return open_end(self._mesh[0], 0) if self._mesh else None

    def hosts(self, channels: Sequence[Channel]) -> tuple[str, ...]:
        return (LOOPBACK,) * self._size

    def close(self) -> None:
        """They end with the group."""


@contextmanager
def parallel_model(
    folder: Path, size: int, *, num_slots: int = 400, is_shared: bool = True, dtype: str = "auto"
) -> Iterator[ParallelModel]:
    """The model of `folder` over `size` ranks."""
    engine = EngineConfig(model=str(folder), num_slots=num_slots, dtype=dtype)
    ranks = ThreadRanks(engine, size, is_shared=is_shared)
    with RankGroup(engine, size, ranks) as group:
        group.start()
        yield group.load()
    for rank in ranks.threads:
        rank.thread.join()
