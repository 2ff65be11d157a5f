"""What the processes of a fleet take of the machine."""

from __future__ import annotations

import collections
import contextlib
import gc
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from fleet import Fleet

GRPC_POOL = "event_engine"
"""Name of gRPC's pool threads: one is started when all are busy, and leaves after 20 s without any work. Those of a
stream with a heartbeat each second may never have that."""
MAX_POOL_THREADS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of one process."""

    anonymous_bytes: int  # RssAnon + VmSwap: what it took and did not give back, wherever it lies
    threads: tuple[str, ...]  # names
    descriptors: tuple[str, ...]  # what each is
    doubled: tuple[str, ...]  # ends that more than one connection leads to: who dials anew has left the old one

    @classmethod
    def of(cls, pid: int) -> Usage:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        kilobytes = sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))
        connections = psutil.Process(pid).net_connections(kind="all")
        ends = collections.Counter(str(one.raddr) for one in connections if one.raddr)
        return cls(
            anonymous_bytes=1024 * kilobytes,
            threads=tuple(sorted(_thread_names(pid))),
            descriptors=tuple(sorted(_descriptors(pid, {one.fd: one for one in connections}))),
            doubled=tuple(end for end, count in ends.items() if count > 1),
        )

    @property
    def num_own_threads(self) -> int:
        return len(self.threads) - self.threads.count(GRPC_POOL)

    def exceeds(self, earlier: Usage) -> bool:
        """It keeps more threads or descriptors than it had, or connections that it has left."""
        return (
            self.num_own_threads > earlier.num_own_threads
            or self.threads.count(GRPC_POOL) > MAX_POOL_THREADS
            or len(self.descriptors) > len(earlier.descriptors)
            or bool(self.doubled)
        )


def _thread_names(pid: int) -> list[str]:
    return [path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm")]


def _descriptors(pid: int, sockets: Mapping[int, Any]) -> list[str]:
    """Sockets, given by their number, by their ends, the others by their kind."""
    names = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        socket = sockets.get(int(path.name))
        with contextlib.suppress(FileNotFoundError):  # closed in between
            kind = re.sub(r"\d+", "N", str(path.readlink()))
            names.append(f"{kind} {socket.laddr} {socket.raddr} {socket.status}" if socket else kind)
    return names


def usages(fleet: Fleet) -> dict[str, Usage]:
    """By name of the member, its ranks after it.

    Our own garbage goes first: a call of ours in a cycle of references would keep a connection to a coordinator.
    """
    gc.collect()
    return {
        f"{member.name} {index}": Usage.of(process.pid)
        for member in fleet.members.values()
        for index, process in enumerate(member.processes)
    }
