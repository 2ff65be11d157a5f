"""Sums and gathers over memory that all ranks of one machine share, each telling the others by a byte.

Owns: the memory, the byte sockets and the order of use. Must not know: models, steps.

gloo hands each collective to a thread of its own: at least four changes of thread where this needs none if the other
rank has come first. Every rank adds the parts in the same order, so that all hold the same bits.

Each rank writes its part to an area of its own and then tells the others. There are two areas per rank, used in turn:
who has been told of collective n + 1 knows that its peers have read n, so its area of n is free again for n + 2.
"""

from __future__ import annotations

import mmap
import os
import socket

import torch

from specpipe.engine.parallel.mesh import AREA_BYTES, MeshEnd, size_bytes
from specpipe.errors import WorkerUnavailableError


class SharedMemory:
    """One rank's end. `fd` is the memory, `size_bytes(size)` long; `peers` has a socket to each other rank."""

    def __init__(self, rank: int, size: int, fd: int, peers: dict[int, socket.socket]) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = 600.0
        self._peers = peers
        self._memory = mmap.mmap(fd, size_bytes(size))
        self._whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._turn = 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Add up all ranks' `x` (float32, contiguous), in place."""
        flat = x.view(-1)
        step = AREA_BYTES // x.itemsize
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            areas = self._exchange(part)
            torch.add(areas[0], areas[1], out=part)
            for area in areas[2:]:
                part.add_(area)
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' `x`; it must fit an area. The result is valid until the next collective but one."""
        return [area.view(x.shape) for area in self._exchange(x.view(-1))]

    def fits(self, x: torch.Tensor) -> bool:
        return bool(x.numel() * x.itemsize <= AREA_BYTES)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _exchange(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Publish `part` and wait for everyone's."""
        self._area(self.rank, part).copy_(part)
        for peer in self._peers.values():
            self._tell(peer)
        for rank, peer in self._peers.items():
            self._hear(rank, peer)
        areas = [self._area(rank, part) for rank in range(self.size)]
        self._turn ^= 1
        return areas

    def _area(self, rank: int, like: torch.Tensor) -> torch.Tensor:
        start = (2 * rank + self._turn) * AREA_BYTES
        return self._whole[start : start + like.numel() * like.itemsize].view(like.dtype)

    def _tell(self, peer: socket.socket) -> None:
        try:
            peer.sendall(b"\0")
        except OSError as error:
            raise WorkerUnavailableError(f"rank {self.rank}: a rank is gone ({error})") from error

    def _hear(self, rank: int, peer: socket.socket) -> None:
        try:
            peer.settimeout(self.timeout_s)
            heard = peer.recv(1)
        except TimeoutError:
            raise WorkerUnavailableError(f"rank {rank} did not answer within {self.timeout_s:.0f} s") from None
        except OSError as error:
            raise WorkerUnavailableError(f"rank {rank} is gone ({error})") from error
        if not heard:
            raise WorkerUnavailableError(f"rank {rank} is gone")


def open_end(end: MeshEnd, rank: int) -> SharedMemory:
    """Turn a rank's descriptors into its end. They are given away."""
    peers = {peer: socket.socket(fileno=fd) for peer, fd in enumerate(end.peer_fds) if fd >= 0}
    shared = SharedMemory(rank, len(end.peer_fds), end.memory_fd, peers)
    os.close(end.memory_fd)
    return shared
