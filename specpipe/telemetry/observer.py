"""What a worker's step loop tells about its work, for metrics.

Owns: `StepObserver`, the seam between the loops and whoever counts, the one that counts nothing, and `WorkerLoad`, what
a loop says when asked. Must not know: OpenTelemetry, sessions, threads. A loop calls its observer on the model thread
only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

IdleCause = Literal["no sessions", "extension", "slots", "paused", "exhausted"]
"""Why a worker with nothing to run runs nothing. `no sessions`: none is open, or none needs anything more.
`extension`: the target waits for drafts. `slots`: sessions wait for KV slots. `paused`: the sessions' coordinators are
silent. `exhausted`: the draft trees have grown as far as they may."""

ExtensionOutcome = Literal["grafted", "late", "stale", "pushed"]
"""Of a target worker: grafted at the base it was made for, below tokens committed since, or dropped. Of a draft worker
there is only `pushed`. The target's own lookups are no extensions."""


class StepObserver(Protocol):
    """Calls are cheap (microseconds) and never raise."""

    def step(self, seconds: float, *, num_sessions: int, num_rows: int, num_prefill_rows: int, num_nodes: int) -> None:
        """A step has just ended, and took so long. Of its `num_rows` rows, `num_prefill_rows` are of sessions that
        are not decoding yet and `num_nodes` are tree nodes; the others are last committed tokens."""
        ...

    def idle(self, cause: IdleCause) -> None:
        """From now on nothing runs, until the start of the step that `step` tells next. May be said again and again,
        with the same cause or another one: each time ends what was said before."""
        ...

    def extension(self, outcome: ExtensionOutcome, *, num_nodes: int, lag_s: float | None = None) -> None:
        """One came with so many nodes (pushed: was sent). `lag_s`: from the commit that made the tokens below which it
        was grafted final, to its arrival; None: it was not the first one since, or nobody knows."""
        ...

    def preempted(self) -> None:
        """A session has lost its slots to older ones."""
        ...

    def prefix(self, *, num_cached: int, num_computed: int) -> None:
        """A session was given slots: K and V of so many of its tokens were there, of the others they are to be
        computed. `num_cached` is 0 where no prefix was found."""
        ...


class NullObserver:
    """Of a process without metrics."""

    def step(
        self, seconds: float, *, num_sessions: int, num_rows: int, num_prefill_rows: int, num_nodes: int
    ) -> None: ...

    def idle(self, cause: IdleCause) -> None: ...

    def extension(self, outcome: ExtensionOutcome, *, num_nodes: int, lag_s: float | None = None) -> None: ...

    def preempted(self) -> None: ...

    def prefix(self, *, num_cached: int, num_computed: int) -> None: ...


NULL_OBSERVER: StepObserver = NullObserver()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What a worker holds at one moment. All zero but for slots when nothing is asked of it."""

    num_running: int = 0  # sessions that hold slots, or need none
    num_queued: int = 0  # that wait for slots
    num_paused: int = 0  # of silent coordinators, with slots or without
    num_finished: int = 0  # whose answer has ended, and that are not closed yet
    num_tree_nodes: int = 0  # of all sessions
    num_used_slots: int = 0  # held by sessions
    num_cached_slots: int = 0  # held by nobody, with what an earlier session computed
    num_free_slots: int = 0  # neither
    num_evicted_slots: int = 0  # cached ones that were taken for something else, since the process began


class LoadedLoop(Protocol):
    """A step loop that says what it holds."""

    def load(self) -> WorkerLoad:
        """Called on another thread than the loop's: numbers that change meanwhile may belong to two moments."""
        ...
