"""Coupled speculation samples the target's distribution, whatever the draft; a wrong rule is noticed (cases B, C)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
from chi_square import LEAST_P, Chain, assert_follows, p_value, worst_p_value

from specpipe.sampling import Chooser
from specpipe.testing import TableModel
from specpipe.tree import DraftTree, Node
from specpipe.types import SamplingParams

VOCAB = 16
LENGTH = 4  # tokens of an answer: as many as a path of the draft tree, then some
PROMPT = [3, 7]
TARGET = TableModel(VOCAB, seed=5, spread=2.0, order=1)
DRAFT = TableModel.like(TARGET, 0.5, seed=2)
RANDOM = TableModel(VOCAB, seed=99, spread=2.0, order=1)

SETTINGS = [
    {"temperature": 0.3},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.5},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 0.7, "top_p": 0.5},
    {"temperature": 1.5, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
]

# (the target's choice, the node's first-ranked child) -> the token taken
Rule = Callable[[int, Node | None], int]


def coupled(choice: int, first: Node | None) -> int:
    return choice


def plain(params: SamplingParams, length: int = LENGTH) -> list[int]:
    chooser = Chooser(params, VOCAB)
    text = list(PROMPT)
    for _ in range(length):
        text.append(chooser.choose(TARGET.logits_of(text), len(text)))
    return text[len(PROMPT) :]


def speculate(
    params: SamplingParams, draft: TableModel, rule: Rule, *, nodes: int = 6, length: int = LENGTH
) -> list[int]:
    """Rounds of: grow a tree best-first with the draft's own ranking, verify the surest nodes, walk, commit."""
    text = list(PROMPT)
    target_chooser, draft_chooser = Chooser(params, VOCAB), Chooser(params, VOCAB)
    tree = DraftTree(base=len(text), max_depth=3)
    while len(text) < len(PROMPT) + length:
        grow(tree, text, draft, draft_chooser)
        verified = {id(node) for node in tree.nodes_by_reach()[:nodes]}
        tokens = walk(tree, text, target_chooser, rule, verified)
        text += tokens
        tree.advance(tokens)
        tree.check()
    return text[len(PROMPT) : len(PROMPT) + length]


def grow(tree: DraftTree, text: list[int], draft: TableModel, chooser: Chooser) -> None:
    for _ in range(4):
        leaves = [node for node in tree.nodes() if not node.children and node.depth < tree.max_depth]
        if tree.root.children and not leaves:
            return
        leaf = min(leaves, key=lambda node: (-node.reach, node.depth), default=tree.root)
        path = text + [node.token for node in leaf.path()]
        for token, confidence in chooser.rank(draft.logits_of(path), len(path), 3):
            tree.add_child(leaf, token, confidence)


def walk(tree: DraftTree, text: list[int], chooser: Chooser, rule: Rule, verified: set[int]) -> list[int]:
    tokens: list[int] = []
    node: Node | None = tree.root
    while node is not None:
        children = [child for child in node.children.values() if id(child) in verified]
        sequence = text + tokens
        choice = chooser.choose(TARGET.logits_of(sequence), len(sequence))
        token = rule(choice, children[0] if children else None)
        tokens.append(token)
        node = next((child for child in children if child.token == token), None)
    return tokens


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_consecutive_seeds_follow_the_target_at_every_position(setting: dict[str, float]) -> None:
    answers = [plain(SamplingParams(**setting, seed=seed)) for seed in range(3000)]  # type: ignore[arg-type]
    assert_follows(answers, TARGET, SamplingParams(**setting), PROMPT[-1])  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_consecutive_positions_of_one_seed_follow_the_target(setting: dict[str, float]) -> None:
    params = SamplingParams(**setting, seed=1)  # type: ignore[arg-type]
    answer = np.array(plain(params, 4000))
    transitions = Chain.of(TARGET, params).transitions
    values = []
    for token in range(VOCAB):
        followers = answer[1:][answer[:-1] == token]
        if len(followers) >= 100:
            values.append(p_value(np.bincount(followers, minlength=VOCAB), transitions[token]))
    assert values
    assert min(values) * len(values) > LEAST_P


