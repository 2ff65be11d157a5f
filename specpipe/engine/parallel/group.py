"""Rank 0's handle on the other ranks: loads together with them, notices when one is lost, ends them.

Owns: the watchdog. Must not know: sessions, how ranks come to be (children.py, distant.py), what happens to the
service when the group is lost.

A group that has lost a rank is lost: all ranks are ended, and whoever supervises this process starts a new group.
The watchdog is a thread of its own: it sees a dead rank at once (its socket closes) and one that is frozen, or out of
reach, by its silence, whether the model thread is idle or inside a collective.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from specpipe.config import EngineConfig
from specpipe.engine.parallel.channel import Channel, Frame, Kind
from specpipe.engine.parallel.meeting import Meeting
from specpipe.engine.parallel.rank import MAX_SILENT_LOADING_SECONDS, RankHello
from specpipe.errors import SpecpipeError, WorkerUnavailableError
from specpipe.process import loading

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


class OtherRanks(Protocol):
    """How the other ranks of a group come to be."""

    has_one_host: bool  # all on this host, children of this process

    def bring(self, group: RankGroup) -> None:
        """From now on each is added to the group as it comes. Called on the main thread. Raises ConfigError."""
        ...

    def open_shared(self) -> SharedMemory | None:
        """Rank 0's end of the memory that all share, if they do. Called once, when all have loaded."""
        ...

    def hosts(self, channels: Sequence[Channel]) -> tuple[str, ...]:
        """Addresses at which ranks reach one another, by rank. `channels`: to each of the others."""
        ...

    def close(self) -> None:
        """None is added any more."""
        ...


@dataclass(slots=True, kw_only=True)
class Member:
    """One of the other ranks, as rank 0 sees it."""

    rank: int
    channel: Channel
    process: subprocess.Popen[bytes] | None  # None: it is no child of ours
    host: str  # empty: this one
    num_unanswered: int = 0  # pings since it was last heard
    said: set[Kind] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host})" if self.host else f"rank {self.rank}"

    @property
    def max_unanswered(self) -> int:
        return MAX_UNANSWERED_PINGS if Kind.READY in self.said else MAX_SILENT_LOADING_SECONDS


