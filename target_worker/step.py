"""The rows of one target step, session by session.

Owns: `SessionStep`, what a step does for one session, and its translation into the engine's batch. Must not know: how
nodes were chosen, the slot pool, clocks, messages. With several ranks, the batch is what rank 0 would announce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from specpipe.engine.interface import SessionRows, StepBatch
from specpipe.tree import Node
from specpipe.types import Mode
from target_worker.scheduler import Candidate, Load
from target_worker.session import Session


@dataclass(slots=True, eq=False)
class SessionStep:
    """`num_committed` of the session's pending tokens, and nodes below the last one if that is among them."""

    session: Session
    num_committed: int
    nodes: list[Node] = field(default_factory=list)  # parents before children; each holds a slot when rows are made

    @property
    def decodes(self) -> bool:
        """Whether the step gives the session a next token: its last committed token is a row."""
        return self.num_committed == self.session.num_pending

    @property
    def num_wanted(self) -> int:
        """Rows that want logits."""
        return 1 + len(self.nodes) if self.decodes else 0

    @property
    def num_prefill(self) -> int:
        """Committed rows, if the session does not decode yet."""
        return self.num_committed if self.session.num_pending > 1 else 0

    @property
    def load(self) -> Load:
        length = self.session.num_computed + self.num_committed
        seen = self.num_committed * self.session.num_computed + self.num_committed * (self.num_committed + 1) // 2
        return Load(
            rows=self.num_committed + len(self.nodes), attended=seen + sum(length + node.depth for node in self.nodes)
        )

    def candidate(self) -> Candidate:
        session = self.session
        return Candidate(
            root=session.tree.root,
            length=len(session.tokens),
            max_depth=session.max_depth,
            is_fixed=session.mode is Mode.SYNC,
            is_blind=session.is_drawn,
        )

    def rows(self) -> SessionRows:
        session, nodes = self.session, self.nodes
        start = session.num_computed
        return SessionRows(
            session=session.serial,
            context_slots=session.slots[: start + self.num_committed],
            num_computed=start,
            tokens=[*session.tokens[start : start + self.num_committed], *(node.token for node in nodes)],
            num_committed_rows=self.num_committed,
            tree_slots=[node.slot for node in nodes if node.slot is not None],
            tree_rows=range(len(nodes)),
            tree_positions=[len(session.tokens) + node.depth - 1 for node in nodes],
            tree_visible=_visible(nodes),
            wants_logits=[False] * (self.num_committed - 1) + [self.decodes] + [True] * len(nodes),
        )


def total_load(steps: Sequence[SessionStep]) -> Load:
    load = Load(rows=0, attended=0)
    for step in steps:
        load = load.plus(step.load.rows, step.load.attended)
    return load


def create_batch(steps: Sequence[SessionStep]) -> StepBatch:
    return StepBatch(sessions=[step.rows() for step in steps])


def nan_slots(nodes: Sequence[Node], logits: npt.NDArray[np.float32]) -> list[int]:
    """Slots of nodes whose row of `logits`, the root's being the first, holds NaN, walked or not: masked NaN would leak
    through attention."""
    is_nan = np.isnan(logits[1:, 0])
    return [node.slot for node, bad in zip(nodes, is_nan, strict=True) if bad and node.slot is not None]


def _visible(nodes: Sequence[Node]) -> list[int]:
    """Per node, the bits of its ancestors among `nodes` and its own."""
    bits: dict[Node | None, int] = {}
    for i, node in enumerate(nodes):
        bits[node] = bits.get(node.parent, 0) | 1 << i
    return [bits[node] for node in nodes]
