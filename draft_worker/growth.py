"""What bounds a draft tree's growth, and what a step of growth cost.

Owns: values. Must not know: trees, sessions, models.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthRules:
    """How wide and how deep trees grow. The defaults are measured by benchmarks/draft_growth.py."""

    max_nodes: int = 256  # nodes of one session's tree
    max_depth: int = 48  # its depth
    fan: int = 5  # candidates ranked below an expanded node
    min_reach: float = 0.005  # a node of smaller reach is neither kept (unless first-ranked) nor expanded
    min_share: float = 0.05  # a candidate waits while its reach is below this share of the best leaf's ...
    num_free_nodes: int = 32  # ... and the tree has so many nodes
    num_lookups: int = 16  # nodes looked up at once, below one leaf
    min_chain: int = 8  # the first-ranked path grows this deep whatever its reach: a flat draft may be right
    min_wanted_nodes: int = 64  # a session with fewer nodes always grows
    wanted_nodes_per_budget: float = 16.0  # times the nodes that the target would verify next: then it has enough


@dataclass(frozen=True, slots=True)
class DraftStep:
    """The step that made some nodes: what an extension says about it. `share_ms` is one session's, by rows."""

    number: int = 0
    step_ms: float = 0.0
    share_ms: float = 0.0


@dataclass(slots=True)
class ChainTime:
    """Steps spent on the chain that sync mode is drafting."""

    num_steps: int = 0
    step_ms: float = 0.0
    share_ms: float = 0.0

    def add(self, step: DraftStep) -> None:
        self.num_steps += 1
        self.step_ms += step.step_ms
        self.share_ms += step.share_ms