class RankGroup:
    """All ranks of one target worker. Used as a context: after it none of its children runs, and ranks of other hosts
    have been told to end.

    `start` belongs to the main thread, `load` to the model thread.
    """

    def __init__(self, engine: EngineConfig, size: int, others: OtherRanks) -> None:
        self.size = size
        self._engine = engine
        self._others = others
        self._members: dict[int, Member] = {}
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
        self.close(is_in_order=error is None)

    @property
    def pids(self) -> list[int]:
        """Of those that are children."""
        return [member.process.pid for member in self._in_order() if member.process is not None]

    def start(self) -> None:
        """Let the others come; they load at once. Raises ConfigError."""
        self._others.bring(self)

    def add(
        self,
        rank: int,
        channel: Channel,
        hello: RankHello,
        *,
        process: subprocess.Popen[bytes] | None = None,
        seal: Callable[[bytes], bytes] = bytes,
    ) -> None:
        """A rank that has come, on any thread. It is sent the hello, as `seal` makes it.

        Raises WorkerUnavailableError if there is one of that number, or the group ends.
        """
        member = Member(rank=rank, channel=channel, process=process, host=channel.peer_host)
        with self._changed:
            if self._is_closing or self._failure is not None:
                raise WorkerUnavailableError("the group of rank 0 is ending")
            if rank in self._members:
                raise WorkerUnavailableError(f"{self._members[rank].name} has joined already")
            channel.send(Kind.HELLO, 0, seal(hello.to_bytes()))
            self._members[rank] = member

    def watch(self, on_failure: OnFailure) -> None:
        """A lost rank is told to `on_failure`, before the others are ended; at once if one is lost already.

        `load` may run by now, on its own thread.
        """
        with self._changed:
            self._on_failure = on_failure
            failure = self._failure
        self._begin_to_watch()
        if failure is not None:
            on_failure(failure)

    def load(self) -> ParallelModel:
        """Load rank 0's shard and prepare together with the others. Watches them, if nobody asked for that before.

        Raises what one rank could not do, or WorkerUnavailableError if one is lost.
        """
        self._begin_to_watch()  # the watchdog is what hears the ranks
        with loading():
            import torch

            from specpipe.engine.parallel.collective import Collective, create_store
            from specpipe.engine.parallel.load import create_rank_runner, load_rank, rank_device
            from specpipe.engine.parallel.model import ParallelModel

            torch.set_num_threads(self._engine.num_threads)
            device = rank_device(self._engine, 0, self.size, has_one_host=self._others.has_one_host)
            loaded = load_rank(self._engine, 0, self.size, device)
        self._wait_for(Kind.LOADED)
        self._shared = self._others.open_shared()
        hosts = self._others.hosts([member.channel for member in self._in_order()])
        store = None if self._shared else create_store(hosts[0])
        meeting = Meeting(hosts=hosts, port=store.port if store else 0)
        self.send(Kind.MEET, 0, meeting.to_bytes())
        collective = Collective(store, 0, self.size, device, self._shared, meeting)
        runner = create_rank_runner(loaded, self._engine, collective)
        self._wait_for(Kind.READY)
        return ParallelModel(runner, self, collective if device.type == "cpu" else None)

    def send(self, kind: Kind, number: int = 0, payload: bytes = b"") -> None:
        """Tell all other ranks. Raises WorkerUnavailableError if one is gone."""
        for member in self._in_order():
            member.channel.send(kind, number, payload)

    def close(self, *, is_in_order: bool = False) -> None:
        """End all other ranks: they hold nothing that is worth a farewell. Idempotent.

        `is_in_order`: those of other hosts are told that this is no failure.
        """
        with self._changed:
            is_in_order = is_in_order and not self._is_closing and self._failure is None
            self._is_closing = True
        self._others.close()
        if is_in_order:
            with contextlib.suppress(SpecpipeError):  # one that is gone has ended too
                self.send(Kind.END)
        self._end_all()
        if self._watchdog.is_alive():
            self._watchdog.join()
        for member in self._in_order():
            member.channel.close()
        if self._shared is not None:
            self._shared.close()

    def _in_order(self) -> list[Member]:
        return [self._members[rank] for rank in sorted(self._members)]

    def _end_all(self) -> None:
        """Children are killed; others see the end of the connection, and end."""
        for member in self._in_order():
            if member.process is not None:
                member.process.kill()
                member.process.wait()
            member.channel.shut()

    # The watchdog.

    def _watch(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                self._listen(selector)
        except Exception as error:  # without a watchdog nobody would notice the next loss
            logger.exception("the watchdog of the ranks failed")
            self._lose(WorkerUnavailableError(f"the watchdog of the ranks failed: {error}"))

    def _listen(self, selector: selectors.BaseSelector) -> None:
        next_ping = time.monotonic()
        while not self._is_closing and self._failure is None:
            self._register_new(selector)
            if time.monotonic() >= next_ping:
                next_ping = time.monotonic() + PING_INTERVAL_S
                self._ping()
            for key, _ in selector.select(max(0.0, next_ping - time.monotonic())):
                self._hear(key.data)

    def _register_new(self, selector: selectors.BaseSelector) -> None:
        """Ranks come while this watches: each is heard from the next ping on."""
        for member in self._in_order():
            if member.channel.fileno() not in selector.get_map():
                selector.register(member.channel, selectors.EVENT_READ, member)

    def _ping(self) -> None:
        for member in self._in_order():
            if member.num_unanswered > member.max_unanswered:
                seconds = member.num_unanswered * PING_INTERVAL_S
                reason = f"{member.name} has been silent for {seconds:.0f} s"
                self._lose(WorkerUnavailableError(reason))
            member.num_unanswered += 1
            member.channel.ping(Kind.PING)

    def _hear(self, member: Member) -> None:
        try:
            frame = member.channel.receive(0.0)
        except TimeoutError:
            return
        except WorkerUnavailableError as error:
            self._lose(WorkerUnavailableError(f"{member.name}: {error}"))
            return
        member.num_unanswered = 0
        if frame is None:
            self._lose(WorkerUnavailableError(f"{member.name} ended{_exit_of(member)}"))
        elif frame.kind is Kind.FAILED:
            self._lose(_failure_of(member, frame))
        else:
            with self._changed:
                member.said.add(frame.kind)
                self._changed.notify_all()

    def _begin_to_watch(self) -> None:
        """On whichever thread comes first."""
        with self._changed:
            if self._watchdog.ident is None:
                self._watchdog.start()

    def _lose(self, error: SpecpipeError) -> None:
        with self._changed:
            if self._is_closing or self._failure is not None:
                return
            self._failure = error
            tell = self._on_failure
            self._changed.notify_all()
        logger.error("%s: the rank group ends", error)
        tell(error)
        self._end_all()

    def _wait_for(self, kind: Kind) -> None:
        """Until all other ranks have said so. Raises the group's failure."""

        def are_missing() -> list[int]:
            return [r for r in range(1, self.size) if r not in self._members or kind not in self._members[r].said]

        with self._changed:
            if not self._changed.wait_for(lambda: self._failure is not None or not are_missing(), LOAD_TIMEOUT_S):
                names = ", ".join(map(str, are_missing()))
                raise WorkerUnavailableError(f"rank {names}: not {kind.name.lower()} after {LOAD_TIMEOUT_S:.0f} s")
            if self._failure is not None:
                raise self._failure


def _exit_of(member: Member) -> str:
    """How its process ended, if that is known by now."""
    code = member.process.poll() if member.process is not None else None
    return "" if code is None else f" with code {code}"


def _failure_of(member: Member, frame: Frame) -> SpecpipeError:
    return WorkerUnavailableError(f"{member.name}: {frame.payload.decode(errors='replace')}")
