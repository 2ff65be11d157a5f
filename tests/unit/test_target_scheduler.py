"""Which nodes a step verifies, and how much prompt it takes beside them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from specpipe.step_costs import StepCosts
from specpipe.tree import DraftTree, Node
from target_worker.scheduler import MIN_CHUNK, Candidate, Load, chunk_sizes, next_budget, select_nodes


def costs_of(steps: dict[int, float]) -> StepCosts:
    costs = StepCosts(max(steps))
    for rows, step_ms in steps.items():
        costs.observe(rows, 0, step_ms)
    return costs


FLAT = costs_of({1: 10.0, 64: 10.0})
STEEP = costs_of({1: 10.0, 2: 20.0, 4: 40.0, 8: 80.0, 16: 160.0, 64: 640.0})
STAIRS = costs_of({1: 10.0, 4: 16.0, 16: 16.1, 24: 40.0, 64: 110.0})


def chain_tree(*confidences: float) -> DraftTree:
    tree = DraftTree(base=10)
    node: Node | None = tree.root
    for token, confidence in enumerate(confidences):
        assert node is not None
        node = tree.add_child(node, token, confidence)
    return tree


def candidate(tree: DraftTree, *, max_depth: int = 48, is_fixed: bool = False) -> Candidate:
    return Candidate(root=tree.root, length=10, max_depth=max_depth, is_fixed=is_fixed)


def select(candidates: list[Candidate], costs: StepCosts, *, max_nodes: int = 60, max_slowdown: float | None = None):  # type: ignore[no-untyped-def]
    load = Load(rows=len(candidates), attended=10 * len(candidates))
    return select_nodes(candidates, load, costs, max_nodes=max_nodes, max_slowdown=max_slowdown)


def test_where_rows_are_free_everything_likely_is_verified() -> None:
    [nodes] = select([candidate(chain_tree(0.9, 0.9, 0.9))], FLAT)
    assert [node.depth for node in nodes] == [1, 2, 3]


def test_where_each_row_costs_a_step_nothing_is() -> None:
    [nodes] = select([candidate(chain_tree(0.9, 0.9, 0.9))], STEEP)
    assert nodes == []


def test_the_first_fall_of_the_rate_is_not_the_end() -> None:
    """One node alone does not pay for the stair; eight on the same stair do."""
    [nodes] = select([candidate(chain_tree(*[0.9] * 8))], STAIRS)
    assert len(nodes) == 8


def test_one_node_that_does_not_pay_for_its_stair_is_left() -> None:
    [nodes] = select([candidate(chain_tree(0.15))], STAIRS)
    assert nodes == []


def test_k_bounds_the_depth_and_not_the_width() -> None:
    tree = chain_tree(0.9, 0.9, 0.9)
    for token in (10, 11, 12):
        tree.add_child(tree.root, token, 0.1)
    [nodes] = select([candidate(tree, max_depth=1)], FLAT)
    assert sorted(node.token for node in nodes) == [0, 10, 11, 12]


def test_sessions_share_rows_by_reach() -> None:
    sure, unsure = chain_tree(*[0.95] * 6), chain_tree(*[0.2] * 6)
    first, second = select([candidate(unsure), candidate(sure)], FLAT, max_nodes=6)
    assert (len(first), len(second)) == (0, 6)


def test_a_shared_step_is_not_stretched_beyond_its_bound() -> None:
    costs = costs_of({1: 10.0, 2: 10.0, 4: 12.0, 8: 14.0, 16: 20.0, 64: 40.0})
    trees = [chain_tree(*[0.99] * 10) for _ in range(2)]
    free = select([candidate(tree) for tree in trees], costs)
    bounded = select([candidate(tree) for tree in trees], costs, max_slowdown=1.25)
    assert sum(map(len, free)) > sum(map(len, bounded)) > 0
    assert costs.estimate(2 + sum(map(len, bounded)), 0) <= 1.3 * costs.estimate(2, 0)


def test_sync_verifies_its_chain_whatever_it_costs() -> None:
    [nodes] = select([candidate(chain_tree(0.1, 0.1, 0.1, 0.1), max_depth=3, is_fixed=True)], STEEP)
    assert [node.depth for node in nodes] == [1, 2, 3]


@given(
    st.lists(st.lists(st.floats(0.0, 1.0), min_size=0, max_size=8), min_size=1, max_size=5),
    st.sampled_from([FLAT, STEEP, STAIRS]),
    st.integers(0, 20),
)
def test_what_is_chosen_is_closed_under_ancestors_and_never_slower_than_plain(
    chains: list[list[float]], costs: StepCosts, max_nodes: int
) -> None:
    trees = [chain_tree(*confidences) for confidences in chains]
    chosen = select([candidate(tree) for tree in trees], costs, max_nodes=max_nodes)
    assert sum(map(len, chosen)) <= max_nodes
    for tree, nodes in zip(trees, chosen, strict=True):
        known: set[Node] = {tree.root}
        for node in nodes:
            assert node.parent in known
            known.add(node)
    plain, rows = len(trees), len(trees) + sum(map(len, chosen))
    expected = plain + sum(node.reach for nodes in chosen for node in nodes)
    assert expected / costs.estimate(rows, 0) >= plain / costs.estimate(plain, 0) * 0.99


LINEAR = costs_of({rows: 10.0 + rows for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)})


def chunks(pending: list[tuple[int, int]], *, rows: int = 0, max_rows: int = 256, slowdown: float = 2.0) -> list[int]:
    return chunk_sizes(pending, Load(rows=rows, attended=0), LINEAR, max_rows=max_rows - rows, max_slowdown=slowdown)


def test_alone_a_prompt_takes_all_rows_there_are() -> None:
    assert chunks([(500, 0)]) == [256]
    assert chunks([(30, 0)]) == [30]


def test_beside_decoding_sessions_a_chunk_keeps_the_step_within_its_bound() -> None:
    [size] = chunks([(500, 0)], rows=4)
    assert MIN_CHUNK <= size < 64
    assert LINEAR.estimate(4 + size) <= 2 * LINEAR.estimate(4) + 1e-6


def test_while_anyone_waits_a_step_takes_at_least_a_small_chunk() -> None:
    assert chunks([(500, 0)], rows=4, slowdown=1.0) == [MIN_CHUNK]
    assert chunks([(3, 0)], rows=4, slowdown=1.0) == [3]


def test_first_come_first_served_and_what_is_left_goes_to_the_next() -> None:
    assert chunks([(20, 0), (500, 0)], max_rows=64) == [20, 44]
    assert chunks([(500, 0), (20, 0)], max_rows=64) == [64, 0]


def test_no_chunk_is_longer_than_half_a_second() -> None:
    slow = costs_of({1: 100.0, 4: 200.0, 16: 450.0, 32: 900.0, 256: 8000.0})
    [size] = chunk_sizes([(500, 0)], Load(rows=0, attended=0), slow, max_rows=256, max_slowdown=2.0)
    assert slow.estimate(size) <= 500.0 < slow.estimate(size + 16)


@pytest.mark.parametrize("num_sessions", [1, 4, 16])
def test_the_budget_shrinks_with_the_number_of_sessions(num_sessions: int) -> None:
    costs = costs_of({1: 10.0, 16: 10.0, 32: 14.0, 64: 25.0, 256: 100.0})
    assert next_budget(costs, num_sessions, 10) <= next_budget(costs, 1, 10)
