"""Both workers under the rejection rule: what is drawn and sent, and which nodes are verified."""

from __future__ import annotations

from dataclasses import replace

import pytest
from draft_harness import Harness, commit_message, open_message, received_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from target_simulator import Simulator, create_open, plain_run

from specpipe.sampling import Proposer
from specpipe.step_costs import StepCosts
from specpipe.testing import TableModel
from specpipe.tree import DraftTree, Node
from specpipe.types import Extension, Mode, Open, Origin, Proposal, Rule
from target_worker.scheduler import Candidate, Load, select_nodes


def rejection(opened: Open) -> Open:
    return replace(opened, speculation=replace(opened.speculation, rule=Rule.REJECTION))


def assert_draws_are_the_models_own(model: TableModel, opened: Open, tree: DraftTree, text: list[int]) -> int:
    """Every proposal is what a fresh draft on that very prefix draws; returns how many there are."""
    proposer = Proposer(opened.sampling, model.info.vocab_size)
    count = 0
    for node in (tree.root, *tree.nodes()):
        if node.proposal is not None:
            prefix = [*text, *(ancestor.token for ancestor in node.path())]
            proposal, children = proposer.propose(model.logits_of(prefix), len(prefix), 1, text=prefix)
            assert replace(node.proposal, parent=0) == proposal
            assert node.sampled_child is not None
            assert (node.sampled_child.token, node.sampled_child.confidence) == pytest.approx(children[0])
            count += 1
    return count


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_expanded_node_sends_its_draw(temperature: float) -> None:
    model = TableModel(seed=3)
    opened = rejection(open_message(temperature=temperature))
    harness = Harness(model)
    harness.receive(opened)
    harness.run()
    tree = received_tree(opened, opened.tokens, harness.take_extensions())
    assert all(node.proposal is not None for node in (tree.root, *tree.nodes()) if node.children)
    assert assert_draws_are_the_models_own(model, opened, tree, list(opened.tokens)) > 10
    assert any(len(node.children) > 1 for node in tree.nodes())  # coverage


def test_what_survives_a_commit_keeps_its_draws() -> None:
    model = TableModel(seed=3)
    opened = rejection(open_message(temperature=1.0))
    harness = Harness(model)
    harness.receive(opened)
    harness.run()
    session = harness.session(1)
    sampled = session.tree.root.sampled_child
    assert sampled is not None
    text = [*opened.tokens, sampled.token]
    harness.receive(commit_message(1, len(opened.tokens), [sampled.token], next_budget=16))
    harness.run()
    assert assert_draws_are_the_models_own(model, opened, session.tree, text) > 10


def test_sync_sends_the_chain_of_draws() -> None:
    model = TableModel(seed=3)
    opened = rejection(open_message(mode=Mode.SYNC, temperature=1.0, num_speculative_tokens=3))
    harness = Harness(model)
    harness.receive(opened)
    harness.run()
    [extension] = harness.take_extensions()
    assert extension.parents == (0, 1, 2)
    assert [proposal.parent for proposal in extension.proposals] == [0, 1, 2]
    assert [proposal.token for proposal in extension.proposals] == list(extension.tokens)


# Selection


def blind(tree: DraftTree, *, max_depth: int = 8) -> Candidate:
    return Candidate(root=tree.root, length=10, max_depth=max_depth, is_blind=True)


def costs_of(steps: dict[int, float]) -> StepCosts:
    costs = StepCosts(max(steps))
    for rows, step_ms in steps.items():
        costs.observe(rows, 0, step_ms)
    return costs


FLAT = costs_of({1: 10.0, 64: 10.0})
SLOPE = costs_of({1: 10.0, 8: 11.0, 64: 20.0})
STEEP = costs_of({1: 10.0, 2: 20.0, 64: 640.0})

reaches = st.sampled_from([0.02, 0.1, 0.4, 0.7, 0.95])


@st.composite
def drafted_trees(draw: st.DrawFn) -> DraftTree:
    tree = DraftTree(base=10)
    nodes: list[Node] = [tree.root]
    for token in range(draw(st.integers(1, 14))):
        parent = draw(st.sampled_from(nodes))
        extension = _extension_below(parent.path(), token, draw(reaches), is_sampled=parent.proposal is None)
        tree.graft(extension, range(10))
        child = parent.children.get(token)
        assert child is not None
        nodes.append(child)
    tree.check()
    return tree


def _extension_below(path: list[Node], token: int, confidence: float, *, is_sampled: bool) -> Extension:
    size = len(path)
    return Extension(
        session=1,
        base=10,
        parents=tuple(range(size + 1)),
        tokens=(*(node.token for node in path), token),
        confidences=(*(node.confidence for node in path), confidence),
        proposals=(Proposal(parent=size, tokens=(token,), probs=(1.0,), index=0),) if is_sampled else (),
    )


