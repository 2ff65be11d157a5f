"""All ranks of a group in one process: rank 0's real handle, the other ranks' real work on threads."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specpipe.config import EngineConfig
from specpipe.engine.parallel.channel import Channel, Kind
from specpipe.engine.parallel.group import RankGroup
from specpipe.engine.parallel.model import ParallelModel
from specpipe.engine.parallel.rank import Mailbox, RankHello, run
from specpipe.errors import SpecpipeError


class RankThread:
    """A rank that is not a process."""

    def __init__(self, end: socket.socket) -> None:
        self.channel = Channel(end)
        self.mailbox = Mailbox(self.channel, lambda _is_silent: None)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            run(self.mailbox, RankHello.from_bytes(self.mailbox.next(Kind.HELLO).payload))
        except SpecpipeError as error:
            self._say(str(error))
        self.channel.close()

    def _say(self, reason: str) -> None:
        with contextlib.suppress(SpecpipeError):
            self.channel.send(Kind.FAILED, 0, reason.encode())


@contextmanager
def parallel_model(
    folder: Path, size: int, *, num_slots: int = 400, is_shared: bool = True, dtype: str = "auto"
) -> Iterator[ParallelModel]:
    """The model of `folder` over `size` ranks."""
    ranks = []
    with RankGroup(EngineConfig(model=str(folder), num_slots=num_slots, dtype=dtype), size) as group:
        if is_shared:
            group.connect()
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            ranks.append(RankThread(theirs))
            group.add(rank, ours)
        yield group.load()
    for thread in ranks:
        thread.thread.join()
