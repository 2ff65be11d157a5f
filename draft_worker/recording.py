"""What a draft worker writes down of one session's steps, for its reports.

Owns: the records of a draft step. Must not know: clocks, messages, how steps are planned.
"""

from __future__ import annotations

from specpipe.recording import Recorder, StepRun
from specpipe.reports import SessionEventKind, StepKind


class DraftRecorder(Recorder):
    """A DRAFT record for each step that ranked something, and whose time an extension tells; a PREFILL record for each
    one that only computed a part of the text. A step that fails the session has none."""

    def __init__(self, session: int, opened_s: float) -> None:
        super().__init__(session, opened_s)
        self._is_exhausted = False

    def add_step(self, run: StepRun, *, base: int, num_rows: int, num_tree_nodes: int, share_ms: float | None) -> None:
        """`num_tree_nodes`: when the step had ended. `share_ms`: as an extension will tell; None: it ranked nothing."""
        if share_ms is None:
            self._add_step(run, kind=StepKind.PREFILL, base=base, num_rows=num_rows)
            return
        self._add_step(
            run,
            kind=StepKind.DRAFT,
            base=base,
            num_rows=num_rows,
            num_tree_nodes=num_tree_nodes,
            share_ms=share_ms,
        )

    def end_drafting(self, now_s: float, *, base: int) -> None:
        """Nothing more will be drafted: said once."""
        if not self._is_exhausted:
            self._is_exhausted = True
            self.add_event(SessionEventKind.EXHAUSTED, now_s, base=base)
