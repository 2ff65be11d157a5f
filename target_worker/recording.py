"""What a target worker writes down of one session's steps, for its reports.

Owns: the records of a target step. Must not know: clocks, messages, how steps are planned.
"""

from __future__ import annotations

from specpipe.recording import Recorder, StepRun
from specpipe.reports import Outcome, StepKind
from specpipe.types import Commit, RoundStats


class RoundRecorder(Recorder):
    """A PREFILL record for each step that leaves a part of the text to compute, a VERIFY record for each round.

    A step whose logits decided nothing, since they hold NaN, is no round and has no record.
    """

    def add_prefill(self, run: StepRun, *, base: int, num_rows: int) -> None:
        self._add_step(run, kind=StepKind.PREFILL, base=base, num_rows=num_rows)

    def add_round(self, run: StepRun, commit: Commit, *, num_rows: int, num_tree_nodes: int) -> None:
        """`commit` is of this round alone."""
        stats = commit.stats
        self._add_step(
            run,
            kind=StepKind.VERIFY,
            round=commit.round,
            base=commit.base,
            exposed_ms=stats.exposed_ms,
            num_rows=num_rows,
            num_tree_nodes=num_tree_nodes,
            num_verified=stats.num_verified,
            num_accepted=stats.num_accepted,
            num_committed=len(commit.tokens),
            outcome=_outcome(stats),
            num_late=stats.num_late,
            num_stale=stats.num_stale,
            draft_steps=commit.verified_draft_steps,
        )


def _outcome(stats: RoundStats) -> Outcome:
    """How the one round began that `stats` are of."""
    if stats.num_lookup_hits:
        return Outcome.LOOKUP
    if stats.num_hits:
        return Outcome.HIT
    return Outcome.MISS if stats.num_misses else Outcome.NONE
