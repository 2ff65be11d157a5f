"""The draft tree: a trie of guessed token ids below the committed text of one session (docs/decisions/0005, 0001).

Owns: nodes, their ranks and reach, extensions (making and grafting them), advancing along a commit.
Must not know: models, slots' contents, sampling, clocks, gRPC. A node *is* its path of token ids: there are no node
ids.

Receiving is a union by path, and a join: what a tree holds after a set of extensions does not depend on their order or
repetition while no bound is hit. A node received twice keeps the larger confidence and the earlier draft step;
children are ranked by confidence, falling, then by token id.

Under the rejection rule a node may have one *sampled* child, with the proposal that it was drawn from. It is ranked
first and keeps the confidence that came with the proposal. The first proposal grafted at a node stays (two draft
workers may draw differently: there, alone, order matters).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from specpipe.errors import InvariantError
from specpipe.extensions import validate_extension
from specpipe.node import Node
from specpipe.types import Extension, Proposal

__all__ = [
    "Advance",
    "DraftTree",
    "Estimate",
    "Graft",
    "GraftOutcome",
    "Node",
    "confidence_as_is",
]

Estimate = Callable[[int, int, float, str], float]
"""(rank, depth, confidence, drafter) -> probability that the node is the target's choice if its parent is committed."""


class GraftOutcome(enum.Enum):
    """GRAFTED: base is the receiver's. LATE: grafted below tokens committed since. STALE: nothing of it lies on the
    committed path. AHEAD: its base is beyond what the receiver has; nothing was changed."""

    GRAFTED = "grafted"
    LATE = "late"
    STALE = "stale"
    AHEAD = "ahead"


@dataclass(frozen=True, slots=True)
class Graft:
    outcome: GraftOutcome
    added: list[Node] = field(default_factory=list)  # new nodes, parents first


@dataclass(frozen=True, slots=True)
class Advance:
    """What a commit did to the tree. `path` and `dropped` together are all nodes that left it."""

    path: list[Node]  # nodes of the longest committed prefix found in the tree, in order; what was computed there holds
    follows: bool  # every committed token was a node: the subtree below the last one is now the tree
    dropped: list[Node]


def confidence_as_is(rank: int, depth: int, confidence: float, drafter: str) -> float:  # noqa: ARG001
    """The estimate of a worker that knows nothing better."""
    return confidence


