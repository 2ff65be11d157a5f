"""The rejection rule of Leviathan et al. and Chen et al.: draw from the draft, test against the target.

Owns: `Proposer`, the draft's side, and `Judge`, the target's. Must not know: trees, models, torch. What it promises and
why it is not the default: docs/decisions/0002. What it forbids: 0007.

With `draft_probs` the distribution that a sampled child was drawn from and `target_probs` the softmax of the target's
logits', both under the request's parameters, and u uniform: the child's token is the target's choice if
u x draft_prob < target_prob, strictly; else the choice is drawn from the positive part of (target_probs - draft_probs),
or from target_probs where that is empty. Where no child is tested the choice is drawn from target_probs. Either way the
choice is a sample of target_probs, provided that whether the child is tested does not depend on which token it is.

Uniform numbers belong to (seed, choice, position, purpose): one for the test, one for what is drawn when no test was
passed. A position is decided once, so none is used twice. The draft draws at many nodes of one position; their numbers
depend on the text before them as well. Were they the same, a node's draw would be known from its cousin's, and what
grew below the cousin had its say in whether the node is there in time to be tested.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from specpipe.extensions import MAX_PROPOSAL_TOKENS
from specpipe.sampling.coupled import Chooser, checked_row
from specpipe.sampling.noise import Purpose, uniform
from specpipe.sampling.processors import process
from specpipe.types import Proposal, SamplingParams

Logits = npt.NDArray[np.float32]
Shares = npt.NDArray[np.float64]

CONTEXT = 16  # tokens before a node that its draw's uniform number depends on

_FIRST_COVERAGE = 0.45  # of what is expected to be rejected: how often the first other child is the choice ...
_NEXT_COVERAGE = 0.45  # ... and each further one, as a share of the one before


class Proposer:
    """The draft's draws for one session. The same arguments always give the same draw."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._ranker = Chooser(params, vocab_size)

    def propose(
        self, logits: Logits, position: int, count: int, *, text: Sequence[int] = ()
    ) -> tuple[Proposal, list[tuple[int, float]]]:
        """What to draft for `position` from the logits [vocab] of the row before it; `text` ends with that row's token.

        Returns the proposal (its parent is 0, to be filled in) and up to `count` children (token, confidence): the
        sampled one, then the likeliest others. Above temperature 0 confidences are functions of the distribution
        alone, never of the token drawn, so that whatever is decided by them is independent of it.
        Raises SamplingError if the row holds NaN or +inf, or allows nothing.
        """
        if self._params.temperature == 0.0:
            ranked = self._ranker.rank(logits, position, count)
            return certain(ranked[0][0]), ranked
        logits = checked_row(logits, self._vocab_size)
        processed = process(logits, self._params)
        allowed = _largest(processed, MAX_PROPOSAL_TOKENS)
        allowed = allowed[np.isfinite(processed[allowed])]
        probs = _normalised(processed[allowed])
        u = uniform(self._params.seed, self._params.choice, position, Purpose.DRAFT_SAMPLE, text[-CONTEXT:])
        index = draw(probs.astype(np.float64), u)
        proposal = Proposal(parent=0, tokens=tuple(allowed.tolist()), probs=tuple(probs.tolist()), index=index)
        near = _largest(logits, count).tolist()
        others = [token for token in near if token != proposal.token and logits[token] > -np.inf]
        return proposal, _children(proposal, others[: count - 1])


class Judge:
    """The target's choices for one session. Choices depend on the draft, their distribution does not."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self._params = params
        self._vocab_size = vocab_size

    def choose(self, logits: Logits, position: int, tested: Proposal | None) -> int:
        """The target's choice for the token at `position`, from the logits [vocab] of the row before it.

        `tested`: what a verified sampled child was drawn from; None if there is none.
        Raises SamplingError if the row holds NaN or +inf, or allows nothing.
        """
        logits = checked_row(logits, self._vocab_size)
        if self._params.temperature == 0.0:
            return int(np.argmax(logits))  # what test and residual come to
        target_probs = target_shares(logits, self._params)
        if tested is None:
            return draw(target_probs, self._uniform(position, Purpose.RESIDUAL))
        if passes(target_probs, tested, self._uniform(position, Purpose.TEST)):
            return tested.token
        return draw(residual(target_probs, tested), self._uniform(position, Purpose.RESIDUAL))

    def _uniform(self, position: int, purpose: Purpose) -> float:
        return uniform(self._params.seed, self._params.choice, position, purpose)


def certain(token: int) -> Proposal:
    """The proposal of a drafter that does not draw: probability 1 on its token."""
    return Proposal(parent=0, tokens=(token,), probs=(1.0,), index=0)


def certain_draws(parents: Sequence[int], tokens: Sequence[int]) -> tuple[Proposal, ...]:
    """Proposals of a drafter that does not draw, for an extension's nodes: the first named child of each node."""
    first: dict[int, int] = {}
    for parent, token in zip(parents, tokens, strict=True):
        first.setdefault(parent, token)
    return tuple(replace(certain(token), parent=parent) for parent, token in first.items())


def target_shares(logits: Logits, params: SamplingParams) -> Shares:
    """The distribution that the request asked for: softmax of logits', in float64. [vocab] -> [vocab]."""
    processed = process(logits, params)
    weights = np.exp((processed - processed.max()).astype(np.float64))
    shares: Shares = weights / weights.sum()
    return shares


def passes(target_probs: Shares, tested: Proposal, u: float) -> bool:
    return bool(u * tested.probs[tested.index] < target_probs[tested.token])


def residual(target_probs: Shares, tested: Proposal) -> Shares:
    """Weights of what is drawn after a failed test: the positive part of the difference, never its softmax."""
    rest = target_probs.copy()
    rest[list(tested.tokens)] -= np.array(tested.probs)
    np.maximum(rest, 0.0, out=rest)
    return rest if rest.any() else target_probs


def draw(weights: Shares, u: float) -> int:
    """The index at which the running sum of `weights` passes u times their total."""
    sums = np.cumsum(weights)
    index = int(np.searchsorted(sums, u * sums[-1], side="right"))
    return index if index < len(weights) else int(np.flatnonzero(weights)[-1])


def _children(proposal: Proposal, others: list[int]) -> list[tuple[int, float]]:
    """Tokens with confidences that rank and distribution decide."""
    accepted = math.sqrt(max(proposal.probs))  # rises with what is expected to be accepted; calibrated by its users
    children = [(proposal.token, accepted)]
    share = _FIRST_COVERAGE
    for token in others:
        children.append((token, (1.0 - accepted) * share))
        share *= _NEXT_COVERAGE
    return children


def _largest(logits: Logits, count: int) -> npt.NDArray[np.int64]:
    """Ids of the `count` largest logits, falling, equal ones by rising id."""
    count = min(count, len(logits))
    edge = np.partition(logits, len(logits) - count)[len(logits) - count]
    ids = np.flatnonzero(logits >= edge)
    return ids[np.lexsort((ids, -logits[ids]))][:count]


def _normalised(scaled: Logits) -> Logits:
    weights = np.exp(scaled - scaled.max())
    probs: Logits = weights / weights.sum(dtype=np.float32)
    return probs
