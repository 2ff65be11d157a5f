"""What a coordinator counts of its workers.

Owns: those metrics (docs/metrics.md). Must not know: requests, messages, clocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from coordinator.events import Cause, Kind
from coordinator.metric_sums import declare_counter
from coordinator.pools import Connection, Pool
from specpipe.telemetry.instruments import Description, Instruments, Labels, Readings

CAUSES = ("unplaced", "lost", "failed", "closed")
"""Why a request goes on without a draft worker."""
STATES = ("connected", "silent", "lost")
GONE: Final = "gone"
"""In place of their addresses: of all workers that are not looked for any more."""


class Coordinating(Protocol):
    """Asked when somebody looks, on any thread."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        ...

    @property
    def num_running(self) -> int: ...

    @property
    def pools(self) -> Mapping[Kind, Pool]: ...

    @property
    def workers(self) -> Sequence[tuple[Kind, str]]: ...


class Losses:
    """Connections lost, by kind and address of their worker.

    Addresses come and go with each pod there ever was; those that are not looked for any more are counted as one. Their
    losses go there once they have been read at their own address, so that the sum over all never falls.
    """

    def __init__(self, looked_for: Callable[[], Sequence[Labels]]) -> None:
        self._looked_for = looked_for
        self._counts: dict[Labels, int] = {}
        self._told: dict[Labels, int] = {}
        self._gone: dict[Labels, int] = {}
        self._lock = threading.Lock()  # a reader moves counts, on any thread

    def add(self, labels: Labels) -> None:
        with self._lock:
            self._counts[labels] = self._counts.get(labels, 0) + 1

    def read(self) -> Readings:
        with self._lock:
            looked_for = dict.fromkeys(self._looked_for(), 0)
            for labels, count in self._told.items():
                if labels not in looked_for and self._counts.get(labels) == count:
                    del self._counts[labels]
                    gone = (labels[0], GONE)
                    self._gone[gone] = self._gone.get(gone, 0) + count
            self._told = looked_for | self._counts
            return self._told | self._gone


class WorkerMetrics:
    """The workers as the coordinator sees them."""

    def __init__(self, instruments: Instruments) -> None:
        self._coordinator: Coordinating | None = None
        self.moves = declare_counter(
            instruments, "session_moves", "{session}", "Lost with a worker.", kind=[kind.value for kind in Kind]
        )
        self.draft_moves = declare_counter(
            instruments, "draft_moves", "{session}", "Left for another worker.", cause=[cause.value for cause in Cause]
        )
        self.fallbacks = declare_counter(
            instruments,
            "fallbacks",
            "{fallback}",
            "Times that a request went on undrafted.",
            cause=CAUSES,
        )
        self._num_dropped = 0  # by connections that are gone
        self._losses = Losses(self._labels)
        labels = ("kind", "address")
        about = Description(name="specpipe.worker.losses", unit="{loss}", text="Connections lost.", labels=labels)
        instruments.observe(about, self._losses.read)
        dropped = Description(
            name="specpipe.dropped_extensions", unit="{extension}", text="Gave way to newer ones on their way."
        )
        instruments.observe(dropped, self._read_dropped)
        sessions = Description(
            name="specpipe.worker.sessions", unit="{session}", text="Of this coordinator.", labels=labels
        )
        instruments.gauge(sessions, self._read_sessions)
        state = Description(
            name="specpipe.worker.state", unit="{worker}", text="1 for the state it is in.", labels=(*labels, "state")
        )
        instruments.gauge(state, self._read_states)

    def watch(self, coordinator: Coordinating) -> None:
        self._coordinator = coordinator

    def lose(self, connection: Connection) -> None:
        self._losses.add((connection.kind.value, connection.address))
        self._num_dropped += connection.link.num_dropped_extensions

    def _labels(self) -> list[Labels]:
        """Kind and address of each worker that is looked for."""
        return [(kind.value, address) for kind, address in self._coordinator.workers] if self._coordinator else []

    def _connections(self) -> list[Connection]:
        pools = self._coordinator.pools.values() if self._coordinator else ()
        return [connection for pool in pools for connection in pool]

    def _read_sessions(self) -> Readings:
        found: dict[Labels, int] = {(one.kind.value, one.address): len(one.sessions) for one in self._connections()}
        return {labels: found.get(labels, 0) for labels in self._labels()}

    def _read_states(self) -> Readings:
        found: dict[Labels, str] = {
            (one.kind.value, one.address): "silent" if one.is_suspect else "connected" for one in self._connections()
        }
        return {
            (*labels, state): int(found.get(labels, "lost") == state) for labels in self._labels() for state in STATES
        }

    def _read_dropped(self) -> Readings:
        return {(): self._num_dropped + sum(one.link.num_dropped_extensions for one in self._connections())}