@pytest.mark.parametrize("setting", [SETTINGS[2], SETTINGS[8]], ids=str)
@pytest.mark.parametrize("draft", [DRAFT, RANDOM, TARGET], ids=["mixed", "random", "self"])
def test_speculation_follows_the_target_whatever_the_draft(setting: dict[str, float], draft: TableModel) -> None:
    params = [SamplingParams(**setting, seed=seed) for seed in range(600)]  # type: ignore[arg-type]
    answers = [speculate(each, draft, coupled) for each in params]
    assert_follows(answers, TARGET, params[0], PROMPT[-1])
    assert answers == [plain(each) for each in params]


@pytest.mark.parametrize("setting", [{"temperature": 0.0}, *SETTINGS], ids=str)
def test_the_ranking_of_a_draft_never_changes_a_choice(setting: dict[str, float]) -> None:
    for seed in range(4):
        params = SamplingParams(**setting, seed=seed)  # type: ignore[arg-type]
        answer = plain(params, 12)
        for draft in (DRAFT, RANDOM, TARGET):
            for nodes in (0, 1, 9):
                assert speculate(params, draft, coupled, nodes=nodes, length=12) == answer


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_draft_that_is_the_target_is_always_right(setting: dict[str, float]) -> None:
    """Draft and target use one noise for one position."""
    for seed in range(200):
        chooser = Chooser(SamplingParams(**setting, seed=seed), VOCAB)  # type: ignore[arg-type]
        logits = TARGET.logits_of([seed % VOCAB])
        assert chooser.rank(logits, seed, 2)[0][0] == chooser.choose(logits, seed)


def test_accepting_the_draft_by_its_own_confidence_is_noticed() -> None:
    """Deliberately wrong: the drafted token is taken with the probability that the draft gave it."""
    rng = random.Random(4)

    def wrong(choice: int, first: Node | None) -> int:
        return first.token if first is not None and rng.random() < first.confidence else choice

    params = [SamplingParams(seed=seed) for seed in range(1500)]
    chain = Chain.of(TARGET, params[0])
    for draft in (RANDOM, TableModel.like(TARGET, 0.0, seed=3)):
        answers = [speculate(each, draft, wrong) for each in params]
        assert worst_p_value(answers, chain, PROMPT[-1]) < LEAST_P


def test_always_accepting_the_draft_is_noticed() -> None:
    def wrong(choice: int, first: Node | None) -> int:
        return choice if first is None else first.token

    params = [SamplingParams(seed=seed) for seed in range(1000)]
    answers = [speculate(each, RANDOM, wrong) for each in params]
    assert worst_p_value(answers, Chain.of(TARGET, params[0]), PROMPT[-1]) < LEAST_P


def test_noise_shared_by_two_positions_is_noticed() -> None:
    """Deliberately wrong: the position does not count, so neighbours are not independent."""
    answers = []
    for seed in range(2000):
        chooser = Chooser(SamplingParams(seed=seed), VOCAB)
        text = list(PROMPT)
        for _ in range(LENGTH):
            text.append(chooser.choose(TARGET.logits_of(text), 0))
        answers.append(text[len(PROMPT) :])
    assert worst_p_value(answers, Chain.of(TARGET, SamplingParams()), PROMPT[-1]) < LEAST_P


def test_ids_beyond_the_cut_never_appear() -> None:
    """Accepted, recovered and bonus tokens alike (case B3)."""
    for setting in SETTINGS[4:]:
        params = SamplingParams(**setting)  # type: ignore[arg-type]
        transitions = Chain.of(TARGET, params).transitions
        for seed in range(200):
            each = SamplingParams(**setting, seed=seed)  # type: ignore[arg-type]
            answer = [PROMPT[-1], *speculate(each, RANDOM, coupled, length=6)]
            assert all(transitions[a, b] > 0 for a, b in itertools.pairwise(answer))


def test_different_seeds_differ_and_the_same_seed_does_not() -> None:
    answers = {tuple(plain(SamplingParams(seed=seed), 20)) for seed in range(1, 21)}
    assert len(answers) == 20
    assert plain(SamplingParams(seed=42), 20) == plain(SamplingParams(seed=42), 20)
    assert plain(SamplingParams(seed=42, choice=1), 20) != plain(SamplingParams(seed=42), 20)


def test_seed_has_no_effect_at_temperature_0() -> None:
    assert len({tuple(plain(SamplingParams(temperature=0.0, seed=seed), 20)) for seed in range(20)}) == 1
