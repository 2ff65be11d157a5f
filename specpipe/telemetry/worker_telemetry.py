"""What a worker process says of itself in numbers, or that it says nothing.

Owns: which parts of a worker are asked for numbers. Must not know: OpenTelemetry, what the numbers are.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from specpipe.config import TelemetryConfig
from specpipe.rpc_metrics import RpcMetrics
from specpipe.spans import Role
from specpipe.telemetry.metrics import ProcessMetrics, Serving
from specpipe.telemetry.observer import NULL_OBSERVER, LoadedLoop, StepObserver
from specpipe.telemetry.worker_metrics import Kind, WorkerMetrics

_ROLES: dict[Kind, Role] = {"draft": Role.DRAFT_WORKER, "target": Role.TARGET_WORKER}


class Mailbox(Protocol):
    """A model thread, as far as its mail goes. Pairs are what comes in and what goes out."""

    @property
    def num_waiting(self) -> tuple[int, int]: ...

    @property
    def num_dropped(self) -> tuple[int, int]: ...


class Streams(Protocol):
    """A worker service, as far as its streams go."""

    num_rejected: int
    num_links: int


class WorkerTelemetry:
    """Made before the worker: `observer` goes to its loop, `rpc` to its server."""

    def __init__(self, kind: Kind, config: TelemetryConfig, host: str) -> None:
        self._process = ProcessMetrics(_ROLES[kind], config, host)
        self._metrics = WorkerMetrics(kind, self._process.instruments) if self._process.is_on else None

    @property
    def observer(self) -> StepObserver:
        return self._metrics or NULL_OBSERVER

    @property
    def rpc(self) -> RpcMetrics | None:
        return self._process.rpc

    def watch_loop(self, loop: LoadedLoop) -> None:
        """As soon as it is there."""
        if self._metrics is not None:
            self._metrics.watch(loop)

    def watch_service(self, mailbox: Mailbox, streams: Streams, server: Serving) -> None:
        """Before `told`."""
        if self._metrics is None:
            return
        self._process.watch(server)
        self._metrics.watch_service(
            num_waiting=lambda: mailbox.num_waiting,
            num_dropped=lambda: mailbox.num_dropped,
            num_rejected=lambda: streams.num_rejected,
            num_streams=lambda: streams.num_links,
        )

    def told(self) -> AbstractAsyncContextManager[str]:
        """See ProcessMetrics."""
        return self._process.told()
