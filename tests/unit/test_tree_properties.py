"""Grafting is a union: for any extensions, bases, repetitions and orders the tree is the same (docs/decisions/0005)."""

from __future__ import annotations

import random
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from specpipe.tree import DraftTree, GraftOutcome
from specpipe.types import Extension

NUM_PROMPT = 2
TOKENS = st.integers(0, 3)
CONFIDENCES = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0])

Path = tuple[int, ...]
Facts = dict[Path, tuple[int, float, float, str, int]]


@st.composite
def extensions(draw: st.DrawFn, max_base: int = NUM_PROMPT + 3) -> Extension:
    size = draw(st.integers(0, 10))
    return Extension(
        session=1,
        base=draw(st.integers(1, max_base)),
        parents=tuple(draw(st.integers(0, i)) for i in range(size)),
        tokens=tuple(draw(st.lists(TOKENS, min_size=size, max_size=size))),
        confidences=tuple(draw(st.lists(CONFIDENCES, min_size=size, max_size=size))),
        drafter=draw(st.sampled_from(["model", "ngram"])),
        draft_step=draw(st.integers(0, 3)),
    )


def by_rank(rank: int, depth: int, confidence: float, drafter: str) -> float:
    return confidence / (1 + rank)


def facts(tree: DraftTree) -> Facts:
    tree.check()
    return {
        tuple(n.token for n in node.path()): (node.rank, node.reach, node.confidence, node.drafter, node.draft_step)
        for node in tree.nodes()
    }


def paths_of(extension: Extension) -> Iterable[Path]:
    paths: list[Path] = [()]
    for parent, token in zip(extension.parents, extension.tokens, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def expected_paths(received: Iterable[Extension], committed: Path) -> set[Path]:
    """The union, written a second time: whole paths from position 0, cut at the committed text."""
    whole = {committed[: e.base] + path for e in received if e.base <= len(committed) for path in paths_of(e)}
    size = len(committed)
    return {path[size:] for path in whole if path[:size] == committed and len(path) > size}


COMMITTED = st.lists(TOKENS, min_size=NUM_PROMPT, max_size=NUM_PROMPT + 3).map(tuple)


@given(st.lists(extensions(), max_size=6), COMMITTED, st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_order_and_repetition_never_matter(received: list[Extension], committed: Path, rng: random.Random) -> None:
    first = DraftTree(base=len(committed), max_nodes=10_000, estimate=by_rank)
    for extension in received:
        first.graft(extension, committed)
        first.check()
    shuffled = received + [e for e in received if rng.random() < 0.5]
    rng.shuffle(shuffled)
    second = DraftTree(base=len(committed), max_nodes=10_000, estimate=by_rank)
    for extension in shuffled:
        second.graft(extension, committed)
    assert facts(first) == facts(second)
    assert set(facts(first)) == expected_paths(received, committed)


@given(st.lists(st.one_of(extensions(), st.lists(TOKENS, max_size=3).map(tuple)), max_size=10))
@settings(max_examples=300, deadline=None)
def test_committing_and_grafting_commute(events: list[Extension | Path]) -> None:
    """Commits between grafts: the tree is what it would be had all extensions come after the last commit."""
    committed: Path = (0,) * NUM_PROMPT
    tree = DraftTree(base=NUM_PROMPT, max_nodes=10_000, estimate=by_rank)
    taken: list[Extension] = []
    for event in events:
        if isinstance(event, tuple):
            before = set(facts(tree))
            num_before = tree.num_nodes
            advance = tree.advance(event)
            committed += event
            assert advance.follows == (event in before or event == ())
            assert len(advance.path) + len(advance.dropped) + tree.num_nodes == num_before
        elif tree.graft(event, committed).outcome is not GraftOutcome.AHEAD:
            taken.append(event)
        assert set(facts(tree)) == expected_paths(taken, committed)
    again = DraftTree(base=len(committed), max_nodes=10_000, estimate=by_rank)
    for extension in taken:
        again.graft(extension, committed)
    assert set(facts(again)) == set(facts(tree))


@given(st.lists(extensions(NUM_PROMPT), max_size=4))
@settings(max_examples=150, deadline=None)
def test_bounds_hold_whatever_comes(received: list[Extension]) -> None:
    committed = (0,) * NUM_PROMPT
    tree = DraftTree(base=NUM_PROMPT, max_nodes=6, max_depth=3, estimate=by_rank)
    for extension in received:
        tree.graft(extension, committed)
        tree.check()
        assert set(facts(tree)) <= expected_paths(received, committed)


@given(st.lists(extensions(NUM_PROMPT), min_size=1, max_size=4), st.data())
@settings(max_examples=150, deadline=None)
def test_any_selection_of_nodes_travels_as_an_extension(received: list[Extension], data: st.DataObject) -> None:
    committed = (0,) * NUM_PROMPT
    tree = DraftTree(base=NUM_PROMPT, max_nodes=10_000, estimate=by_rank)
    for extension in received:
        tree.graft(extension, committed)
    nodes = list(tree.nodes())
    chosen = [node for node in nodes if data.draw(st.booleans())]
    sent = tree.extension_of(chosen, session=1)
    wanted = {tuple(n.token for n in node.path()[:depth]) for node in chosen for depth in range(1, node.depth + 1)}
    assert set(paths_of(sent)) == wanted
    assert len(sent.tokens) == len(wanted)
    before = facts(tree)
    assert tree.graft(sent, committed).added == []
    assert facts(tree).keys() == before.keys()


@given(st.lists(extensions(NUM_PROMPT), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_every_prefix_by_reach_is_a_tree(received: list[Extension]) -> None:
    tree = DraftTree(base=NUM_PROMPT, max_nodes=10_000, estimate=by_rank)
    for extension in received:
        tree.graft(extension, (0,) * NUM_PROMPT)
    seen = {id(tree.root)}
    for node in tree.nodes_by_reach():
        assert id(node.parent) in seen
        seen.add(id(node))
