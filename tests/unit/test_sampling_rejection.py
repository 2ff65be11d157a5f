"""The rejection rule's parts, exactly: what is drawn, what is tested, what is left (cases B1, B2, B3)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from specpipe.extensions import MAX_PROPOSAL_TOKENS, validate_extension
from specpipe.sampling import Judge, Proposer, Purpose, SamplingError, uniform
from specpipe.sampling.processors import allowed_ids, process
from specpipe.sampling.rejection import Shares, certain, draw, passes, residual, target_shares
from specpipe.types import Extension, Proposal, SamplingParams

VOCAB = 24
RNG = np.random.default_rng(3)
ROWS = [RNG.normal(0.0, 2.0, VOCAB).astype(np.float32) for _ in range(8)]
SETTINGS = [
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.5, top_p=0.5),
    SamplingParams(temperature=1.0, top_k=3),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=1.5, top_k=6, top_p=0.9, min_p=0.05),
]


def exact_choice(target_probs: Shares, proposal: Proposal) -> Shares:
    """The distribution of the choice over all draws and all uniform numbers, summed instead of sampled."""
    total = np.zeros_like(target_probs)
    rest = residual(target_probs, proposal)
    rest = rest / rest.sum()
    for token, prob in zip(proposal.tokens, proposal.probs, strict=True):
        accepted = min(1.0, target_probs[token] / prob) if prob > 0 else 0.0
        total[token] += prob * accepted
        total += prob * (1.0 - accepted) * rest
    return total


@pytest.mark.parametrize("params", SETTINGS, ids=str)
@pytest.mark.parametrize("draft_temperature", [None, 0.7])
def test_draw_test_and_residual_add_up_to_the_target(params: SamplingParams, draft_temperature: float | None) -> None:
    draft_params = params if draft_temperature is None else SamplingParams(temperature=draft_temperature)
    for target_row, draft_row in itertools.pairwise(ROWS):
        target_probs = target_shares(target_row, params)
        proposal, _ = Proposer(draft_params, VOCAB).propose(draft_row, 9, 1)
        np.testing.assert_allclose(exact_choice(target_probs, proposal), target_probs, atol=1e-6)


def test_a_certain_draft_counts_as_probability_one() -> None:
    target_probs = target_shares(ROWS[0], SamplingParams())
    for token in range(VOCAB):
        np.testing.assert_allclose(exact_choice(target_probs, certain(token)), target_probs, atol=1e-12)


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_a_proposal_is_what_the_cuts_leave_of_the_draft(params: SamplingParams) -> None:
    for row in ROWS:
        proposal, children = Proposer(params, VOCAB).propose(row, 5, 4)
        assert set(proposal.tokens) == set(allowed_ids(row, params).tolist())
        assert all(np.float32(prob) == prob for prob in proposal.probs)
        assert math.isclose(sum(proposal.probs), 1.0, abs_tol=1e-6)
        assert children[0][0] == proposal.token
        assert len({token for token, _ in children}) == len(children) == 4
        validate_extension(
            Extension(
                session=1, base=1, parents=(0,), tokens=(proposal.token,), confidences=(1.0,), proposals=(proposal,)
            )
        )


def test_a_wide_distribution_is_cut_to_its_largest_tokens() -> None:
    row = RNG.normal(0.0, 0.5, 1000).astype(np.float32)
    proposal, _ = Proposer(SamplingParams(temperature=1.2), 1000).propose(row, 5, 3)
    assert list(proposal.tokens) == np.argsort(-row, kind="stable")[:MAX_PROPOSAL_TOKENS].tolist()
    assert math.isclose(sum(proposal.probs), 1.0, abs_tol=1e-5)


def test_ties_at_the_edge_of_a_cut_leave_something_to_draw() -> None:
    proposal, children = Proposer(SamplingParams(top_p=0.01), 1000).propose(np.zeros(1000, np.float32), 5, 3)
    assert proposal.token in allowed_ids(np.zeros(1000, np.float32), SamplingParams(top_p=0.01))
    assert len(children) == 3


def test_confidences_do_not_tell_which_token_was_drawn() -> None:
    """Nor how likely it was: else selection by confidence would bend the answer."""
    seen: dict[int, tuple[float, ...]] = {}
    for seed in range(60):
        proposal, children = Proposer(SamplingParams(seed=seed, temperature=1.5), VOCAB).propose(ROWS[0], 5, 4)
        seen[proposal.token] = tuple(confidence for _, confidence in children)
    assert len(seen) > 4
    assert len(set(seen.values())) == 1


def test_draws_follow_the_proposal() -> None:
    drawn = [Proposer(SamplingParams(seed=seed), VOCAB).propose(ROWS[0], 5, 1)[0] for seed in range(2000)]
    counts = np.bincount([proposal.token for proposal in drawn], minlength=VOCAB)
    expected = np.zeros(VOCAB)
    expected[list(drawn[0].tokens)] = drawn[0].probs
    assert np.abs(counts / 2000 - expected).max() < 4 * math.sqrt(0.25 / 2000)


def test_the_test_is_strict() -> None:
    proposal = Proposal(parent=0, tokens=(0, 1), probs=(0.5, 0.5), index=0)
    shares = np.array([0.25, 0.75])
    assert passes(shares, proposal, 0.4999)
    assert not passes(shares, proposal, 0.5)
    assert not passes(np.array([0.0, 1.0]), proposal, 1e-300)


def test_an_empty_residual_means_the_target() -> None:
    shares = np.array([0.5, 0.5])
    assert residual(shares, Proposal(parent=0, tokens=(0, 1), probs=(0.5, 0.5), index=0)) is shares


def test_a_rejected_token_is_never_the_choice() -> None:
    for seed in range(300):
        params = SamplingParams(seed=seed, temperature=1.5)
        proposal, _ = Proposer(params, VOCAB).propose(ROWS[1], 5, 1)
        shares = target_shares(ROWS[0], params)
        choice = Judge(params, VOCAB).choose(ROWS[0], 5, proposal)
        is_accepted = passes(shares, proposal, uniform(seed, 0, 5, Purpose.TEST))
        assert (choice == proposal.token) is is_accepted


def test_draw_takes_the_index_where_the_running_sum_passes() -> None:
    weights = np.array([0.0, 1.0, 0.0, 3.0, 0.0])
    assert [draw(weights, u) for u in (1e-9, 0.2499, 0.25, 0.9, 1 - 2**-53)] == [1, 1, 3, 3, 3]
    assert draw(weights, 1.0) == 3


def test_greedy_is_the_target_alone_whatever_is_tested() -> None:
    params = SamplingParams(temperature=0.0, seed=4)
    for row in ROWS:
        best = int(np.argmax(row))
        proposal, children = Proposer(params, VOCAB).propose(row, 5, 3)
        assert (proposal.tokens, proposal.probs) == ((best,), (1.0,))
        assert [token for token, _ in children] == np.argsort(-row)[:3].tolist()
        for tested in (None, certain(best), certain((best + 1) % VOCAB)):
            assert Judge(params, VOCAB).choose(row, 5, tested) == best


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_allows_nothing_is_refused(bad: float) -> None:
    row = ROWS[0].copy()
    row[3] = bad
    for params in (SamplingParams(), SamplingParams(temperature=0.0)):
        with pytest.raises(SamplingError):
            Judge(params, VOCAB).choose(row, 5, None)
        with pytest.raises(SamplingError):
            Proposer(params, VOCAB).propose(row, 5, 3)


def test_ids_beyond_the_tokenizer_are_never_proposed_nor_chosen() -> None:
    row = np.concatenate((ROWS[0], np.full(40, 50.0, np.float32)))
    for seed in range(50):
        params = SamplingParams(seed=seed)
        proposal, children = Proposer(params, VOCAB).propose(row, 5, 30)
        assert max(proposal.tokens) < VOCAB
        assert max(token for token, _ in children) < VOCAB
        assert Judge(params, VOCAB).choose(row, 5, proposal) < VOCAB


def test_the_purposes_do_not_share_noise() -> None:
    purposes = (Purpose.DRAFT_SAMPLE, Purpose.TEST, Purpose.RESIDUAL)
    table = np.array([[uniform(7, 0, position, purpose) for purpose in purposes] for position in range(4000)])
    correlation = np.corrcoef(table.T) - np.eye(3)
    assert np.abs(correlation).max() < 4 / math.sqrt(4000)
    assert 0.0 < table.min() < table.max() < 1.0
    assert process(ROWS[0], SamplingParams()) is ROWS[0]
