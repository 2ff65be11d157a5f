"""What a worker tells about one session's part in its steps, for traces and for the live page.

Owns: the values of a Report. Must not know: spans, clocks, protobuf (`specpipe.codec_reports` translates), how a worker
comes by them (`specpipe.recording`).

A worker writes down what it did and how long that took, counted from when the session's Open reached it. It never says
what time it is: the coordinator lays the records of all workers out on its own clock (`coordinator.trace_layout`).

The sums of records are those of the statistics. Of VERIFY records: one a round, with exposed_ms, num_late, num_stale,
num_verified and num_accepted of that round's RoundStats. Of DRAFT records: the share_ms of all since the last extension
is what the next extension tells; the last records of a session may be of steps that no extension told of any more.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

MAX_REPORT_RECORDS = 512
"""Records of one Report: beyond it the oldest are dropped and counted."""


class StepKind(enum.Enum):
    PREFILL = "prefill"
    VERIFY = "verify"
    DRAFT = "draft"


class Outcome(enum.Enum):
    """How a round began (docs/metrics.md)."""

    NONE = "none"  # the first round, or nothing drafts
    HIT = "hit"
    LOOKUP = "lookup"  # a hit by the target's own lookup alone
    MISS = "miss"


class SessionEventKind(enum.Enum):
    PREEMPTED = "preempted"  # its slots were taken for older sessions
    RESTARTED = "restarted"  # a commit left the draft worker's tree
    RESYNC = "resync"  # messages were lost: tokens were asked for
    EXHAUSTED = "exhausted"  # nothing more will be drafted


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of a worker, as one session saw it. Durations are milliseconds of the worker's clock."""

    kind: StepKind
    step: int  # the worker's number of it; of a draft step the one that its extensions tell
    round: int = 0  # VERIFY: which one of this session, from 1
    base: int = 0  # committed tokens when the step began
    since_open_ms: float = 0.0  # from the arrival of Open to the start of the forward pass
    forward_ms: float = 0.0
    share_ms: float = 0.0  # DRAFT: of forward_ms, by rows
    queue_ms: float = 0.0  # before the step: ready since Open, its last step, a wait or (draft) a commit, and not run
    exposed_ms: float = 0.0  # before the step nothing ran, and this session waited for an extension
    num_rows: int = 0  # of this session
    num_tree_nodes: int = 0  # VERIFY: held when the step began; DRAFT: held when it had ended
    num_verified: int = 0
    num_accepted: int = 0
    num_committed: int = 0  # tokens that the round made final
    outcome: Outcome = Outcome.NONE
    num_late: int = 0  # extensions since the last round
    num_stale: int = 0
    batch_sessions: int = 0  # sessions with rows in the step
    batch_tokens: int = 0  # rows of all of them
    draft_steps: tuple[int, ...] = ()  # VERIFY: of which a node was verified, as Commit.verified_draft_steps
    rank_ms: tuple[float, ...] = ()  # work of each rank without its waits for others, rank 0 first; see StepModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEvent:
    kind: SessionEventKind
    since_open_ms: float
    base: int = 0  # committed tokens then


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a worker has done for a session since its last one; see the proto."""

    session: int
    since_open_ms: float = 0.0  # when it was said
    steps: tuple[StepRecord, ...] = ()
    events: tuple[SessionEvent, ...] = ()
    num_lost: int = 0  # records that had to be dropped

    @classmethod
    def bounded(
        cls,
        *,
        session: int,
        since_open_ms: float,
        steps: tuple[StepRecord, ...],
        events: tuple[SessionEvent, ...],
        num_lost: int = 0,
    ) -> Report:
        """With the newest records, as many as a Report may hold."""
        kept_steps, kept_events = steps[-MAX_REPORT_RECORDS:], events[-MAX_REPORT_RECORDS:]
        return cls(
            session=session,
            since_open_ms=since_open_ms,
            steps=kept_steps,
            events=kept_events,
            num_lost=num_lost + len(steps) - len(kept_steps) + len(events) - len(kept_events),
        )

    def merged_with(self, later: Report) -> Report:
        """One report that says what both say, as far as the bound allows."""
        return Report.bounded(
            session=self.session,
            since_open_ms=later.since_open_ms,
            steps=self.steps + later.steps,
            events=self.events + later.events,
            num_lost=self.num_lost + later.num_lost,
        )
