"""What the processes of a fleet take of the machine."""

from __future__ import annotations

import contextlib
import gc
import re
from dataclasses import dataclass
from pathlib import Path

import psutil
from fleet import Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of one process."""

    anonymous_bytes: int  # RssAnon + VmSwap: what it took and did not give back, wherever it lies
    threads: tuple[str, ...]  # names
    descriptors: tuple[str, ...]  # what each is

    @classmethod
    def of(cls, pid: int) -> Usage:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        kilobytes = sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))
        return cls(
            anonymous_bytes=1024 * kilobytes,
            threads=tuple(sorted(_thread_names(pid))),
            descriptors=tuple(sorted(_descriptors(pid))),
        )

    def exceeds(self, earlier: Usage) -> bool:
        """It keeps more threads or descriptors than it had."""
        return len(self.threads) > len(earlier.threads) or len(self.descriptors) > len(earlier.descriptors)


def _thread_names(pid: int) -> list[str]:
    return [path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm")]


def _descriptors(pid: int) -> list[str]:
    """Sockets by their ends, the others by their kind."""
    sockets = {one.fd: one for one in psutil.Process(pid).net_connections(kind="all")}
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
