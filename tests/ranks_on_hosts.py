"""A target worker whose ranks are processes of their own, each started by its own command, and a coordinator.

The hosts are this machine's loopback, or network namespaces: whatever each command line begins with.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from running import READY_TIMEOUT_S, end_process_tree, environment, specpipe

LOOPBACK = "127.0.0.1"
TOKEN = {"SPECPIPE_RANK_TOKEN": "a secret of this group"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    address: str = LOOPBACK
    prefix: Sequence[str] = ()  # of command lines that run there


@dataclass(slots=True, kw_only=True)
class Part:
    """A process, and where it writes."""

    process: subprocess.Popen[str]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def said(self) -> str:
        return self.log.read_text()

    def address(self) -> str:
        """Read of its stdout once it serves. Raises AssertionError if it ends before."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.said()[-3000:]
        return line.strip()

    def seconds_until_end(self, patience_s: float = READY_TIMEOUT_S) -> float:
        """Raises subprocess.TimeoutExpired."""
        start_s = time.monotonic()
        self.process.wait(patience_s)
        return time.monotonic() - start_s


@dataclass(slots=True, kw_only=True)
class RanksOnHosts:
    """Made by `ranks_on_hosts`."""

    folder: Path  # of logs
    model: Path
    hosts: Sequence[Host]  # by rank
    parts: list[Part] = field(default_factory=list)
    ranks: list[Part] = field(default_factory=list)  # of the group that was formed last
    ports: tuple[int, int] = (0, 0)  # of rank 0: for ranks, for coordinators

    def form(self) -> None:
        """Start all ranks, rank 0 last, and wait until they serve."""
        size = str(len(self.hosts))
        there = f"{self.hosts[0].address}:{self.ports[0]}"
        flags = (
            "--model",
            str(self.model),
            "--tensor-parallel-size",
            size,
            "--rendezvous",
            there,
            "--num-slots",
            "2000",
        )
        served = ("--host", self.hosts[0].address, "--port", str(self.ports[1]), "--grace", "5")
        numbers = reversed(range(len(self.hosts)))
        started = {
            rank: self.start(f"rank-{rank}", self.hosts[rank], "target-worker", *flags, *served, "--rank", str(rank))
            for rank in numbers
        }
        self.ranks = [started[rank] for rank in range(len(self.hosts))]
        assert self.ranks[0].address() == self.target
        for rank in self.ranks[1:]:
            assert rank.address() == there

    @property
    def target(self) -> str:
        return f"{self.hosts[0].address}:{self.ports[1]}"

    def start(self, name: str, host: Host, *arguments: str) -> Part:
        log = self.folder / f"{name}-{len(self.parts)}.log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [*host.prefix, *specpipe(*arguments)],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment() | TOKEN,
            )
        self.parts.append(Part(process=process, log=log))
        return self.parts[-1]


@contextmanager
def ranks_on_hosts(folder: Path, model: Path, hosts: Sequence[Host]) -> Iterator[RanksOnHosts]:
    """After the block none of the processes runs. Raises AssertionError if one left a child behind."""
    group = RanksOnHosts(folder=folder, model=model, hosts=hosts, ports=(free_port(), free_port()))
    try:
        yield group
    finally:
        for part in group.parts:
            if not part.has_ended:
                psutil.Process(part.pid).resume()
            end_process_tree(part.process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
