"""What the draft model proposed below each expanded node of one session's tree.

Owns: fans (ranked candidates) and which candidate is the next worth a node. Must not know: models, slots, sessions.

The first candidates of a fan are children of its node, in rank order; the others wait here, because the tree is bounded
and a commit may bring their node near the base, where they are worth more.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from specpipe.tree import Estimate, Node

Candidate = tuple[int, float]
"""(token, confidence)"""


@dataclass(slots=True)
class Fan:
    candidates: Sequence[Candidate]  # best first
    step: int  # the draft step that ranked them
    num_taken: int = 0  # candidates, from the first, that are children of the node


class Fans:
    """The fans of one tree. A node has one exactly if it is expanded."""

    def __init__(self, estimate: Estimate, drafter: str) -> None:
        self._estimate = estimate
        self._drafter = drafter
        self._fans: dict[Node, Fan] = {}
        self._waiting: list[tuple[float, int, Node]] = []  # heap: (-reach of a fan's next candidate, order, its node)
        self._order = itertools.count()

    def __contains__(self, node: Node) -> bool:
        return node in self._fans

    def __iter__(self) -> Iterator[Node]:
        return iter(self._fans)

    def put(self, node: Node, fan: Fan) -> None:
        """Keep the fan of a node that has just been expanded; its candidates wait once `enqueue` is called."""
        self._fans[node] = fan

    def next_of(self, node: Node) -> tuple[Candidate, int] | None:
        """The best candidate of `node` that is not its child yet, and the step that ranked it."""
        fan = self._fans[node]
        while fan.num_taken < len(fan.candidates) and fan.candidates[fan.num_taken][0] in node.children:
            fan.num_taken += 1
        return (fan.candidates[fan.num_taken], fan.step) if fan.num_taken < len(fan.candidates) else None

    def enqueue(self, node: Node) -> None:
        """Let the next candidate of `node` wait for room in the tree. Call after each change of its children."""
        if (following := self.next_of(node)) is not None:
            (_, confidence), _ = following
            estimate = self._estimate(len(node.children), node.depth + 1, confidence, self._drafter)
            heapq.heappush(self._waiting, (-node.reach * estimate, next(self._order), node))

    @property
    def best_reach(self) -> float:
        """Reach of the best waiting candidate; 0 if none waits."""
        return -self._waiting[0][0] if self._waiting else 0.0

    def pop(self) -> Node:
        """The node whose next candidate is the best that waits; `enqueue` it again after adding that child."""
        return heapq.heappop(self._waiting)[2]

    def rebase(self, alive: Iterable[Node], root: Node, former: Node | None) -> None:
        """After a commit: keep fans of `alive` nodes; `root` takes over the fan of `former`, the last accepted node."""
        root_fan = self._fans.get(former) if former is not None else None
        self._fans = {node: self._fans[node] for node in alive if node in self._fans}
        if root_fan is not None:
            self._fans[root] = root_fan
        self._waiting.clear()
        for node in self._fans:
            self.enqueue(node)

    def clear(self) -> None:
        self._fans.clear()
        self._waiting.clear()
