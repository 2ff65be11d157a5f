"""The numbers of a worker: what its loop tells of steps, and what it and its service hold when somebody looks.

Owns: a worker's metrics, defined in docs/metrics.md. Must not know: OpenTelemetry, sessions, models.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from specpipe.telemetry.instruments import Counter, Description, Histogram, Instruments, Labels, Read, Readings
from specpipe.telemetry.observer import ExtensionOutcome, IdleCause, LoadedLoop, WorkerLoad

Kind = Literal["draft", "target"]

SECONDS_BOUNDS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5,
)  # fmt: skip
TOKENS_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

_OUTCOMES: dict[Kind, tuple[ExtensionOutcome, ...]] = {"draft": ("pushed",), "target": ("grafted", "late", "stale")}


class WorkerMetrics:
    """A StepObserver. `watch` gives it the loop to be asked for what is held; until then nothing is."""

    def __init__(self, kind: Kind, instruments: Instruments, clock: Callable[[], float] = time.perf_counter) -> None:
        self._kind = kind
        self._instruments = instruments
        self._idle = IdleTime(clock)
        self._loop: LoadedLoop | None = None
        counter, histogram, outcomes = self._counter, self._histogram, _OUTCOMES[kind]
        self._seconds = histogram("step.duration", "s", "Forward time of a step.", SECONDS_BOUNDS)
        self._tokens = histogram("step.tokens", "{token}", "Rows of a step.", TOKENS_BOUNDS)
        self._step_sessions = counter("step.sessions", "{session}", "Sessions with rows, added up over steps.")
        self._rows = counter("step.rows", "{token}", "Rows of steps.", type=("prefill", "decode", "node"))
        idle = self._describe("idle_time", "s", "Time in which no step ran, between steps apart.", "cause")
        instruments.observe(idle, self._read_idle)
        self._extensions = counter("extensions", "{extension}", "Extensions that came or went.", outcome=outcomes)
        self._extension_nodes = counter("extension.nodes", "{token}", "Nodes in extensions.", outcome=outcomes)
        self._lag = histogram("extension.lag", "s", "From a commit to its first extension.", SECONDS_BOUNDS)
        self._preemptions = counter("preemptions", "{preemption}", "Sessions that lost their slots to older ones.")
        self._lookups = counter("prefix_cache.lookups", "{lookup}", "Sessions given slots.", result=("hit", "miss"))
        self._prefix_tokens = counter(
            "prefix_cache.tokens", "{token}", "Tokens of sessions given slots.", state=("cached", "computed")
        )
        self._declare_load()

    def watch(self, loop: LoadedLoop) -> None:
        self._loop = loop

    def watch_service(
        self,
        *,
        num_waiting: Callable[[], tuple[int, int]],
        num_dropped: Callable[[], tuple[int, int]],
        num_rejected: Callable[[], int],
        num_streams: Callable[[], int],
    ) -> None:
        """Of the process around the loop; pairs are what comes in and what goes out. Called once, before the start."""
        observe, gauge, kind = self._instruments.observe, self._instruments.gauge, self._kind

        def both(read: Callable[[], tuple[int, int]]) -> Read:
            return lambda: dict(zip([(kind, "in"), (kind, "out")], read(), strict=True))

        waiting = self._describe("mailbox.sessions", "{session}", "Sessions with waiting messages.", "direction")
        gauge(waiting, both(num_waiting))
        dropped = self._describe("mailbox.drops", "{message}", "Messages that gave way to newer ones.", "direction")
        observe(dropped, both(num_dropped))
        observe(
            self._describe("rejected_messages", "{message}", "Malformed messages."), lambda: {(kind,): num_rejected()}
        )
        gauge(self._describe("streams", "{stream}", "Coordinators connected."), lambda: {(kind,): num_streams()})

    # StepObserver

    def step(self, seconds: float, *, num_sessions: int, num_rows: int, num_prefill_rows: int, num_nodes: int) -> None:
        kind = self._kind
        self._idle.end_before(seconds)
        self._seconds.record(seconds, kind)
        self._tokens.record(num_rows, kind)
        self._step_sessions.add(num_sessions, kind)
        if num_prefill_rows:
            self._rows.add(num_prefill_rows, kind, "prefill")
        if num_nodes:
            self._rows.add(num_nodes, kind, "node")
        self._rows.add(num_rows - num_prefill_rows - num_nodes, kind, "decode")

    def idle(self, cause: IdleCause) -> None:
        self._idle.begin(cause)

    def extension(self, outcome: ExtensionOutcome, *, num_nodes: int, lag_s: float | None = None) -> None:
        self._extensions.add(1, self._kind, outcome)
        self._extension_nodes.add(num_nodes, self._kind, outcome)
        if lag_s is not None:
            self._lag.record(lag_s, self._kind)

    def preempted(self) -> None:
        self._preemptions.add(1, self._kind)

    def prefix(self, *, num_cached: int, num_computed: int) -> None:
        self._lookups.add(1, self._kind, "hit" if num_cached else "miss")
        self._prefix_tokens.add(num_cached, self._kind, "cached")
        self._prefix_tokens.add(num_computed, self._kind, "computed")

    # Declaring

    def _describe(self, name: str, unit: str, text: str, *labels: str) -> Description:
        return Description(name=f"specpipe.{name}", unit=unit, text=text, labels=("kind", *labels))

    def _counter(self, name: str, unit: str, text: str, **known: Sequence[str]) -> Counter:
        """With at most one label beside the kind: its name, and its values."""
        values = [(self._kind, value) for values in known.values() for value in values]
        return self._instruments.counter(self._describe(name, unit, text, *known), values or [(self._kind,)])

    def _histogram(self, name: str, unit: str, text: str, bounds: Sequence[float]) -> Histogram:
        return self._instruments.histogram(self._describe(name, unit, text), bounds)

    def _declare_load(self) -> None:
        """What the loop holds, asked when somebody looks."""
        gauge, kind = self._instruments.gauge, self._kind

        def states(**counts: Callable[[WorkerLoad], int]) -> Read:
            return lambda: {(kind, state): count(self._load()) for state, count in counts.items()}

        sessions = self._describe("sessions", "{session}", "Open sessions.", "state")
        gauge(
            sessions,
            states(
                running=lambda load: load.num_running,
                queued=lambda load: load.num_queued,
                paused=lambda load: load.num_paused,
                finished=lambda load: load.num_finished,
            ),
        )
        slots = self._describe("slots", "{slot}", "KV slots.", "state")
        gauge(
            slots,
            states(
                used=lambda load: load.num_used_slots,
                cached=lambda load: load.num_cached_slots,
                free=lambda load: load.num_free_slots,
            ),
        )
        nodes = self._describe("tree.nodes", "{token}", "Nodes held in draft trees.")
        gauge(nodes, lambda: {(kind,): self._load().num_tree_nodes})
        evicted = self._describe("prefix_cache.evictions", "{slot}", "Cached slots taken for something else.")
        self._instruments.observe(evicted, lambda: {(kind,): self._load().num_evicted_slots})

    def _load(self) -> WorkerLoad:
        return WorkerLoad() if self._loop is None else self._loop.load()

    def _read_idle(self) -> Readings:
        return {(self._kind, cause): seconds for (cause,), seconds in self._idle.read().items()}


class IdleTime:
    """Seconds without a step, by cause; what goes on now included. `read` alone may be called on another thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._totals: dict[str, float] = dict.fromkeys(get_args(IdleCause), 0.0)
        self._shown = dict(self._totals)
        self._now: tuple[IdleCause, float] | None = None  # why nothing runs, since when

    def begin(self, cause: IdleCause) -> None:
        now_s = self._clock()
        with self._lock:
            self._end(now_s)
            self._now = (cause, now_s)

    def end_before(self, seconds: float) -> None:
        """It ended so long ago, with the step that ends now."""
        if self._now is not None:
            with self._lock:
                self._end(self._clock() - seconds)

    def read(self) -> dict[Labels, float]:
        """Never falls: what is counted for a step that runs already is not taken back when the step ends."""
        with self._lock:
            current = dict(self._totals)
            if self._now is not None:
                cause, since_s = self._now
                current[cause] += max(0.0, self._clock() - since_s)
            self._shown = {cause: max(self._shown[cause], seconds) for cause, seconds in current.items()}
            return {(cause,): seconds for cause, seconds in self._shown.items()}

    def _end(self, end_s: float) -> None:
        if self._now is not None:
            cause, since_s = self._now
            self._totals[cause] += max(0.0, end_s - since_s)
            self._now = None
