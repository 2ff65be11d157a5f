"""Every rank but the first: loads its shard, then runs the steps that rank 0 announces.

Owns: that work, and the process of one that is a child of rank 0's (distant_rank.py has the others'). Must not know:
sessions, trees, what a step is for. It decides nothing.

A thread of its own reads the control socket, so that pings are answered while a step runs, and the process ends at
once when rank 0 is gone. Rank 0's silence (it is frozen, or out of reach) ends the whole group: whoever supervises it
starts it again.
"""

from __future__ import annotations

import contextlib
import enum
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
from typing import Any, Self

from specpipe.config import EngineConfig
from specpipe.engine.parallel.channel import Channel, Frame, Kind
from specpipe.engine.parallel.meeting import Meeting
from specpipe.engine.parallel.mesh import MeshEnd
from specpipe.errors import InvariantError, SpecpipeError, WorkerUnavailableError

logger = logging.getLogger(__name__)

MAX_SILENT_SECONDS = 7
"""More in a row without a ping: rank 0 is frozen. Counted one by one: our own pauses do not count."""
MAX_SILENT_LOADING_SECONDS = 60
"""The same while weights are loaded, either way: what holds the interpreter then may take long."""
MAX_REASON_BYTES = 2000


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

    @classmethod
    def create(cls, rank: int, size: int, engine: EngineConfig, **own: Any) -> Self:
        """With this process's level of logging."""
        level = logging.getLevelName(logging.getLogger().level).lower()
        return cls(rank=rank, size=size, engine=asdict(engine), log_level=level, **own)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, payload: bytes) -> Self:
        """Raises InvariantError."""
        try:
            return cls(**json.loads(payload))
        except (ValueError, TypeError) as error:
            raise InvariantError(f"rank 0 sent no hello of ours ({error})") from None


class Ending(enum.Enum):
    """Why there is no more to hear from rank 0."""

    IN_ORDER = "rank 0 has ended the group"
    GONE = "rank 0 is gone, or out of reach"
    SILENT = "rank 0 has been silent for too long"


class Mailbox:
    """Reads a channel on a thread of its own: answers pings, hands the rest over in order."""

    def __init__(self, channel: Channel, on_end: Callable[[Ending], None]) -> None:
        """`on_end` is called once, on that thread."""
        self.channel = channel
        self.num_steps = 0  # the last one finished, told with every answer to a ping
        self.is_running = False  # steps are being taken: from now on less silence is borne
        self._ending = Ending.GONE
        self._on_end = on_end
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        threading.Thread(target=self._main, name="control", daemon=True).start()

    def next(self, *expected: Kind) -> Frame:
        """The next frame. Raises InvariantError if it is of another kind, WorkerUnavailableError at the end."""
        frame = self._frames.get()
        if frame is None:
            raise WorkerUnavailableError(self._ending.value)
        if frame.kind not in expected:
            raise InvariantError(f"rank 0 said {frame.kind.name} where {expected[0].name} was due")
        return frame

    def _main(self) -> None:
        try:
            self._ending = self._read()
        except WorkerUnavailableError as error:  # nonsense
            logger.error("%s", error)
        self._on_end(self._ending)
        self._frames.put(None)

    def _read(self) -> Ending:
        num_silent = 0
        while num_silent <= (MAX_SILENT_SECONDS if self.is_running else MAX_SILENT_LOADING_SECONDS):
            try:
                frame = self.channel.receive(1.0)
            except TimeoutError:
                num_silent += 1
                continue
            num_silent = 0
            if frame is None:
                return Ending.GONE
            if frame.kind is Kind.END:
                return Ending.IN_ORDER
            if frame.kind is Kind.PING:
                self.channel.ping(Kind.PONG, self.num_steps)
            else:
                self._frames.put(frame)
        return Ending.SILENT


def run(
    mailbox: Mailbox,
    hello: RankHello,
    config: EngineConfig,
    *,
    has_one_host: bool = True,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """A rank's whole work; returns never. Raises whatever ends it. `on_ready` is called before the first step."""
    from specpipe.process import loading, spare_what_is_loaded

    with loading():
        import torch

        from specpipe.engine.parallel.collective import Collective, create_store
        from specpipe.engine.parallel.load import create_rank_runner, load_rank, rank_device
        from specpipe.engine.parallel.shared_memory import open_end

        torch.set_num_threads(config.num_threads)
        device = rank_device(config, hello.rank, hello.size, has_one_host=has_one_host)
        loaded = load_rank(config, hello.rank, hello.size, device)
    mailbox.channel.send(Kind.LOADED)
    meeting = Meeting.from_bytes(mailbox.next(Kind.MEET).payload, hello.size)
    shared = open_end(MeshEnd(hello.memory_fd, hello.peer_fds), hello.rank) if hello.peer_fds else None
    store = create_store(meeting.hosts[0], meeting.port) if meeting.port else None
    with contextlib.closing(shared) if shared else contextlib.nullcontext():
        collective = Collective(store, hello.rank, hello.size, device, shared, meeting)
        runner = create_rank_runner(loaded, config, collective)
        mailbox.is_running = True
        spare_what_is_loaded()
        mailbox.channel.send(Kind.READY)
        on_ready()
        follow(mailbox, runner, collective.begin_step)


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
    mailbox = Mailbox(channel, lambda ending: _leave(parent, ending))
    hello = RankHello.from_bytes(mailbox.next(Kind.HELLO).payload)
    configure_logging(hello.log_level)
    try:
        os.sched_setaffinity(0, hello.cores)
        config = EngineConfig(**hello.engine)
        set_up_process(core=config.core, num_threads=config.num_threads)
        run(mailbox, hello, config)
    except SpecpipeError as error:
        logger.warning("rank %d: %s", hello.rank, error)
        say_failed(channel, str(error))
    except Exception as error:
        logger.exception("rank %d failed", hello.rank)
        say_failed(channel, f"{type(error).__name__}: {error}")
    logging.shutdown()
    os._exit(1)


def say_failed(channel: Channel, reason: str) -> None:
    """Tell rank 0, cut to what it takes."""
    try:
        channel.send(Kind.FAILED, 0, reason.encode()[:MAX_REASON_BYTES])
    except SpecpipeError:
        logger.warning("rank 0 is gone too")


def _leave(parent: int, ending: Ending) -> None:
    """A rank 0 that is frozen is killed, so that its supervisor sees an end."""
    if ending is Ending.SILENT and os.getppid() == parent:
        logger.error("rank 0 (pid %d) has been silent for %d s: killed", parent, MAX_SILENT_SECONDS)
        os.kill(parent, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
