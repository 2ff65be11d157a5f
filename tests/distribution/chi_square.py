"""Chi-square tests of answers against exact probabilities, shared by all distribution tests.

A table model of order 1 is a Markov chain, so the distribution of every position of an answer, and of every pair of
neighbours, is known exactly: `Chain` computes them with warpers' semantics written out a second time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specpipe.testing import TableModel
from specpipe.types import SamplingParams

Shares = npt.NDArray[np.float64]

LEAST_P = 1e-4  # seeds are fixed: a test either always passes or never
_LEAST_EXPECTED = 5.0


def p_value(counts: npt.ArrayLike, probabilities: npt.ArrayLike) -> float:
    """Of Pearson's test; outcomes expected fewer than 5 times are pooled. 0 if something impossible was seen."""
    observed = np.asarray(counts, np.float64).ravel()
    expected = np.asarray(probabilities, np.float64).ravel() * observed.sum()
    if observed[expected == 0].any():
        return 0.0
    is_rare = expected < _LEAST_EXPECTED
    observed = np.append(observed[~is_rare], observed[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    if expected[-1] < _LEAST_EXPECTED:  # too little even together: it joins the smallest of the others
        smallest = int(np.argmin(expected[:-1])) if len(expected) > 1 else -1
        observed[smallest] += observed[-1]
        expected[smallest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) < 2:
        return 1.0
    expected *= observed.sum() / expected.sum()
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return _chi_square_tail(statistic, len(expected) - 1)


def _chi_square_tail(statistic: float, degrees: int) -> float:
    """How likely a chi-square variable is to be as large as this, or larger."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@dataclass(frozen=True)
class Chain:
    """Exact probabilities of answers of a table model of order 1 under a request's sampling parameters."""

    transitions: Shares  # [token, next token]

    @classmethod
    def of(cls, model: TableModel, params: SamplingParams) -> Chain:
        rows = [model.logits_of([token]) for token in range(model.info.vocab_size)]
        return cls(np.array([target_probs(row, params) for row in rows]))

    def marginals(self, last: int, length: int) -> list[Shares]:
        """The distribution of each position of an answer that follows token `last`."""
        shares = [self.transitions[last]]
        for _ in range(length - 1):
            shares.append(shares[-1] @ self.transitions)
        return shares

    def pairs(self, last: int, length: int) -> list[Shares]:
        """[token, next token] of each two neighbouring positions."""
        return [share[:, None] * self.transitions for share in self.marginals(last, length)[:-1]]


def target_probs(logits: npt.NDArray[np.float32], params: SamplingParams) -> Shares:
    """softmax(logits') in float64: temperature, top-k with ties, top-p with the crossing token, min-p."""
    scaled = logits.astype(np.float64) / params.temperature
    if params.top_k:
        scaled[scaled < np.sort(scaled)[-min(params.top_k, len(scaled))]] = -np.inf
    if params.top_p < 1.0:
        order = np.argsort(-scaled, kind="stable")
        before = np.cumsum(_softmax(scaled)[order]) - _softmax(scaled)[order]
        scaled[order[before >= params.top_p]] = -np.inf
    if params.min_p > 0.0:
        share = _softmax(scaled)
        scaled[share < params.min_p * share.max()] = -np.inf
    return _softmax(scaled)


def worst_p_value(answers: Sequence[Sequence[int]], chain: Chain, last: int) -> float:
    """The smallest p-value, times their number, over all positions and all pairs of neighbours of the answers."""
    table = np.asarray(answers)  # [num_answers, length]
    size, length = len(chain.transitions), table.shape[1]
    values = [
        p_value(np.bincount(table[:, i], minlength=size), share)
        for i, share in enumerate(chain.marginals(last, length))
    ]
    for i, share in enumerate(chain.pairs(last, length)):
        values.append(p_value(np.bincount(table[:, i] * size + table[:, i + 1], minlength=size * size), share))
    return min(1.0, min(values) * len(values))


def follower_p_value(answers: Sequence[Sequence[int]], chain: Chain, last: int) -> float:
    """The smallest p-value, times their number, over all tokens: what followed each, at whatever positions."""
    followers = np.zeros_like(chain.transitions)
    for answer in answers:
        for pair in itertools.pairwise([last, *answer]):
            followers[pair] += 1
    values = [p_value(row, share) for row, share in zip(followers, chain.transitions, strict=True) if row.sum() >= 100]
    return min(1.0, min(values) * len(values)) if values else 1.0


def assert_follows(answers: Sequence[Sequence[int]], model: TableModel, params: SamplingParams, last: int) -> float:
    """Answers of one length, all begun after token `last`, are samples of what the target alone would say.

    Returns the smallest p-value.
    """
    chain = Chain.of(model, params)
    value = min(worst_p_value(answers, chain, last), follower_p_value(answers, chain, last))
    assert value > LEAST_P, f"the answers do not follow the target's distribution: p = {value:.2e}"
    return value


def _softmax(scaled: Shares) -> Shares:
    weights = np.exp(scaled - scaled.max())
    total: Shares = weights / weights.sum()
    return total
