"""The other ranks as children of rank 0's process, on its host: they share memory with it and die with it.

Owns: their start and what they share. Must not know: what ranks do, when one is lost.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specpipe.config import EngineConfig
from specpipe.engine.parallel.channel import Channel
from specpipe.engine.parallel.group import RankGroup
from specpipe.engine.parallel.mesh import MeshEnd, create_mesh
from specpipe.engine.parallel.rank import RankHello
from specpipe.ports import LOOPBACK
from specpipe.process import cores_before_pinning

if TYPE_CHECKING:
    from specpipe.engine.parallel.shared_memory import SharedMemory


class ChildRanks:
    """See `OtherRanks`."""

    has_one_host = True

    def __init__(self, engine: EngineConfig, size: int, cores: Sequence[int] = ()) -> None:
        """`cores`: of the ranks after the first, as far as there are any."""
        self._engine = engine
        self._size = size
        self._cores = cores
        self._mesh: list[MeshEnd] = []

    def bring(self, group: RankGroup) -> None:
        """Ranks die with the thread that calls this: the main thread."""
        if self._engine.device == "cpu" and hasattr(os, "memfd_create"):
            self._mesh = create_mesh(self._size)
        for rank in range(1, self._size):
            ours, theirs = socket.socketpair()
            with theirs:
                process = _spawn(theirs.fileno(), self._mesh[rank].fds if self._mesh else [])
                group.add(rank, Channel(ours), self._hello(rank), process=process)
            if self._mesh:
                self._mesh[rank].close()

    def _hello(self, rank: int) -> RankHello:
        core = self._cores[rank - 1] if rank - 1 < len(self._cores) else None
        return RankHello.create(
            rank,
            self._size,
            replace(self._engine, core=core),
            memory_fd=self._mesh[rank].memory_fd if self._mesh else -1,
            peer_fds=self._mesh[rank].peer_fds if self._mesh else [],
            cores=sorted(cores_before_pinning()),
        )

    def open_shared(self) -> SharedMemory | None:
        from specpipe.engine.parallel.shared_memory import open_end

        return open_end(self._mesh.pop(0), 0) if self._mesh else None

    def hosts(self, channels: Sequence[Channel]) -> tuple[str, ...]:  # noqa: ARG002 - they are sockets of no host
        return (LOOPBACK,) * self._size

    def close(self) -> None:
        """The group has killed them."""


def _spawn(fd: int, mesh_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """-P: a folder of the user's working directory must not shadow ours."""
    import specpipe

    root = str(Path(specpipe.__file__).resolve().parents[1])
    path = os.environ.get("PYTHONPATH")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "specpipe.engine.parallel.rank", "--role", "target-rank", str(fd)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(fd, *mesh_fds),
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root},
    )
