"""How much memory this process may have: what the machine has, or less where a control group (a container) limits it.

Owns: reading control groups, of version 1 and 2. Must not know: models, slots, GPUs.

A process is in one group, which may lie in others, and each may have a limit: the least counts. What a group's files
say includes pages of files that were read; those that nobody uses (`inactive_file`) are given up before anything is
killed, so they count as free, as they do for a kubelet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Memory:
    """An amount, and where the limit is written down that it comes from; "" where nothing but the machine bounds it."""

    num_bytes: int
    limit: str = ""

    def told(self, kind: str) -> str:
        """For an error, such as "12 MiB of free memory (limited by /sys/fs/cgroup/memory.max)"."""
        return f"{self.num_bytes >> 20} MiB of {kind}" + (f" (limited by {self.limit})" if self.limit else "")

    def shared_by(self, num_processes: int) -> Memory:
        return Memory(self.num_bytes // num_processes, self.limit)


@dataclass(frozen=True, slots=True)
class _Version:
    """Where one version of control groups keeps its numbers."""

    mount: str
    limit: str
    usage: str
    unused: str  # key in memory.stat


_VERSION_1 = _Version("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Version("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def total_memory(root: Path = ROOT, machine_bytes: int | None = None) -> Memory:
    """All that this process may ever have. `root` is where files are read, `machine_bytes` what the machine has."""
    limits = [Memory(limit, str(path)) for path, limit, _ in _limits(root)]
    return _least(limits, _machine_bytes("SC_PHYS_PAGES") if machine_bytes is None else machine_bytes)


def free_memory(root: Path = ROOT, machine_bytes: int | None = None) -> Memory:
    """What is left of it now; `machine_bytes` is what the machine has left."""
    limits = [Memory(max(0, limit - used), str(path)) for path, limit, used in _limits(root)]
    return _least(limits, _machine_bytes("SC_AVPHYS_PAGES") if machine_bytes is None else machine_bytes)


def _least(limits: list[Memory], machine_bytes: int) -> Memory:
    return min([Memory(machine_bytes), *limits], key=lambda memory: memory.num_bytes)


def _machine_bytes(pages: str) -> int:
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _limits(root: Path) -> Iterator[tuple[Path, int, int]]:
    """File, limit and bytes in use of each group around this process that has a limit."""
    for version, group in _groups(root):
        limit = _number(group / version.limit)
        if limit is not None:
            used = (_number(group / version.usage) or 0) - _statistic(group / "memory.stat", version.unused)
            yield group / version.limit, limit, max(0, used)


def _groups(root: Path) -> Iterator[tuple[_Version, Path]]:
    """This process' groups that count memory, and all that they lie in.

    NOTE: a container may see its own group at the mount's top while the path is the host's: then only the top is there.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _VERSION_1 if controllers else _VERSION_2
        parts = [part for part in PurePosixPath(path).parts if part != "/"]
        parts = [] if ".." in parts else parts  # outside of what this process sees
        for length in range(len(parts), -1, -1):
            yield version, root.joinpath(version.mount, *parts[:length])


def _number(path: Path) -> int | None:
    """None: no such file, or `max`, which is none."""
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _statistic(path: Path, key: str) -> int:
    found = (line.split() for line in _read(path).splitlines())
    return next((int(words[1]) for words in found if len(words) == 2 and words[0] == key), 0)


def _read(path: Path) -> str:
    """The file's text; "" if it is not there or may not be read, as outside Linux."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
