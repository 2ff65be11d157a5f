"""Rank 0 notices a rank that ends, freezes or fails, kills the others and says why; a rank notices rank 0's silence.

The ranks here are small processes that speak on the control socket and load nothing.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import specpipe
from specpipe.config import EngineConfig
from specpipe.engine.parallel import channel as channel_module
from specpipe.engine.parallel import group as group_module
from specpipe.engine.parallel import rank as rank_module
from specpipe.engine.parallel.channel import Channel, Frame, Kind
from specpipe.engine.parallel.children import ChildRanks
from specpipe.engine.parallel.group import RankGroup
from specpipe.engine.parallel.rank import Ending, Mailbox, RankHello
from specpipe.errors import InvariantError, SpecpipeError, WorkerUnavailableError

ROOT = Path(specpipe.__file__).resolve().parents[1]
STUB = """
import socket, sys
from specpipe.engine.parallel.channel import Channel, Kind
from specpipe.engine.parallel.rank import Mailbox
channel = Channel(socket.socket(fileno=int(sys.argv[1])))
mailbox = Mailbox(channel, lambda ending: None)
mailbox.next(Kind.HELLO)
channel.send(Kind.READY)
frame = mailbox.next(Kind.STEP)
channel.send(Kind.FAILED, 0, frame.payload)
"""


class Watched:
    """A group of stub processes, and what its watchdog said."""

    def __init__(self, num_stubs: int) -> None:
        engine = EngineConfig(model="unused")
        self.group = RankGroup(engine, 1 + num_stubs, ChildRanks(engine, 1 + num_stubs))
        self.failures: list[SpecpipeError] = []
        self.has_failed = threading.Event()
        for rank in range(1, 1 + num_stubs):
            ours, theirs = socket.socketpair()
            with theirs:
                hello = RankHello.create(rank, 1 + num_stubs, engine)
                self.group.add(rank, Channel(ours), hello, process=start_stub(theirs.fileno()))
        self.group.watch(self.fail)
        self.group._wait_for(Kind.READY)

    def fail(self, error: SpecpipeError) -> None:
        self.failures.append(error)
        self.has_failed.set()

    def all_ended(self) -> bool:
        return all(member.process is None or member.process.poll() is not None for member in self.group._in_order())


def start_stub(fd: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", STUB, str(fd)], pass_fds=(fd,), env=environment)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(group_module, "PING_INTERVAL_S", 0.2)
    found = Watched(2)
    yield found
    found.group.close()
    assert found.all_ended()


def test_a_killed_rank_is_noticed_and_the_others_are_killed(watched: Watched) -> None:
    os.kill(watched.group.pids[0], signal.SIGKILL)
    assert watched.has_failed.wait(10)
    assert "rank 1 ended" in str(watched.failures[0])
    watched.group.close()
    assert watched.all_ended()


def test_a_frozen_rank_is_noticed_and_killed(watched: Watched) -> None:
    os.kill(watched.group.pids[1], signal.SIGSTOP)
    assert watched.has_failed.wait(20)
    assert "rank 2 has been silent" in str(watched.failures[0])
    with pytest.raises(WorkerUnavailableError, match="silent"):
        watched.group._wait_for(Kind.LOADED)


def test_a_rank_that_fails_says_why(watched: Watched) -> None:
    watched.group.send(Kind.STEP, 1, b"out of memory")
    assert watched.has_failed.wait(10)
    assert str(watched.failures[0]) in ("rank 1: out of memory", "rank 2: out of memory")
    assert watched.failures[0].is_retryable
    assert len(watched.failures) == 1


def test_closing_a_group_is_no_failure(watched: Watched) -> None:
    watched.group.close()
    assert not watched.failures


def test_a_child_is_told_its_place_and_core() -> None:
    children = ChildRanks(EngineConfig(model="m", core=0, num_threads=3), 2, cores=(5,))
    hello = RankHello.from_bytes(children._hello(1).to_bytes())
    assert (hello.rank, hello.size, hello.engine["core"], hello.engine["num_threads"]) == (1, 2, 5, 3)


def test_a_rank_that_loads_is_silent_for_longer_before_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "PING_INTERVAL_S", 0.001)
    monkeypatch.setattr(group_module, "MAX_SILENT_LOADING_SECONDS", 20)
    lost, has_lost = [], threading.Event()
    ours, theirs = socket.socketpair()
    engine = EngineConfig(model="m")
    with RankGroup(engine, 2, ChildRanks(engine, 2)) as group, theirs:
        group.add(1, Channel(ours), RankHello.create(1, 2, engine))
        group.watch(lambda error: (lost.append(str(error)), has_lost.set()))  # type: ignore[func-returns-value]
        assert has_lost.wait(20)
    assert "rank 1 has been silent" in lost[0]


def test_loading_and_watching_may_begin_in_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "PING_INTERVAL_S", 0.01)
    engine = EngineConfig(model="m")
    for _ in range(50):
        with RankGroup(engine, 2, ChildRanks(engine, 2)) as group, ThreadPoolExecutor(2) as pool:
            together = threading.Barrier(2)

            def begin(begin: Callable[[], None], together: threading.Barrier = together) -> None:
                together.wait()
                begin()

            starts = (group._begin_to_watch, functools.partial(group.watch, lambda _: None))
            for outcome in [pool.submit(begin, start) for start in starts]:
                outcome.result(10)


def test_a_rank_that_was_lost_before_anybody_asked_is_told_once() -> None:
    lost: list[SpecpipeError] = []
    ours, theirs = socket.socketpair()
    engine = EngineConfig(model="m")
    with RankGroup(engine, 2, ChildRanks(engine, 2)) as group:
        with theirs:
            group.add(1, Channel(ours), RankHello.create(1, 2, engine))
        group._begin_to_watch()
        with pytest.raises(WorkerUnavailableError, match="rank 1 ended"):
            group._wait_for(Kind.LOADED)
        group.watch(lost.append)
    assert [str(error) for error in lost] == ["rank 1 ended"]


def test_what_is_no_frame_loses_the_rank(ends: tuple[Channel, Channel]) -> None:
    ends[0]._socket.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    with pytest.raises(WorkerUnavailableError, match="no frame of ours"):
        ends[1].receive(5)


def test_a_frame_that_is_too_long_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Channel(ours).send(Kind.FAILED, 0, b"x" * 101)
        with pytest.raises(WorkerUnavailableError, match="at most 100"):
            Channel(theirs, max_frame_bytes=100).receive(5)


def test_a_frame_that_does_not_come_whole_is_not_waited_for(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "SEND_TIMEOUT_S", 0.05)
    ends[0]._socket.sendall(b"\x05")
    with pytest.raises(WorkerUnavailableError, match="did not come whole"):
        ends[1].receive(5)


# The other side.


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    yield Channel(ours), Channel(theirs)
    ours.close()
    theirs.close()


def test_pings_are_answered_while_other_frames_wait(ends: tuple[Channel, Channel]) -> None:
    mailbox = Mailbox(ends[1], lambda _: None)
    mailbox.num_steps = 7
    ends[0].send(Kind.STEP, 8, b"x")
    ends[0].ping(Kind.PING)
    assert ends[0].receive(5) == Frame(Kind.PONG, 7)
    assert mailbox.next(Kind.STEP) == Frame(Kind.STEP, 8, b"x")


def test_a_silent_rank_0_is_noticed_once_steps_are_taken(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_module, "MAX_SILENT_SECONDS", 0)
    lost: list[Ending] = []
    mailbox = Mailbox(ends[1], lost.append)
    mailbox.is_running = True
    with pytest.raises(WorkerUnavailableError):
        mailbox.next(Kind.STEP)
    assert lost == [Ending.SILENT]


def test_a_rank_0_that_is_gone_ends_the_rank(ends: tuple[Channel, Channel]) -> None:
    lost: list[Ending] = []
    mailbox = Mailbox(ends[1], lost.append)
    ends[0].close()
    with pytest.raises(WorkerUnavailableError):
        mailbox.next(Kind.STEP)
    assert lost == [Ending.GONE]


def test_a_rank_0_that_ends_the_group_in_order_says_so(ends: tuple[Channel, Channel]) -> None:
    lost: list[Ending] = []
    mailbox = Mailbox(ends[1], lost.append)
    ends[0].send(Kind.END)
    ends[0].close()
    with pytest.raises(WorkerUnavailableError):
        mailbox.next(Kind.STEP)
    assert lost == [Ending.IN_ORDER]


def test_a_step_out_of_order_is_refused(ends: tuple[Channel, Channel]) -> None:
    mailbox = Mailbox(ends[1], lambda _: None)
    ends[0].send(Kind.STEP, 2)
    with pytest.raises(InvariantError, match="step 2 was announced after step 0"):
        rank_module.follow(mailbox, None)
