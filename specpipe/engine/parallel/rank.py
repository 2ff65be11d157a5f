"""The process of every rank but the first: loads its shard, then runs the steps that rank 0 announces.

Owns: that process's life. Must not know: sessions, trees, what a step is for. It decides nothing.

A thread of its own reads the control socket, so that pings are answered while a step runs, and the process ends at
once when rank 0 is gone. Rank 0's silence (it is frozen) ends the whole group: whoever supervises it starts it again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from specpipe.engine.parallel.channel import Channel, Frame, Kind
from specpipe.engine.parallel.mesh import MeshEnd
from specpipe.errors import InvariantError, SpecpipeError, WorkerUnavailableError

logger = logging.getLogger(__name__)

MAX_SILENT_SECONDS = 8
"""So many seconds in a row without a ping: rank 0 is frozen. Counted one by one: our own pauses do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHello:
    """What rank 0 tells a new rank; `engine` holds the fields of an EngineConfig."""

    rank: int
    size: int
    engine: dict[str, Any]
    log_level: str = "warning"
    memory_fd: int = -1  # see MeshEnd; -1: the ranks meet elsewhere
    peer_fds: list[int] = field(default_factory=list)
    cores: list[int] = field(default_factory=list)  # where it may run; rank 0 may be on one of its own by now

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, payload: bytes) -> RankHello:
        return cls(**json.loads(payload))


class Mailbox:
    """Reads a channel on a thread of its own: answers pings, hands the rest over in order."""

    def __init__(self, channel: Channel, on_lost: Callable[[bool], None]) -> None:
        self.channel = channel
        self.num_steps = 0  # the last one finished, told with every answer to a ping
        self.is_running = False  # steps are being taken: from now on silence counts
        self._on_lost = on_lost  # with True: rank 0 is silent; with False: it is gone
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        threading.Thread(target=self._main, name="control", daemon=True).start()

    def next(self, *expected: Kind) -> Frame:
        """The next frame. Raises InvariantError if it is of another kind, WorkerUnavailableError at the end."""
        frame = self._frames.get()
        if frame is None:
            raise WorkerUnavailableError("rank 0 is gone")
        if frame.kind not in expected:
            raise InvariantError(f"rank 0 said {frame.kind.name} where {expected[0].name} was due")
        return frame

    def _main(self) -> None:
        is_silent = self._read()
        self._on_lost(is_silent)
        self._frames.put(None)

    def _read(self) -> bool:
        """Until rank 0 is gone (False) or silent for too long (True)."""
        num_silent = 0
        while num_silent <= MAX_SILENT_SECONDS:
            try:
                frame = self.channel.receive(1.0)
            except TimeoutError:
                num_silent = num_silent + 1 if self.is_running else 0
                continue
            num_silent = 0
            if frame is None:
                return False
            if frame.kind is Kind.PING:
                self.channel.ping(Kind.PONG, self.num_steps)
            else:
                self._frames.put(frame)
        return True


def run(mailbox: Mailbox, hello: RankHello) -> None:
    """A rank's whole work; returns never. Raises whatever ends it."""
    import torch

    from specpipe.config import EngineConfig
    from specpipe.engine.parallel.collective import Collective, create_store
    from specpipe.engine.parallel.load import create_rank_runner, load_rank, rank_device
    from specpipe.engine.parallel.shared_memory import open_end

    config = EngineConfig(**hello.engine)
    torch.set_num_threads(config.num_threads)
    loaded = load_rank(config, hello.rank, hello.size)
    mailbox.channel.send(Kind.LOADED)
    port = mailbox.next(Kind.MEET).number
    device = rank_device(config, hello.rank)
    shared = open_end(MeshEnd(hello.memory_fd, hello.peer_fds), hello.rank) if hello.peer_fds else None
    store = None if shared else create_store(port)
    with contextlib.closing(shared) if shared else contextlib.nullcontext():
        collective = Collective(store, hello.rank, hello.size, device, shared)
        runner = create_rank_runner(loaded, config, collective)
        mailbox.is_running = True
        mailbox.channel.send(Kind.READY)
        follow(mailbox, runner, shared.begin_step if shared else None)


def follow(mailbox: Mailbox, runner: Any, begin_step: Callable[[], None] | None = None) -> None:
    """Run announced steps, in order, for ever. Raises InvariantError if one is missing. `begin_step` is called as the
    work on one begins."""
    from specpipe.engine.parallel.announce import Decoder, decode_slots

    decoder = Decoder()
    while True:
        frame = mailbox.next(Kind.STEP, Kind.CLEAR)
        if frame.kind is Kind.CLEAR:
            runner.clear_slots(decode_slots(frame.payload))
            continue
        if frame.number != mailbox.num_steps + 1:
            raise InvariantError(f"step {frame.number} was announced after step {mailbox.num_steps}")
        if begin_step is not None:
            begin_step()
        runner.take_part(runner.prepare(decoder.decode(frame.payload)))
        mailbox.num_steps = frame.number


def main() -> None:
    """`python -m specpipe.engine.parallel.rank --role target-rank FD`: FD is this rank's end of the control socket."""
    from specpipe.process import die_with_parent, set_up_process
    from specpipe.telemetry.logs import configure_logging

    parent = os.getppid()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; rank 0 decides
    channel = Channel(socket.socket(fileno=int(sys.argv[-1])))
    mailbox = Mailbox(channel, lambda is_silent: _leave(parent, is_silent))
    hello = RankHello.from_bytes(mailbox.next(Kind.HELLO).payload)
    configure_logging(hello.log_level)
    try:
        os.sched_setaffinity(0, hello.cores)
        set_up_process(core=hello.engine["core"], num_threads=hello.engine["num_threads"])
        run(mailbox, hello)
    except SpecpipeError as error:
        logger.warning("rank %d: %s", hello.rank, error)
        _say_failed(channel, str(error))
    except Exception as error:
        logger.exception("rank %d failed", hello.rank)
        _say_failed(channel, f"{type(error).__name__}: {error}")
    logging.shutdown()
    os._exit(1)


def _say_failed(channel: Channel, reason: str) -> None:
    try:
        channel.send(Kind.FAILED, 0, reason.encode())
    except SpecpipeError:
        logger.warning("rank 0 is gone too")


def _leave(parent: int, is_silent: bool) -> None:
    """Rank 0 is gone, or frozen: then it is killed, so that its supervisor sees an end."""
    if is_silent and os.getppid() == parent:
        logger.error("rank 0 (pid %d) has been silent for %d s: killed", parent, MAX_SILENT_SECONDS)
        os.kill(parent, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
