"""What the ranks of a group compute together: sums after row-parallel products, rows of the vocabulary's parts.

Owns: the process group (on the CPUs of one host shared memory, between hosts gloo; NCCL on GPUs), its time limits, and
how long each rank has worked on a step. Must not know: models, processes, what a step is for.

The groups are plain objects, not torch.distributed's global one: less is done per call, and several ranks can live in
one process (in tests). All ranks call the same functions in the same order, or all fail when the time limit is over.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from specpipe.engine.parallel.meeting import Meeting
from specpipe.engine.parallel.shared_memory import PREPARING_TIMEOUT_S, SharedMemory
from specpipe.errors import WorkerUnavailableError
from specpipe.ports import LOOPBACK

STEP_TIMEOUT_S = 8.0  # gloo's own default is 30 minutes


class Collective:
    """One rank's end of a group of `size` ranks that meet at `store`. Made by all ranks at the same time.

    With `shared`, nothing travels through torch.distributed, and `store` is not used.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        shared: SharedMemory | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        """`meeting`: where ranks reach one another; without it they are all on this host."""
        self.rank = rank
        self.size = size
        self.num_on_host = meeting.num_on_host_of(rank) if meeting else size
        self._host = meeting.hosts[rank] if meeting else LOOPBACK
        self._device = device
        self._store = store
        self._shared = shared
        self._group: Any = None
        self._step_began_s = self._waited_s = 0.0
        self._times: list[float] = []  # of the step, by rank
        self._connect("prepare", PREPARING_TIMEOUT_S)

    def limit_time(self) -> None:
        """From now on a collective that takes longer than STEP_TIMEOUT_S fails. Called once by all ranks."""
        self._connect("step", STEP_TIMEOUT_S)

    def begin_step(self) -> None:
        """This rank's work on a step begins now."""
        self._step_began_s, self._waited_s, self._times = time.perf_counter(), 0.0, []
        if self._shared is not None:
            self._shared.begin_step()

    def end_step(self) -> list[float]:
        """Milliseconds that each rank has worked on the step, as rank 0 knows them, waits for one another and what
        travels between them left out. Without shared memory they come with the logits: none for a step that has none.
        """
        return self._shared.end_step() if self._shared is not None else self._times

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, the same on each. `x` may be overwritten."""
        if x.dtype in (torch.float32, torch.float64) or self._device.type != "cpu":
            return self._all_reduce(x.contiguous(), dist.ReduceOp.SUM)
        return self._all_reduce(x.float(), dist.ReduceOp.SUM).to(x.dtype)

    def minimum(self, value: int) -> int:
        """The least of all ranks' values."""
        return int(self._all_reduce(torch.tensor([value], device=self._device), dist.ReduceOp.MIN).item())

    def gather_columns(self, x: torch.Tensor, num_columns: int) -> torch.Tensor:
        """On rank 0 all ranks' columns side by side, [num_rows, num_columns]; on the others `x` itself.

        Ranks hold equal numbers of columns, the last ones fewer. NOTE: the result may lie in memory that ranks share;
        it is valid until the next collective.
        """
        if len(x) == 0:
            return x.new_empty(0, num_columns)
        share = -(-num_columns // self.size)
        if self._shared is not None:
            joined = self._shared.join_columns(x, min(num_columns, self.rank * share), num_columns)
            return joined if self.rank == 0 else x
        parts = self._gather(self._padded(x, share))
        if not parts:
            return x
        self._times = [float(part[0, share]) for part in parts if part.shape[1] > share]
        return torch.cat([part[:, :share] for part in parts], dim=1)[:, :num_columns]

    def _padded(self, x: torch.Tensor, share: int) -> torch.Tensor:
        """`x` with `share` columns; on a CPU with one more, in which this rank's milliseconds of the step travel."""
        if self._device.type != "cpu":
            return torch.nn.functional.pad(x, (0, share - x.shape[1])) if x.shape[1] < share else x.contiguous()
        own = torch.nn.functional.pad(x, (0, share + 1 - x.shape[1]))
        own[0, share] = (time.perf_counter() - self._step_began_s - self._waited_s) * 1e3
        return own

    def _gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """On rank 0 all ranks' parts, by rank; none on the others."""
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else []
        with self._failing_together():
            self._group.gather([parts] if parts else [], [own], options).wait()
        return parts

    def _all_reduce(self, x: torch.Tensor, operation: Any) -> torch.Tensor:
        if self._shared is not None and operation == dist.ReduceOp.SUM:
            return self._shared.sum(x)
        if self._shared is not None:
            return torch.stack(self._shared.gather(x)).amin(dim=0)
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        began_s = time.perf_counter()
        with self._failing_together():
            self._group.allreduce([x], options).wait()
        self._waited_s += time.perf_counter() - began_s
        return x

    def _connect(self, name: str, timeout_s: float) -> None:
        if self._shared is not None:
            self._shared.limit_time(timeout_s)
            return
        store, timeout = dist.PrefixStore(name, self._store), timedelta(seconds=timeout_s)
        with self._failing_together():
            if self._device.type == "cpu":
                options = dist.ProcessGroupGloo._Options()
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
                options._timeout = timeout
                self._group = dist.ProcessGroupGloo(store, self.rank, self.size, options)
            else:
                torch.cuda.set_device(self._device)
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """torch's errors become one of ours: a rank is gone, or silent for longer than the limit."""
        try:
            yield
        except RuntimeError as error:
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise WorkerUnavailableError(f"rank {self.rank}: the ranks lost one another ({first_line})") from error


def create_store(host: str, port: int | None = None) -> Any:
    """Where ranks meet: rank 0 opens it on its `host` (port None: a free one) and tells the others its port."""
    listener = socket.create_server((host, 0), family=_family(host)) if port is None else None
    return dist.TCPStore(
        host,
        listener.getsockname()[1] if listener else port,
        is_master=listener is not None,
        timeout=timedelta(seconds=PREPARING_TIMEOUT_S),
        wait_for_workers=False,
        **({"master_listen_fd": listener.detach()} if listener else {}),  # else it would listen on every interface
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
