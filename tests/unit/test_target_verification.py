"""Where an answer ends, and what a walk commits."""

from __future__ import annotations

import pytest

from specpipe.tree import DraftTree, Node
from specpipe.types import FinishReason, Origin, StopRules
from target_worker.verification import cut, walk


def rules(**fields: object) -> StopRules:
    return StopRules(**{"max_length": 100, "eos_token_ids": (9,), **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "stops", "kept", "reason"),
    [
        ((1, 2, 3), rules(), (1, 2, 3), None),
        ((1, 9, 3), rules(), (1, 9), FinishReason.STOP),
        ((1, 9, 3), rules(ignore_eos=True), (1, 9, 3), None),
        ((1, 8, 9), rules(stop_token_ids=(8,)), (1, 8), FinishReason.STOP),
        ((1, 8, 9), rules(stop_token_ids=(8,), ignore_eos=True), (1, 8), FinishReason.STOP),
        ((1, 2, 3), rules(max_length=12), (1, 2), FinishReason.LENGTH),
        ((1, 2, 3), rules(max_length=13), (1, 2, 3), FinishReason.LENGTH),
        ((1, 9, 3), rules(max_length=12), (1, 9), FinishReason.STOP),  # on one token stop beats length
        ((1, 2, 9), rules(max_length=12), (1, 2), FinishReason.LENGTH),  # the earlier in token order wins
        ((9, 9, 9), rules(min_length=12), (9, 9), FinishReason.STOP),
        ((9, 9, 9), rules(min_length=14), (9, 9, 9), None),
        ((9, 9, 9), rules(min_length=14, max_length=13), (9, 9, 9), FinishReason.LENGTH),
        ((), rules(), (), None),
    ],
)
def test_cut_keeps_up_to_the_first_token_that_ends_the_answer(
    tokens: tuple[int, ...], stops: StopRules, kept: tuple[int, ...], reason: FinishReason | None
) -> None:
    assert cut(tokens, stops, base=10) == (kept, reason)


@pytest.fixture
def tree() -> DraftTree:
    """Below the base: 1 -> (2 -> 3, 4), 5."""
    tree = DraftTree(base=10)
    one = tree.add_child(tree.root, 1, 0.9)
    assert one is not None
    two = tree.add_child(one, 2, 0.8)
    assert two is not None
    tree.add_child(two, 3, 0.7)
    tree.add_child(one, 4, 0.1)
    tree.add_child(tree.root, 5, 0.05)
    return tree


@pytest.mark.parametrize(
    ("chosen", "tokens", "origins"),
    [
        ((1, 2, 3, 7), [1, 2, 3, 7], [Origin.ACCEPTED] * 3 + [Origin.BONUS]),
        ((1, 4, 7), [1, 4, 7], [Origin.ACCEPTED] * 2 + [Origin.BONUS]),
        ((1, 6), [1, 6], [Origin.ACCEPTED, Origin.RECOVERED]),
        ((6,), [6], [Origin.RECOVERED]),
        ((5, 1), [5, 1], [Origin.ACCEPTED, Origin.BONUS]),
        ((1, 9), [1, 9], [Origin.ACCEPTED, Origin.RECOVERED]),
    ],
)
def test_a_walk_follows_the_targets_own_choices(
    tree: DraftTree, chosen: tuple[int, ...], tokens: list[int], origins: list[Origin]
) -> None:
    rows = set(tree.nodes())
    result = walk(tree.root, rows, lambda node: chosen[node.depth], base=10, stops=rules(), has_rows=True)
    assert (result.tokens, result.origins) == (tokens, origins)
    assert [node.token for node in result.path] == tokens[:-1]


def test_a_node_that_was_no_row_is_not_walked(tree: DraftTree) -> None:
    one = tree.find([1])
    assert one is not None
    result = walk(tree.root, {one}, lambda node: (1, 2)[node.depth], base=10, stops=rules(), has_rows=True)
    assert result.tokens == [1, 2]
    assert result.origins == [Origin.ACCEPTED, Origin.BONUS]


def test_a_round_without_rows_is_plain(tree: DraftTree) -> None:
    result = walk(tree.root, set[Node](), lambda node: 1, base=10, stops=rules(), has_rows=False)
    assert (result.tokens, result.origins) == ([1], [Origin.PLAIN])


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_stop_inside_the_block_ends_the_walk_without_a_next_token(tree: DraftTree, position: int) -> None:
    chosen = (1, 2, 3, 7)
    stops = rules(stop_token_ids=(chosen[position],))
    result = walk(tree.root, set(tree.nodes()), lambda node: chosen[node.depth], base=10, stops=stops, has_rows=True)
    assert result.tokens == list(chosen[: position + 1])
    assert result.origins == [Origin.ACCEPTED] * (position + 1)
    assert result.finish_reason is FinishReason.STOP
    assert len(result.path) == position + 1


def test_choices_are_made_for_walked_nodes_only(tree: DraftTree) -> None:
    asked = []

    def choose(node: Node) -> int:
        asked.append(node.depth)
        return (1, 6)[node.depth]

    walk(tree.root, set(tree.nodes()), choose, base=10, stops=rules(), has_rows=True)
    assert asked == [0, 1]
