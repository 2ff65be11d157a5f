"""What the processes of a fleet take of the machine."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

from fleet import Fleet

GRPC_POOL = "event_engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of one process."""

    anonymous_bytes: int  # RssAnon + VmSwap: what it took and did not give back, wherever it lies
    num_threads: int  # without those of gRPC's pool, which come and go as the machine is busy
    num_descriptors: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        kilobytes = sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))
        return cls(
            anonymous_bytes=1024 * kilobytes,
            num_threads=sum(name != GRPC_POOL for name in _thread_names(pid)),
            num_descriptors=len(list(Path(f"/proc/{pid}/fd").iterdir())),
        )


def _thread_names(pid: int) -> list[str]:
    return [path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm")]


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
