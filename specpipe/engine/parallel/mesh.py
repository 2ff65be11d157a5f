"""What ranks of one machine share: memory, and a socket between each two. Made by rank 0 before it starts the others.

Owns: the descriptors. Must not know: torch, what is done with them (shared_memory.py).
"""

from __future__ import annotations

import itertools
import os
import socket
from dataclasses import dataclass

# What is larger takes several rounds; pages that are never written cost nothing.
AREA_BYTES = 16 << 20  # for one rank's part of a sum
MATRIX_BYTES = 64 << 20  # for logits, to which every rank writes its columns
TIME_BYTES = 8  # for how long one rank has worked on a step: a float64


def size_bytes(size: int) -> int:
    """Two areas for each rank, then two matrices, then a time for each rank."""
    return times_start(size) + size * TIME_BYTES


def times_start(size: int) -> int:
    return 2 * size * AREA_BYTES + 2 * MATRIX_BYTES


@dataclass(frozen=True, slots=True)
class MeshEnd:
    """File descriptors of one rank's end, owned by whoever holds this."""

    memory_fd: int
    peer_fds: list[int]  # by rank; its own is -1

    @property
    def fds(self) -> list[int]:
        return [self.memory_fd, *(fd for fd in self.peer_fds if fd >= 0)]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def create_mesh(size: int) -> list[MeshEnd]:
    """The ends of `size` ranks of one machine, by rank."""
    memory_fd = os.memfd_create("specpipe-ranks")
    os.ftruncate(memory_fd, size_bytes(size))
    peer_fds = [[-1] * size for _ in range(size)]
    for one, other in itertools.combinations(range(size), 2):
        ends = socket.socketpair()
        peer_fds[one][other], peer_fds[other][one] = (end.detach() for end in ends)
    ends_by_rank = [MeshEnd(os.dup(memory_fd), fds) for fds in peer_fds]
    os.close(memory_fd)
    return ends_by_rank
