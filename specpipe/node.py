"""One node of a draft tree: a guessed token below the committed text of a session.

Owns: `Node`. Must not know: the tree's bounds, ranking, extensions (specpipe.tree), models, slots' contents.
"""

from __future__ import annotations

from specpipe.types import Proposal


class Node:
    """One guessed token. Position in the whole sequence: base + depth - 1.

    `slot`, `is_verified` and `is_sent` belong to the worker that holds the tree; the tree itself never reads them.
    """

    __slots__ = (
        "children",
        "confidence",
        "depth",
        "draft_step",
        "drafted_confidence",
        "drafter",
        "estimate",
        "is_sent",
        "is_verified",
        "parent",
        "proposal",
        "rank",
        "reach",
        "slot",
        "token",
    )

    def __init__(self, parent: Node | None, token: int, confidence: float, drafter: str, draft_step: int) -> None:
        self.parent = parent
        self.token = token
        self.confidence = confidence  # as the drafter said
        self.drafter = drafter
        self.draft_step = draft_step  # the draft step that made it; 0: unknown
        # The highest that came from a draft step, whoever else guessed the same; None: none did.
        self.drafted_confidence = confidence if draft_step > 0 else None
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.rank = 0  # among its parent's children
        self.estimate = 1.0  # calibrated probability given that the parent is committed
        self.reach = 1.0  # product of estimates along the path: estimated probability of being committed
        self.children: dict[int, Node] = {}  # by token, in rank order
        self.proposal: Proposal | None = None  # what its sampled child was drawn from; `parent` there means nothing
        self.slot: int | None = None
        self.is_verified = False
        self.is_sent = False

    def __repr__(self) -> str:
        return f"Node(path={[node.token for node in self.path()]}, rank={self.rank}, reach={self.reach:.3g})"

    def path(self) -> list[Node]:
        """Nodes from the one below the root down to this one; empty for the root."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def sampled_child(self) -> Node | None:
        return self.children.get(self.proposal.token) if self.proposal is not None else None

    @property
    def is_sampled(self) -> bool:
        proposal = self.parent.proposal if self.parent is not None else None
        return proposal is not None and proposal.token == self.token

    @property
    def order(self) -> tuple[bool, float, int]:
        """What siblings are ranked by, rising."""
        return not self.is_sampled, -self.confidence, self.token
