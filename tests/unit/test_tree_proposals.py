"""Proposals in the draft tree: one sampled child a node, the first stays, and no draw is favoured for its token."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpipe.errors import InvalidRequestError
from specpipe.tree import DraftTree
from specpipe.types import Extension, Proposal

COMMITTED = (1, 2, 3)
Path = tuple[int, ...]


def proposal(token: int, *others: int, parent: int = 0) -> Proposal:
    share = 1 / (1 + len(others))
    return Proposal(parent=parent, tokens=(*others, token), probs=(share,) * (1 + len(others)), index=len(others))


def extension(*nodes: tuple[int, int, float], proposals: tuple[Proposal, ...] = (), **changes: Any) -> Extension:
    parents, tokens, confidences = zip(*nodes, strict=True)
    values = {"session": 1, "base": len(COMMITTED), "draft_step": 1} | changes
    return Extension(parents=parents, tokens=tokens, confidences=confidences, proposals=proposals, **values)


def tree_of(*extensions: Extension, **bounds: int) -> DraftTree:
    tree = DraftTree(base=len(COMMITTED), **bounds)  # type: ignore[arg-type]
    for each in extensions:
        tree.graft(each, COMMITTED)
        tree.check()
    return tree


def test_the_sampled_child_is_ranked_first_and_keeps_its_confidence() -> None:
    tree = tree_of(
        extension((0, 7, 0.9), (0, 8, 0.8), drafter="ngram"),
        extension((0, 5, 0.2), (0, 8, 0.1), proposals=(proposal(5, 7),)),
        extension((0, 5, 0.99), drafter="ngram"),
    )
    sampled = tree.root.sampled_child
    assert sampled is not None
    assert (sampled.token, sampled.rank, sampled.confidence, sampled.reach) == (5, 0, 0.2, 0.2)
    assert [child.token for child in tree.root.children.values()] == [5, 7, 8]
    assert [child.is_sampled for child in tree.root.children.values()] == [True, False, False]


def test_a_child_that_was_there_becomes_the_sampled_one() -> None:
    tree = tree_of(
        extension((0, 7, 0.9), (0, 5, 0.8), (2, 6, 0.5)), extension((0, 5, 0.25), proposals=(proposal(5, 7),))
    )
    node = tree.find([5])
    assert node is not None
    assert (node.is_sampled, node.rank, node.confidence) == (True, 0, 0.25)
    assert tree.find([5, 6]).reach == 0.125  # type: ignore[union-attr]


def test_the_first_proposal_stays() -> None:
    first, second = proposal(5, 7), proposal(6, 7)
    tree = tree_of(extension((0, 5, 0.5), proposals=(first,)), extension((0, 6, 0.5), proposals=(second,)))
    assert tree.root.proposal == first
    assert [child.is_sampled for child in tree.root.children.values()] == [True, False]


@pytest.mark.parametrize("token", [7, 5])
def test_a_full_tree_takes_no_proposal_whichever_token_was_drawn(token: int) -> None:
    """Else a draw would be tested only if its token happened to be there."""
    full = extension((0, 7, 0.9), (0, 8, 0.8))
    tree = tree_of(full, extension((0, token, 0.5), proposals=(proposal(token, 9),)), max_nodes=2)
    assert tree.root.proposal is None
    deep = tree_of(
        extension((0, 7, 0.9), (1, 7, 0.9)), extension((0, 7, 0.9), (1, 7, 0.5), proposals=(proposal(7, parent=1),)),
        max_depth=1,
    )  # fmt: skip
    assert deep.find([7]).proposal is None  # type: ignore[union-attr]


def test_a_new_root_keeps_the_proposal_of_the_node_it_was() -> None:
    sent = extension((0, 5, 0.5), (1, 6, 0.5), (0, 9, 0.1), proposals=(proposal(5), proposal(6, 4, parent=1)))
    tree = tree_of(sent)
    tree.advance([5])
    tree.check()
    assert tree.root.sampled_child is tree.find([6])
    assert tree.root.proposal is not None
    assert tree.root.proposal.tokens == (4, 6)
    for tokens in ([9], [8]):
        other = tree_of(sent)
        other.advance(tokens)
        other.check()
        assert other.root.proposal is None


def test_a_late_proposal_is_taken_where_its_parent_is_still_open() -> None:
    sent = extension((0, 5, 0.5), (1, 6, 0.5), proposals=(proposal(5), proposal(6, 4, parent=1)))
    tree = tree_of()
    tree.advance([5])
    tree.graft(sent, (*COMMITTED, 5))
    assert tree.root.sampled_child is tree.find([6])


def test_a_proposal_travels_with_its_child_and_not_again_with_what_grows_below() -> None:
    tree = tree_of(extension((0, 5, 0.5), (1, 6, 0.5), proposals=(proposal(5), proposal(6, 4, parent=1))))
    first, second = tree.find([5]), tree.find([5, 6])
    assert first is not None
    assert second is not None
    both = tree.extension_of([first, second], session=1)
    assert both.proposals == (proposal(5), proposal(6, 4, parent=1))
    below = tree.extension_of([second], session=1)
    assert below.tokens == (5, 6)
    assert below.proposals == (proposal(6, 4, parent=1),)


WRONG = [
    (proposal(6), "is not a node"),
    (proposal(5, parent=1), "is not a node"),
    (Proposal(parent=0, tokens=(5,), probs=(0.9,), index=0), "sum to"),
    (Proposal(parent=0, tokens=(5, 6), probs=(1.0,), index=0), "2 tokens and 1"),
    (Proposal(parent=0, tokens=(5, -1), probs=(0.5, 0.5), index=0), "outside the vocabulary"),
    (Proposal(parent=0, tokens=(5, 40), probs=(0.5, 0.5), index=0), "outside the vocabulary"),
    (Proposal(parent=0, tokens=(5,), probs=(float("nan"),), index=0), "outside 0..1"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_malformed_proposal_changes_nothing(wrong: Proposal, message: str) -> None:
    tree = DraftTree(base=len(COMMITTED), vocab_size=32)
    with pytest.raises(InvalidRequestError, match=message):
        tree.graft(extension((0, 5, 0.5), proposals=(wrong,)), COMMITTED)
    assert tree.num_nodes == 0


def drawn(path: Path) -> tuple[int, float]:
    """What one drafter draws below a path, and its confidence: always the same."""
    rng = random.Random(hash(path))
    return rng.randrange(3), rng.choice([0.2, 0.5, 0.9])


@st.composite
def honest_extensions(draw: st.DrawFn) -> Extension:
    """Any part of one drafter's tree; a sampled child comes with its proposal, or without if that was sent before."""
    nodes: list[tuple[int, int, float]] = []
    proposals = []
    paths: list[Path] = [()]
    for i in range(draw(st.integers(1, 8))):
        parent, token = draw(st.integers(0, i)), draw(st.integers(0, 2))
        if (*paths[parent], token) in paths:
            parent, token = i, drawn(paths[i])[0]  # below the newest node there is none yet
        child, confidence = drawn(paths[parent])
        nodes.append((parent, token, confidence if token == child else 0.1))
        if token == child and draw(st.booleans()):
            proposals.append(proposal(token, 7, parent=parent))
        paths.append((*paths[parent], token))
    return extension(*nodes, proposals=tuple(proposals))


def facts(tree: DraftTree) -> dict[Path, Any]:
    return {
        tuple(n.token for n in node.path()): (node.rank, node.reach, node.confidence, node.is_sampled)
        for node in tree.nodes()
    }


@given(st.lists(honest_extensions(), max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_order_and_repetition_never_matter(received: list[Extension], rng: random.Random) -> None:
    shuffled = received + [each for each in received if rng.random() < 0.5]
    rng.shuffle(shuffled)
    assert facts(tree_of(*received, max_nodes=10_000)) == facts(tree_of(*shuffled, max_nodes=10_000))