class DraftTree:
    """The draft tree of one session. `root` stands for the last committed token: depth 0, reach 1, never counted.

    Nodes beyond `max_nodes` or `max_depth` are refused one by one, and what would hang below them with them.
    """

    def __init__(
        self,
        *,
        base: int,
        max_nodes: int = 256,
        max_depth: int = 48,
        estimate: Estimate = confidence_as_is,
        vocab_size: int | None = None,
    ) -> None:
        self.base = base  # committed tokens, prompt included
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self.root = _create_root()
        self.num_nodes = 0
        self._estimate = estimate
        self._vocab_size = vocab_size

    def add_child(
        self, parent: Node, token: int, confidence: float, *, drafter: str = "model", draft_step: int = 0
    ) -> Node | None:
        """The child of `parent` with this token: the one that is there, unchanged, or a new one. None: over bounds."""
        child = parent.children.get(token)
        return child if child is not None else self._create(parent, token, confidence, drafter, draft_step)

    def restate(self, child: Node, confidence: float, *, drafter: str, draft_step: int) -> None:
        """Say anew who guessed a node, and how sure: it and its siblings are ranked again."""
        assert child.parent is not None
        child.confidence, child.drafter, child.draft_step = confidence, drafter, draft_step
        self._rank_children(child.parent, changed=child)

    def graft(self, extension: Extension, committed: Sequence[int]) -> Graft:
        """Unite the tree with an extension. `committed`: all tokens of the session, `base` of them.

        Raises InvalidRequestError, before any change, if the extension is malformed.
        """
        validate_extension(extension, self._vocab_size)
        if len(committed) != self.base:
            raise InvariantError(f"graft: {len(committed)} committed tokens given, the tree stands at {self.base}")
        if extension.base > self.base:
            return Graft(GraftOutcome.AHEAD)
        since = committed[extension.base :]
        added: list[Node] = []
        is_on_path = self._unite(extension, since, added)
        if not since:
            return Graft(GraftOutcome.GRAFTED, added)
        return Graft(GraftOutcome.LATE if is_on_path else GraftOutcome.STALE, added)

    def advance(self, tokens: Sequence[int]) -> Advance:
        """Commit `tokens`: the subtree below them becomes the tree if they follow a path of it, else it is empty."""
        path: list[Node] = []
        node = self.root
        for token in tokens:
            child = node.children.get(token)
            if child is None:
                break
            path.append(child)
            node = child
        follows = len(path) == len(tokens)
        dropped = self._leave(path, keeps_subtree=follows)
        self.base += len(tokens)
        return Advance(path, follows, dropped)

    def extension_of(
        self,
        nodes: Iterable[Node],
        *,
        session: int,
        is_exhausted: bool = False,
        drafter: str = "model",
        draft_step: int = 0,
        draft_step_ms: float = 0.0,
        draft_share_ms: float = 0.0,
    ) -> Extension:
        """`nodes` and all their ancestors as an extension: parents before children, siblings in rank order.

        A proposal travels with the sampled child when that is one of `nodes`, not again when it is an ancestor: so
        whether the receiver has it does not depend on what grew below the token drawn.
        """
        nodes = list(nodes)
        chosen = self._sorted_with_ancestors(nodes)
        index = {id(self.root): 0} | {id(node): 1 + i for i, node in enumerate(chosen)}
        return Extension(
            session=session,
            base=self.base,
            parents=tuple(index[id(node.parent)] for node in chosen),
            tokens=tuple(node.token for node in chosen),
            confidences=tuple(node.confidence for node in chosen),
            is_exhausted=is_exhausted,
            drafter=drafter,
            draft_step=draft_step,
            draft_step_ms=draft_step_ms,
            draft_share_ms=draft_share_ms,
            proposals=_proposals_of(nodes, index),
        )

    def nodes(self) -> Iterator[Node]:
        """All nodes below the root, parents before children, siblings in rank order."""
        return _below(self.root)

    def nodes_by_reach(self) -> list[Node]:
        """All nodes, the most probable first; every prefix of the list holds the ancestors of its nodes."""
        return sorted(self.nodes(), key=lambda node: (-node.reach, node.depth))

    def find(self, tokens: Sequence[int]) -> Node | None:
        """The node whose path these tokens are; the root for none; None if there is no such node."""
        node: Node | None = self.root
        for token in tokens:
            node = node.children.get(token) if node is not None else None
        return node

    def check(self) -> None:
        """Raise InvariantError if the tree contradicts itself."""
        count = 0
        slots: set[int] = set()
        for node in (self.root, *self.nodes()):
            count += 1
            is_complete = node.proposal is None or node.sampled_child is not None
            if not (node is self.root or self._is_sound(node)) or not _is_ranked(node) or not is_complete:
                raise InvariantError(f"draft tree: unsound or badly ranked at {node!r}")
            if node.slot is not None:
                if node.slot in slots:
                    raise InvariantError(f"draft tree: slot {node.slot} is held twice")
                slots.add(node.slot)
        root = self.root
        if (root.parent, root.depth, root.reach, root.rank) != (None, 0, 1.0, 0):
            raise InvariantError("draft tree: the root has moved")
        if not count - 1 == self.num_nodes <= self.max_nodes:
            raise InvariantError(f"draft tree: {count - 1} nodes found, {self.num_nodes} counted")

    def _is_sound(self, node: Node) -> bool:
        parent = node.parent
        return (
            parent is not None
            and parent.children.get(node.token) is node
            and node.depth == parent.depth + 1 <= self.max_depth
            and node.reach == parent.reach * node.estimate
            and 0.0 <= node.confidence <= 1.0
            and 0.0 <= node.estimate <= 1.0
        )

    def _unite(self, extension: Extension, since: Sequence[int], added: list[Node]) -> bool:
        """Graft what lies below the tokens committed `since` the extension's base. True: something does."""
        is_on_path = False
        # Per extension index, 0 first: the tree's node, or how many of `since` are matched there, or None (off path)
        places: list[Node | int | None] = [0 if since else self.root]
        proposals = {(proposal.parent, proposal.token): proposal for proposal in extension.proposals}
        for parent, token, confidence in zip(extension.parents, extension.tokens, extension.confidences, strict=True):
            place = places[parent]
            if isinstance(place, Node):
                is_on_path = True
                proposal = proposals.get((parent, token))
                places.append(self._join(place, token, confidence, proposal, extension, added))
            elif place is not None and token == since[place]:
                places.append(place + 1 if place + 1 < len(since) else self.root)
            else:
                places.append(None)
        return is_on_path

    def _join(
        self,
        parent: Node,
        token: int,
        confidence: float,
        proposal: Proposal | None,
        extension: Extension,
        added: list[Node],
    ) -> Node | None:
        if proposal is not None and parent.proposal is None and self._has_room(parent):
            # NOTE: there must be room for a node even if a child with this token is there: whether a sampled child is
            # taken as one may not depend on which token was drawn.
            parent.proposal = proposal
            if (child := parent.children.get(token)) is not None:
                child.confidence, child.drafter = confidence, extension.drafter
                self._rank_children(parent, changed=child)
        child = parent.children.get(token)
        if child is None:
            child = self._create(parent, token, confidence, extension.drafter, extension.draft_step)
            if child is not None:
                added.append(child)
            return child
        if extension.draft_step > 0:
            child.draft_step = min(child.draft_step or extension.draft_step, extension.draft_step)
            child.drafted_confidence = max(child.drafted_confidence or 0.0, confidence)
        if not child.is_sampled and (-confidence, extension.drafter) < (-child.confidence, child.drafter):
            child.confidence, child.drafter = confidence, extension.drafter
            self._rank_children(parent, changed=child)
        return child

    def _has_room(self, parent: Node) -> bool:
        """Whether a new node may hang below `parent`."""
        return self.num_nodes < self.max_nodes and parent.depth < self.max_depth

    def _create(self, parent: Node, token: int, confidence: float, drafter: str, draft_step: int) -> Node | None:
        if not self._has_room(parent):
            return None
        child = Node(parent, token, confidence, drafter, draft_step)
        last = next(reversed(parent.children.values()), None)
        child.rank = len(parent.children)
        parent.children[token] = child
        self.num_nodes += 1
        if last is None or last.order < child.order:
            self._weigh(child)
        else:
            self._rank_children(parent, changed=child)
        return child

    def _rank_children(self, parent: Node, *, changed: Node) -> None:
        """Restore rank order after `changed` came or is sure anew; weigh anew whatever that moved."""
        ranked = sorted(parent.children.values(), key=lambda child: child.order)
        parent.children = {child.token: child for child in ranked}
        for rank, child in enumerate(ranked):
            if child.rank != rank or child is changed:
                child.rank = rank
                self._weigh(child)

    def _weigh(self, node: Node) -> None:
        """Estimate a node and carry its reach to all below."""
        parent = node.parent
        assert parent is not None
        estimate = self._estimate(node.rank, node.depth, node.confidence, node.drafter)
        node.estimate = min(1.0, max(0.0, estimate))
        node.reach = parent.reach * node.estimate
        if not node.children:
            return
        for below in _below(node):
            assert below.parent is not None
            below.reach = below.parent.reach * below.estimate

    def _leave(self, path: list[Node], *, keeps_subtree: bool) -> list[Node]:
        """Put a new root at the end of `path` (or nowhere, with nothing below); returns the nodes dropped."""
        if not path and keeps_subtree:
            return []
        end = path[-1] if path else self.root
        kept = end.children if keeps_subtree else {}
        if keeps_subtree:
            end.children = {}
        on_path = {id(node) for node in path}
        dropped = [node for node in self.nodes() if id(node) not in on_path]
        self.num_nodes -= len(dropped) + len(path)
        self.root = _create_root()
        self.root.proposal = end.proposal if keeps_subtree else None
        self._adopt(kept)
        return dropped

    def _adopt(self, children: dict[int, Node]) -> None:
        """Hang a subtree under the root; depths and reach follow in one pass. Estimates stay as they were made."""
        root = self.root
        root.children = children
        for child in children.values():
            child.parent = root
        for node in self.nodes():
            assert node.parent is not None
            node.depth = node.parent.depth + 1
            node.reach = node.parent.reach * node.estimate

    def _sorted_with_ancestors(self, nodes: Iterable[Node]) -> list[Node]:
        chosen: dict[int, Node] = {}
        for start in nodes:
            node = start
            while node.parent is not None and id(node) not in chosen:
                chosen[id(node)] = node
                node = node.parent
        return sorted(chosen.values(), key=lambda node: (node.depth, node.rank))


def _proposals_of(nodes: Iterable[Node], index: dict[int, int]) -> tuple[Proposal, ...]:
    """Proposals of those nodes that were sampled; `index` gives the extension's number of a node by its id()."""
    return tuple(
        replace(node.parent.proposal, parent=index[id(node.parent)])
        for node in nodes
        if node.is_sampled and node.parent is not None and node.parent.proposal is not None
    )


def _create_root() -> Node:
    return Node(None, -1, 1.0, "", 0)


def _below(top: Node) -> Iterator[Node]:
    stack = [iter(top.children.values())]
    while stack:
        node = next(stack[-1], None)
        if node is None:
            stack.pop()
            continue
        yield node
        if node.children:
            stack.append(iter(node.children.values()))


def _is_ranked(parent: Node) -> bool:
    previous: Node | None = None
    for rank, child in enumerate(parent.children.values()):
        if child.rank != rank or (previous is not None and previous.order >= child.order):
            return False
        previous = child
    return True
