"""Answers under the rejection rule follow the target's distribution; rules that look like it do not (cases B1-B3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from chi_square import LEAST_P, Chain, assert_follows, target_probs, worst_p_value

from specpipe.sampling import Judge, Proposer, Purpose, uniform
from specpipe.sampling.rejection import certain, draw, passes, residual, target_shares
from specpipe.testing import TableModel
from specpipe.types import Proposal, SamplingParams

VOCAB = 16
LENGTH = 4
CHAIN = 3  # tokens drafted a round
PROMPT = [3, 7]
TARGET = TableModel(VOCAB, seed=5, spread=1.5, order=1)
DRAFT = TableModel.like(TARGET, 0.5, seed=2)
RANDOM = TableModel(VOCAB, seed=99, spread=1.5, order=1)

SETTINGS = [
    {"temperature": 0.2},
    {"temperature": 0.7},
    {"temperature": 1.5},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
]

Drafter = Callable[[SamplingParams, list[int]], Proposal]
Selection = Callable[[Proposal], bool]
"""Whether a node with this proposal has its sampled child verified."""
Rule = Callable[[SamplingParams, list[int], Proposal | None], int]
"""(parameters, text, what the verified child was drawn from) -> the choice."""


def sampled(draft: TableModel, **changes: float) -> Drafter:
    def drafter(params: SamplingParams, text: list[int]) -> Proposal:
        proposer = Proposer(replace(params, **changes), VOCAB)  # type: ignore[arg-type]
        return proposer.propose(draft.logits_of(text), len(text), 1)[0]

    return drafter


def greedy(params: SamplingParams, text: list[int]) -> Proposal:
    return certain(int(np.argmax(RANDOM.logits_of(text))))


def judged(params: SamplingParams, text: list[int], tested: Proposal | None) -> int:
    return Judge(params, VOCAB).choose(TARGET.logits_of(text), len(text), tested)


def always(proposal: Proposal) -> bool:
    return True


def speculate(params: SamplingParams, drafter: Drafter, rule: Rule, is_verified: Selection) -> list[int]:
    """Rounds of: draw a chain, verify it, walk as far as tests are passed.

    A draw is a function of (text, seed): those that the walk does not come to are left out.
    """
    text = list(PROMPT)
    while len(text) < len(PROMPT) + LENGTH:
        for depth in range(CHAIN + 1):
            proposal = drafter(params, text) if depth < CHAIN else None
            tested = proposal if proposal is not None and is_verified(proposal) else None
            text.append(rule(params, text, tested))
            if tested is None or text[-1] != tested.token:
                break
    return text[len(PROMPT) : len(PROMPT) + LENGTH]


def answers(
    setting: dict[str, float],
    drafter: Drafter,
    *,
    number: int = 1000,
    rule: Rule = judged,
    is_verified: Selection = always,
) -> tuple[list[list[int]], SamplingParams]:
    params = SamplingParams(**setting)  # type: ignore[arg-type]
    return [speculate(replace(params, seed=seed), drafter, rule, is_verified) for seed in range(number)], params


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_random_draft_changes_nothing(setting: dict[str, float]) -> None:
    said, params = answers(setting, sampled(RANDOM))
    assert_follows(said, TARGET, params, PROMPT[-1])


@pytest.mark.parametrize(
    "drafter",
    [sampled(DRAFT), sampled(TARGET), sampled(RANDOM, temperature=0.5), sampled(DRAFT, top_k=2), greedy],
    ids=["mixed", "self", "other temperature", "other cut", "greedy"],
)
@pytest.mark.parametrize("setting", [SETTINGS[2], SETTINGS[6]], ids=str)
def test_any_draft_changes_nothing(drafter: Drafter, setting: dict[str, float]) -> None:
    said, params = answers(setting, drafter)
    assert_follows(said, TARGET, params, PROMPT[-1])


def test_selection_by_the_distribution_changes_nothing() -> None:
    said, params = answers(SETTINGS[2], sampled(DRAFT), is_verified=lambda proposal: max(proposal.probs) > 0.4)
    assert_follows(said, TARGET, params, PROMPT[-1])


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_accept_rate_is_the_overlap(setting: dict[str, float]) -> None:
    params = SamplingParams(**setting)  # type: ignore[arg-type]
    row, draft_row = TARGET.logits_of(PROMPT), RANDOM.logits_of(PROMPT)
    number, accepted = 1500, 0
    for seed in range(number):
        seeded = replace(params, seed=seed)
        proposal, _ = Proposer(seeded, VOCAB).propose(draft_row, 2, 1)
        accepted += Judge(seeded, VOCAB).choose(row, 2, proposal) == proposal.token
    overlap = np.minimum(target_probs(row, params), target_probs(draft_row, params)).sum()
    assert abs(accepted / number - overlap) < 4 * np.sqrt(max(overlap * (1 - overlap), 1e-3) / number)


# Rules that are wrong. Each must be noticed.


def softmax_of_the_rest(params: SamplingParams, text: list[int], tested: Proposal | None) -> int:
    shares = target_shares(TARGET.logits_of(text), params)
    if tested is None or passes(shares, tested, uniform(params.seed, 0, len(text), Purpose.TEST)):
        return judged(params, text, tested)
    rest = np.exp(residual(shares, tested))
    return draw(rest, uniform(params.seed, 0, len(text), Purpose.RESIDUAL))


def the_target_again(params: SamplingParams, text: list[int], tested: Proposal | None) -> int:
    """After a failed test it draws from target_probs, not from what is left of them."""
    shares = target_shares(TARGET.logits_of(text), params)
    if tested is not None and passes(shares, tested, uniform(params.seed, 0, len(text), Purpose.TEST)):
        return tested.token
    return judged(params, text, None)


def every_child_tested(params: SamplingParams, text: list[int], tested: Proposal | None) -> int:
    """After the sampled child it tests the other candidates as if they had been drawn as well."""
    shares = target_shares(TARGET.logits_of(text), params)
    if tested is not None:
        indices = [tested.index, *(i for i in range(len(tested.tokens)) if i != tested.index)]
        for i in indices[:3]:
            u = uniform(params.seed, i, len(text), Purpose.TEST)
            if passes(shares, replace(tested, index=i), u):
                return tested.tokens[i]
    return judged(params, text, tested)


def everything_accepted(params: SamplingParams, text: list[int], tested: Proposal | None) -> int:
    return judged(params, text, None) if tested is None else tested.token


def one_noise_for_all(params: SamplingParams, text: list[int], tested: Proposal | None) -> int:
    """The test uses the uniform number that the draw used."""
    shares = target_shares(TARGET.logits_of(text), params)
    if tested is None or passes(shares, tested, uniform(params.seed, 0, len(text), Purpose.DRAFT_SAMPLE)):
        return judged(params, text, None) if tested is None else tested.token
    return draw(residual(shares, tested), uniform(params.seed, 0, len(text), Purpose.RESIDUAL))


@pytest.mark.parametrize(
    "rule", [softmax_of_the_rest, the_target_again, every_child_tested, everything_accepted, one_noise_for_all]
)
def test_a_wrong_rule_is_noticed(rule: Rule) -> None:
    said, params = answers({"temperature": 1.0}, sampled(RANDOM), rule=rule, number=1000)
    assert worst_p_value(said, Chain.of(TARGET, params), PROMPT[-1]) < LEAST_P


def test_selection_by_the_drawn_tokens_probability_is_noticed() -> None:
    confident = lambda proposal: proposal.probs[proposal.index] > 0.4  # noqa: E731
    said, params = answers({"temperature": 1.0}, sampled(DRAFT), is_verified=confident, number=1500)
    assert worst_p_value(said, Chain.of(TARGET, params), PROMPT[-1]) < LEAST_P


def test_a_greedy_draft_scored_as_if_it_had_been_sampled_is_noticed() -> None:
    def scored(params: SamplingParams, text: list[int]) -> Proposal:
        proposal = sampled(RANDOM)(params, text)
        return replace(proposal, index=int(np.argmax(proposal.probs)))

    said, params = answers({"temperature": 1.0}, scored, number=1000)
    assert worst_p_value(said, Chain.of(TARGET, params), PROMPT[-1]) < LEAST_P
