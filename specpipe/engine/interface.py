"""What the engine offers to a worker: one forward pass over a ragged batch of sessions.

Owns: the vocabulary between schedulers (pure Python) and the model runner. Must not know: torch, gRPC.
`specpipe.engine.runner.ModelRunner` is the real implementation, `specpipe.testing.TableModel` the one for pure tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specpipe.types import ModelInfo


@dataclass(slots=True, kw_only=True)
class SessionRows:
    """One session's rows in one step.

    Committed rows come first: a chunk of prompt, or committed tokens not yet computed. Row i of them has position
    `num_computed + i`, writes the slot `context_slots[num_computed + i]` and sees `context_slots[: its position + 1]`.

    Tree rows follow. Row j of them has index k = `tree_rows[j]` in the tree, stands at `tree_positions[k]`, writes
    `tree_slots[k]` and sees all of `context_slots` plus those `tree_slots[k]` for which bit k of `tree_visible[j]` is
    set: its ancestors and itself.
    `tree_slots` may also hold nodes computed in earlier steps (on the draft worker).
    """

    session: int
    context_slots: Sequence[int]  # slot of each committed position, computed or computed by this step
    num_computed: int  # committed positions whose K and V are already in their slots
    tokens: Sequence[int]  # committed rows then tree rows
    num_committed_rows: int  # len(context_slots) == num_computed + num_committed_rows whenever there are tree rows
    tree_slots: Sequence[int] = ()
    tree_rows: Sequence[int] = ()  # per tree row: index into tree_slots of its own slot
    tree_positions: Sequence[int] = ()  # per entry of tree_slots: its position in the whole sequence
    tree_visible: Sequence[int] = ()  # per tree row: bits over tree_slots
    wants_logits: Sequence[bool] = ()  # per row


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """One step: at least one row. Sessions appear once each."""

    sessions: list[SessionRows] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(len(rows.tokens) for rows in self.sessions)


class StepModel(Protocol):
    """A loaded model with its KV slots. Called from one thread only."""

    info: ModelInfo
    num_slots: int  # slot 0 is scratch for padding and never named by a batch

    @property
    def rank_ms(self) -> Sequence[float]:
        """How long each tensor-parallel rank worked on the last forward pass, rank 0 first, without its waits for the
        others. Empty where that is not measured: with one rank, or ranks that share no memory."""
        ...

    def forward(self, batch: StepBatch) -> npt.NDArray[np.float32]:
        """Compute all rows, write their K and V, and return logits of the rows that want them.

        Returns [num_wanted, vocab] float32 in order of (session, row), cut to `info.vocab_size` columns; the next call
        may overwrite it. A row may hold NaN: the caller fails that session only. Raises SpecpipeError if the batch
        breaks a limit of the model.
        """
        ...

    def clear_slots(self, slots: Sequence[int]) -> None:
        """Zero slots that may hold NaN, before they are used again."""
        ...
