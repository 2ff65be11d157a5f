"""Lookups: nodes of a draft tree that nobody has ranked yet, what followed the same few tokens earlier in the text.

Owns: one session's index of its text, and the nodes made from it. Must not know: models, slots, sessions.
"""

from __future__ import annotations

from collections.abc import Sequence

from specpipe.ngram import NgramDrafter
from specpipe.tree import DraftTree, Node

DRAFTER = "lookup"


def is_lookup(node: Node) -> bool:
    """Whether nobody has ranked it yet."""
    return node.drafter == DRAFTER


class Lookups:
    """Of one session, whose text is `tokens` so far; at most `limit` nodes at once."""

    def __init__(self, tokens: Sequence[int], limit: int) -> None:
        self._limit = limit
        self._text = NgramDrafter()
        self._text.open(tokens)

    def commit(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        self._text.commit(tokens)

    def put_below(self, node: Node, tree: DraftTree) -> None:
        """Hang what followed the text up to `node`, which has no children, below it."""
        nodes: list[Node | None] = [node]
        path = [above.token for above in node.path()]
        for parent, token, confidence in zip(*self._text.grow(self._limit, path), strict=True):
            above = nodes[parent]
            nodes.append(None if above is None else tree.add_child(above, token, confidence, drafter=DRAFTER))