def select(candidates: list[Candidate], costs: StepCosts, max_nodes: int = 60) -> list[list[Node]]:
    load = Load(rows=len(candidates), attended=10 * len(candidates))
    return select_nodes(candidates, load, costs, max_nodes=max_nodes)


@given(drafted_trees(), st.sampled_from([FLAT, SLOPE, STEEP]), st.integers(0, 20))
@settings(max_examples=200, deadline=None)
def test_blind_selection_is_a_tree_within_its_bounds(tree: DraftTree, costs: StepCosts, max_nodes: int) -> None:
    [nodes] = select([blind(tree, max_depth=4)], costs, max_nodes)
    assert len(nodes) <= max_nodes
    chosen = {tree.root}
    for node in nodes:
        assert node.parent in chosen
        assert node.depth <= 4
        chosen.add(node)
    assert len(chosen) == 1 + len(nodes)


@given(drafted_trees(), st.sampled_from([FLAT, SLOPE, STEEP]))
@settings(max_examples=200, deadline=None)
def test_blind_selection_does_not_depend_on_what_grew_below(tree: DraftTree, costs: StepCosts) -> None:
    """Cut what hangs below a sampled child: it is verified exactly if it was before."""
    for node in [node for node in tree.nodes() if node.is_sampled and node.children]:
        before = node in select([blind(tree)], costs)[0]
        children, node.children = node.children, {}
        proposal, node.proposal = node.proposal, None
        assert (node in select([blind(tree)], costs)[0]) is before
        node.children, node.proposal = children, proposal


def test_selection_by_yield_does_depend_on_what_grew_below() -> None:
    """Why it is not used here: a stair is worth climbing for a long sure chain, and not for its first node alone."""
    stairs = costs_of({1: 10.0, 4: 16.0, 16: 16.1, 64: 110.0})
    tree = DraftTree(base=10)
    node = tree.add_child(tree.root, 0, 0.15)
    seeing = Candidate(root=tree.root, length=10, max_depth=20)
    assert select([seeing], stairs) == [[]]
    for token in range(10):
        assert node is not None
        node = tree.add_child(node, token, 0.95)
    assert select([seeing], stairs)[0]


def test_where_rows_cost_much_nothing_is_verified_blindly() -> None:
    tree = DraftTree(base=10)
    tree.graft(_extension_below([], 1, 0.9, is_sampled=True), range(10))
    assert select([blind(tree)], FLAT) == [[tree.root.sampled_child]]
    assert select([blind(tree), blind(tree), blind(tree)], STEEP) == [[], [], []]


# The walk


def scripted(token: int, confidence: float, proposals: tuple[Proposal, ...], base: int) -> Extension:
    return Extension(
        session=1, base=base, parents=(0,), tokens=(token,), confidences=(confidence,), proposals=proposals
    )


@pytest.mark.parametrize("has_proposal", [True, False])
def test_only_a_sampled_child_is_tested(has_proposal: bool) -> None:
    """A child on which the target puts nearly nothing: tested it nearly never passes, and no other is ever tested."""
    table = TableModel(16, num_slots=400, seed=1, spread=3.0)
    accepted = 0
    for seed in range(40):
        opened = rejection(create_open(1, temperature=1.0, max_tokens=3, seed=seed))
        token = int(table.logits_of(opened.tokens).argmin())
        proposals = (Proposal(parent=0, tokens=(token,), probs=(1.0,), index=0),) if has_proposal else ()
        extension = scripted(token, 0.9, proposals, len(opened.tokens))
        simulator = Simulator(table, drafter=lambda tokens, _, e=extension: [e], delay_ms=lambda: 0.0)  # type: ignore[misc]
        answer = simulator.open(opened)
        simulator.run()
        accepted += answer.origins[0] is Origin.ACCEPTED
        assert (answer.new_tokens[0] == token) is (answer.origins[0] is Origin.ACCEPTED) or answer.origins[0] in (
            Origin.PLAIN,
        )
    assert accepted <= 2


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_greedy_needs_no_draft_worker(drafter: str) -> None:
    table = TableModel(16, num_slots=400, seed=1, order=1)
    opened = rejection(create_open(1, max_tokens=30, drafter=drafter))
    simulator = Simulator(table)
    answer = simulator.open(opened)
    simulator.run()
    assert answer.new_tokens == plain_run(table, opened)[0]
    assert (answer.stats.num_accepted > 0) is (drafter == "ngram")
