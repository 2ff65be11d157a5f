"""Sums and gathers over memory that all ranks of one machine share, each telling the others by a byte.

Owns: the memory, the byte sockets and the order of use. Must not know: models, steps.

gloo hands each collective to a thread of its own: at least four changes of thread where this needs none if the other
rank has come first. Who waits sleeps in the kernel, never in a loop: ranks may outnumber cores. Every rank adds the
parts in the same order, so that all hold the same bits.

Each rank writes its part to a place of its own and then tells the others. There are two places, used in turn: who has
been told of collective n + 1 knows that its peers have read n, so the place of n is free again for n + 2. What lies
there may be used until one's own next call, which is what tells the others.

Before a rank tells the others it writes down how long it has worked on the step, without its waits. So when rank 0
leaves the last collective of a step, it finds the times of all, with no message and no wait of its own.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time

import torch

from specpipe.engine.parallel.mesh import AREA_BYTES, MATRIX_BYTES, MeshEnd, size_bytes, times_start
from specpipe.errors import WorkerUnavailableError

PREPARING_TIMEOUT_S = 600.0  # ranks pack their weights at their own pace
_MAX_KEPT_VIEWS = 1024  # of areas by size: a step has a few sizes, which differ with its number of rows


class SharedMemory:
    """One rank's end. `fd` is the memory, `size_bytes(size)` long; `peers` has a socket to each other rank."""

    def __init__(self, rank: int, size: int, fd: int, peers: dict[int, socket.socket]) -> None:
        self.rank = rank
        self.size = size
        self._peers = peers
        self._memory = mmap.mmap(fd, size_bytes(size))
        self._whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._views: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}
        self._turn = 0
        self._worked_s = memoryview(self._memory)[times_start(size) : size_bytes(size)].cast("d")  # by rank
        self._step_began_s = 0.0
        self._waited_s = 0.0  # for others, in this step
        self.limit_time(PREPARING_TIMEOUT_S)

    def limit_time(self, timeout_s: float) -> None:
        """From now on a peer that lets its part wait for longer is lost."""
        self._timeout_s = timeout_s
        seconds = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for peer in self._peers.values():
            peer.settimeout(None)  # the kernel's own limit takes one call where Python's takes three
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Add up all ranks' `x` (float32, contiguous), in place."""
        flat = x.view(-1)
        step = AREA_BYTES // x.itemsize
        for start in range(0, len(flat), step):
            part = flat[start : start + step]
            areas = self._exchange(part)
            torch.add(areas[0], areas[1], out=part)
            for area in areas[2:]:
                part.add_(area)
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' `x`, which must fit an area. They are valid until the next call."""
        return [area.view(x.shape) for area in self._exchange(x.reshape(-1))]

    def join_columns(self, x: torch.Tensor, first: int, num_columns: int) -> torch.Tensor:
        """On rank 0 all ranks' columns side by side, [num_rows, num_columns]; `x` begins at column `first`.

        Every rank writes its columns where rank 0 reads them: the result is no copy, and is valid until the next call.
        """
        max_rows = MATRIX_BYTES // (num_columns * x.itemsize)
        if len(x) <= max_rows:
            return self._join(x, first, num_columns)
        result = x.new_empty(len(x), num_columns)  # never written on other ranks
        for rows, part in zip(result.split(max_rows), x.split(max_rows), strict=True):
            joined = self._join(part, first, num_columns)
            if self.rank == 0:
                rows.copy_(joined)
        return result

    def begin_step(self) -> None:
        """This rank's work on a step begins now."""
        self._step_began_s, self._waited_s = time.perf_counter(), 0.0

    def end_step(self) -> list[float]:
        """Milliseconds that each rank has worked on the step: this one until now, the others until they told of their
        part in its last collective. Waits for one another are left out."""
        self._note_work(time.perf_counter())
        return [seconds * 1e3 for seconds in self._worked_s]

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _exchange(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Publish `part`, wait for everyone's and return all."""
        areas = self._areas(len(part), part.dtype)
        areas[self.rank].copy_(part)
        self._meet()
        return areas

    def _join(self, x: torch.Tensor, first: int, num_columns: int) -> torch.Tensor:
        start = 2 * self.size * AREA_BYTES + self._turn * MATRIX_BYTES
        num_bytes = len(x) * num_columns * x.itemsize
        matrix = self._whole[start : start + num_bytes].view(x.dtype).view(len(x), num_columns)
        matrix[:, first : first + x.shape[1]].copy_(x)
        self._meet()
        return matrix

    def _areas(self, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """This turn's areas by rank, `length` numbers each. Views are kept: to make one costs more than to use it."""
        areas = self._views.get((self._turn, length, dtype))
        if areas is None:
            if len(self._views) >= _MAX_KEPT_VIEWS:
                self._views.clear()
            starts = [(2 * rank + self._turn) * AREA_BYTES for rank in range(self.size)]
            areas = [self._whole[start : start + length * dtype.itemsize].view(dtype) for start in starts]
            self._views[self._turn, length, dtype] = areas
        return areas

    def _meet(self) -> None:
        """Tell all peers that this rank's part is there, and wait until theirs are. Ends a turn."""
        arrived_s = time.perf_counter()
        self._note_work(arrived_s)
        for rank, peer in self._peers.items():
            self._tell(rank, peer)
        for rank, peer in self._peers.items():
            self._hear(rank, peer)
        self._waited_s += time.perf_counter() - arrived_s
        self._turn ^= 1

    def _note_work(self, now_s: float) -> None:
        self._worked_s[self.rank] = now_s - self._step_began_s - self._waited_s

    def _tell(self, rank: int, peer: socket.socket) -> None:
        try:
            peer.send(b"\0")
        except OSError as error:
            raise WorkerUnavailableError(f"rank {rank} is gone ({error})") from error

    def _hear(self, rank: int, peer: socket.socket) -> None:
        try:
            heard = peer.recv(1)
        except BlockingIOError:
            raise WorkerUnavailableError(f"rank {rank} did not answer within {self._timeout_s:g} s") from None
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
