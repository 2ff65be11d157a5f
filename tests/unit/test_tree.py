"""The draft tree: what grafting and advancing do, case by case."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from specpipe.errors import InvalidRequestError, InvariantError
from specpipe.extensions import MAX_EXTENSION_NODES, validate_extension
from specpipe.tree import DraftTree, GraftOutcome, Node
from specpipe.types import Extension

PROMPT = [10, 11, 12]


def extension(base: int, *nodes: tuple[int, int, float], **fields: object) -> Extension:
    """Nodes as (parent index, token, confidence)."""
    parents, tokens, confidences = zip(*nodes, strict=True) if nodes else ((), (), ())
    extension = Extension(session=7, base=base, parents=parents, tokens=tokens, confidences=confidences)
    return replace(extension, **fields)  # type: ignore[arg-type]


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    tree.check()
    return {tuple(node.token for node in node.path()) for node in tree.nodes()}


@pytest.fixture
def tree() -> DraftTree:
    """1 > (2 > 3, 4), 5 below three committed tokens."""
    tree = DraftTree(base=3)
    nodes = ((0, 1, 0.5), (1, 2, 0.8), (2, 3, 0.9), (1, 4, 0.1), (0, 5, 0.25))
    assert tree.graft(extension(3, *nodes), PROMPT).outcome is GraftOutcome.GRAFTED
    return tree


def test_graft_builds_the_trie_with_ranks_and_reach(tree: DraftTree) -> None:
    assert paths(tree) == {(1,), (1, 2), (1, 2, 3), (1, 4), (5,)}
    facts = [(node.token, node.depth, node.rank, round(node.reach, 6)) for node in tree.nodes()]
    assert facts == [(1, 1, 0, 0.5), (2, 2, 0, 0.4), (3, 3, 0, 0.36), (4, 2, 1, 0.05), (5, 1, 1, 0.25)]


def test_nodes_by_reach_starts_with_the_surest_and_never_a_child_before_its_parent(tree: DraftTree) -> None:
    assert [node.token for node in tree.nodes_by_reach()] == [1, 2, 3, 5, 4]


def test_graft_twice_adds_nothing(tree: DraftTree) -> None:
    again = tree.extension_of(tree.nodes(), session=7)
    graft = tree.graft(again, PROMPT)
    assert graft.outcome is GraftOutcome.GRAFTED
    assert graft.added == []
    assert tree.num_nodes == 5


def test_graft_below_tokens_committed_since_is_late() -> None:
    tree = DraftTree(base=5)
    graft = tree.graft(extension(3, (0, 1, 0.5), (1, 2, 0.8), (2, 3, 0.9), (1, 4, 0.1)), [*PROMPT, 1, 2])
    assert graft.outcome is GraftOutcome.LATE
    assert paths(tree) == {(3,)}
    assert graft.added == list(tree.nodes())


@pytest.mark.parametrize("since", [[9], [1, 9], [1, 4, 4], [1, 2, 3]])
def test_graft_off_the_committed_path_is_stale_and_changes_nothing(since: list[int]) -> None:
    tree = DraftTree(base=3 + len(since))
    graft = tree.graft(extension(3, (0, 1, 0.5), (1, 2, 0.8), (2, 3, 0.9), (1, 4, 0.1)), [*PROMPT, *since])
    assert (graft.outcome, graft.added, tree.num_nodes) == (GraftOutcome.STALE, [], 0)


def test_graft_ahead_of_the_committed_tokens_is_refused(tree: DraftTree) -> None:
    before = paths(tree)
    assert tree.graft(extension(4, (0, 8, 0.5)), PROMPT).outcome is GraftOutcome.AHEAD
    assert paths(tree) == before


def test_siblings_with_one_token_are_one_node() -> None:
    tree = DraftTree(base=3)
    tree.graft(extension(3, (0, 1, 0.25), (0, 1, 0.5), (1, 2, 0.5), (2, 3, 0.5)), PROMPT)
    assert paths(tree) == {(1,), (1, 2), (1, 3)}
    late = DraftTree(base=4)
    late.graft(extension(3, (0, 1, 0.25), (0, 1, 0.5), (1, 2, 0.5), (2, 3, 0.5)), [*PROMPT, 1])
    assert paths(late) == {(2,), (3,)}


def test_surer_sibling_takes_the_first_rank_and_weights_follow() -> None:
    def by_rank(rank: int, depth: int, confidence: float, drafter: str) -> float:
        return confidence / (1 + rank)

    tree = DraftTree(base=3, estimate=by_rank)
    tree.graft(extension(3, (0, 1, 0.5), (1, 2, 0.5)), PROMPT)
    tree.graft(extension(3, (0, 6, 0.75)), PROMPT)
    tree.check()
    facts = {node.token: (node.rank, node.reach) for node in tree.nodes()}
    assert facts == {6: (0, 0.75), 1: (1, 0.25), 2: (0, 0.125)}


def test_a_node_keeps_the_larger_confidence_and_the_earlier_step(tree: DraftTree) -> None:
    tree.graft(extension(3, (0, 1, 0.4), (0, 5, 0.75), drafter="ngram", draft_step=9), PROMPT)
    tree.graft(extension(3, (0, 1, 0.4), draft_step=4), PROMPT)
    one, five = tree.root.children[1], tree.root.children[5]
    assert (one.confidence, one.drafter, one.rank, one.draft_step) == (0.5, "model", 1, 4)
    assert (five.confidence, five.drafter, five.rank, five.draft_step) == (0.75, "ngram", 0, 9)
    tree.check()


def test_advance_along_a_path_keeps_the_subtree(tree: DraftTree) -> None:
    advance = tree.advance([1])
    assert (advance.follows, [n.token for n in advance.path], [n.token for n in advance.dropped]) == (True, [1], [5])
    assert tree.base == 4
    assert paths(tree) == {(2,), (2, 3), (4,)}
    assert [(n.token, n.depth, round(n.reach, 6)) for n in tree.nodes()] == [(2, 1, 0.8), (3, 2, 0.72), (4, 1, 0.1)]


def test_advance_out_of_the_tree_empties_it_and_names_the_matched_path(tree: DraftTree) -> None:
    advance = tree.advance([1, 9])
    assert (advance.follows, [n.token for n in advance.path]) == (False, [1])
    assert sorted(n.token for n in advance.dropped) == [2, 3, 4, 5]
    assert (tree.base, tree.num_nodes, paths(tree)) == (5, 0, set())


def test_advance_to_a_leaf_leaves_an_empty_tree_that_follows(tree: DraftTree) -> None:
    advance = tree.advance([1, 2, 3])
    assert advance.follows
    assert [n.token for n in advance.path] == [1, 2, 3]
    assert (tree.base, tree.num_nodes) == (6, 0)


def test_advance_by_nothing_changes_nothing(tree: DraftTree) -> None:
    advance = tree.advance([])
    assert (advance.follows, advance.path, advance.dropped, tree.base, tree.num_nodes) == (True, [], [], 3, 5)


def test_extension_stands_alone_and_survives_the_journey(tree: DraftTree) -> None:
    deepest = tree.find([1, 2, 3])
    assert deepest is not None
    sent = tree.extension_of([deepest], session=7, draft_step=2, is_exhausted=True)
    assert (sent.base, sent.parents, sent.tokens, sent.confidences) == (3, (0, 1, 2), (1, 2, 3), (0.5, 0.8, 0.9))
    assert (sent.draft_step, sent.is_exhausted) == (2, True)
    receiver = DraftTree(base=3)
    receiver.graft(tree.extension_of(tree.nodes(), session=7), PROMPT)
    assert [(n.token, n.rank, n.reach) for n in receiver.nodes()] == [(n.token, n.rank, n.reach) for n in tree.nodes()]


def test_bounds_refuse_nodes_and_what_hangs_below_them() -> None:
    tree = DraftTree(base=3, max_nodes=3, max_depth=2)
    graft = tree.graft(
        extension(3, (0, 1, 0.5), (1, 2, 0.5), (2, 3, 0.5), (3, 4, 0.5), (0, 5, 0.1), (0, 6, 0.1)), PROMPT
    )
    assert graft.outcome is GraftOutcome.GRAFTED
    assert paths(tree) == {(1,), (1, 2), (5,)}
    assert tree.add_child(tree.root, 9, 0.5) is None


def test_add_child_returns_the_child_that_is_there(tree: DraftTree) -> None:
    one = tree.root.children[1]
    assert tree.add_child(tree.root, 1, 0.9) is one
    assert one.confidence == 0.5
    new = tree.add_child(one, 8, 0.05, draft_step=3)
    assert isinstance(new, Node)
    assert (new.rank, new.depth, new.draft_step) == (2, 2, 3)
    tree.check()


GOOD = extension(3, (0, 1, 0.5), (1, 2, 0.5))


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, tokens=(1,)),
        replace(GOOD, confidences=(0.5, 0.5, 0.5)),
        replace(GOOD, parents=(1, 0)),
        replace(GOOD, parents=(0, 2)),
        replace(GOOD, parents=(0, -1)),
        replace(GOOD, tokens=(1, -1)),
        replace(GOOD, tokens=(1, 32)),
        replace(GOOD, tokens=(1, 2**31)),
        replace(GOOD, confidences=(0.5, math.nan)),
        replace(GOOD, confidences=(0.5, math.inf)),
        replace(GOOD, confidences=(0.5, 1.5)),
        replace(GOOD, confidences=(-0.1, 0.5)),
        replace(GOOD, base=0),
        replace(GOOD, base=-4),
        extension(3, *[(0, 1, 0.5)] * (MAX_EXTENSION_NODES + 1)),
    ],
)
def test_malformed_extension_is_refused_before_any_change(bad: Extension) -> None:
    tree = DraftTree(base=3, vocab_size=32)
    with pytest.raises(InvalidRequestError):
        tree.graft(bad, PROMPT)
    assert paths(tree) == set()
    validate_extension(GOOD, 32)


def test_graft_with_another_number_of_committed_tokens_is_our_fault() -> None:
    with pytest.raises(InvariantError):
        DraftTree(base=3).graft(GOOD, [1, 2])


def test_check_finds_a_broken_tree(tree: DraftTree) -> None:
    tree.root.children[1].depth = 4
    with pytest.raises(InvariantError):
        tree.check()
