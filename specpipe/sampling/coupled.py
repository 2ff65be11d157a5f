"""The coupled rule: the target samples with noise that draft and target share, and the draft tree follows.

Owns: `Chooser`, one session's choices. Must not know: trees, models, torch. Why this rule: docs/decisions/0002.

The rule. Let `allowed` be the ids that the request's cuts leave of logits / temperature (see processors). The choice at
a position is the smallest id among `allowed` with the largest

    score(v) = logits[v] + temperature * g(position, v)        each operation rounded to float32

which is temperature x (logits / temperature + g): a sample of softmax(logits') by the Gumbel-max trick. `logits` here
are *not* divided by the temperature. At temperature 0 noise and cuts play no part.

Cost. The winner among all tokens is found without the noise of most: with `loud` the tokens of largest noise and
`bound` above the noise of all others, a token that is not loud can only win if logits + temperature * bound reaches
the best score known. float32 rounding is monotonic, so this loses no winner and no tie.
"""

from __future__ import annotations

import functools
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from specpipe.errors import ErrorCode, SpecpipeError
from specpipe.sampling.noise import PositionNoise, loud_limit, position_key
from specpipe.sampling.processors import allowed_ids, has_cuts
from specpipe.types import SamplingParams

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_MAX_POSITIONS = 64  # positions whose noise is kept: more than a tree is deep
_FEW = 2048  # so many allowed ids are scored one by one
_LARGEST_GAIN = 1e300  # finite, so that nothing times it is nothing
_NEGLIGIBLE = np.float32(16.0)  # what lies this far below the best adds nothing to a confidence
_NUM_FILLS = 4  # so many times the tokens wanted are looked at below the draft's own cut
_MAX_TEMPERATURE = np.float32(1e30)  # beyond it nothing changes: noise alone decides, and stays far below float32's end
_BELOW_CUT = np.float32(3.0)  # by how much the logit of a token just below the draft's own cut is lowered


class SamplingError(SpecpipeError):
    """A row of logits from which nothing can be chosen: NaN, infinite, nothing allowed. Fails its session only."""

    code = ErrorCode.INTERNAL


class Chooser:
    """All choices of one session. Not thread-safe; the same arguments always give the same choice."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._temperature = min(np.float32(params.temperature), _MAX_TEMPERATURE)
        self._has_cuts = has_cuts(params)
        self._positions: OrderedDict[int, PositionNoise] = OrderedDict()

    def choose(self, logits: Logits, position: int) -> int:
        """The target's choice for the token at `position`, from the logits [vocab] of the row before it.

        Raises SamplingError if the row holds NaN or +inf, or allows nothing.
        """
        logits = checked_row(logits, self._vocab_size)
        if self._temperature == 0.0:
            return int(np.argmax(logits))
        noise = self._noise(position)
        if self._has_cuts:
            allowed = allowed_ids(logits, self._params)
            if len(allowed) <= _FEW:
                return _winner(allowed, logits[allowed] + self._temperature * noise.of(allowed))
            logits = _masked(logits, allowed)
        return _winner(*_contenders(logits, self._temperature, noise, 1))

    def rank(self, logits: Logits, position: int, count: int) -> list[tuple[int, float]]:
        """The draft's guesses at that choice: up to `count` pairs (token, confidence), best first.

        The first is what `choose` would return for these logits. Tokens that the draft's own cut forbids come last:
        the target may allow them. Tokens whose logit is -inf never come. Confidences never rise along the list; they
        are softmax(logits + temperature * g), over the vocabulary or what the cut leaves of it.
        Raises SamplingError like `choose`.
        """
        logits = checked_row(logits, self._vocab_size)
        if self._temperature == 0.0:
            return self._rank_greedy(logits, count)
        noise = self._noise(position)
        if self._has_cuts:
            ids, scores, total = self._rank_cut(logits, noise, count)
        else:
            ids, scores, total = _rank_all(logits, self._temperature, noise, count)
        shares = np.minimum.accumulate(_exp(scores - scores[0]) / max(total, 1.0))
        return [(int(token), float(share)) for token, share in zip(ids, shares, strict=True)]

    def _noise(self, position: int) -> PositionNoise:
        noise = self._positions.get(position)
        if noise is None:
            key = position_key(self._params.seed, self._params.choice, position)
            noise = self._positions[position] = PositionNoise(key, self._vocab_size)
            if len(self._positions) > _MAX_POSITIONS:
                self._positions.popitem(last=False)
        self._positions.move_to_end(position)
        return noise

    def _rank_greedy(self, logits: Logits, count: int) -> list[tuple[int, float]]:
        ids = _largest(logits, count)
        shares = _exp(logits[ids] - logits[ids[0]]) / _total_exp(logits, logits[ids[0]])
        return [(int(token), float(share)) for token, share in zip(ids, shares, strict=True)]

    def _rank_cut(self, logits: Logits, noise: PositionNoise, count: int) -> tuple[Ids, Logits, float]:
        """Ids, scores and the sum of exp(score - best score): allowed ones, then if need be some from below the cut."""
        allowed = allowed_ids(logits, self._params)
        if len(allowed) > _FEW:
            return _rank_all(_masked(logits, allowed), self._temperature, noise, count)
        all_scores = logits[allowed] + self._temperature * noise.of(allowed)
        ids, scores = _best(allowed, all_scores, count)
        total = float(_exp(all_scores - scores[0]).sum())
        rest = _below_cut(logits, allowed)
        if len(ids) < count and rest.max() > -np.inf:
            near = _largest(rest, _NUM_FILLS * count)
            more, more_scores = _best(near, rest[near] + self._temperature * noise.of(near), count - len(ids))
            ids, scores = np.concatenate((ids, more)), np.concatenate((scores, more_scores))
            total += float(_exp(more_scores - scores[0]).sum())
        return ids, scores, total


def checked_row(logits: Logits, vocab_size: int) -> Logits:
    """The row without what is beyond the tokenizer. Raises SamplingError if nothing can be chosen from it."""
    if len(logits) < vocab_size:
        raise SamplingError(f"a row of {len(logits)} logits for a vocabulary of {vocab_size}")
    logits = logits[:vocab_size]
    largest = logits.max()  # NaN if there is one
    if np.isfinite(largest):
        return logits
    what = "NaN" if np.isnan(largest) else "+inf" if largest > 0 else "nothing that is allowed"
    raise SamplingError(f"the logits hold {what}; no token can be chosen")


def _masked(logits: Logits, allowed: Ids) -> Logits:
    masked = np.full_like(logits, -np.inf)
    masked[allowed] = logits[allowed]
    return masked


def _below_cut(logits: Logits, allowed: Ids) -> Logits:
    """Logits of what a draft's own cut forbids, lowered the more the further a token is from the cut.

    The target's cut lies elsewhere, but not far: with two models some nats apart, what is just below the cut of one is
    often allowed by the other, and what is far below never.
    """
    kept = logits[allowed]
    edge = kept[kept > -np.inf].min()
    rest: Logits = np.float32(3.0) * logits - (_BELOW_CUT + np.float32(2.0) * edge)
    rest[allowed] = -np.inf
    return rest


def _rank_all(logits: Logits, temperature: np.float32, noise: PositionNoise, count: int) -> tuple[Ids, Logits, float]:
    known, known_scores = _contenders(logits, temperature, noise, count)
    ids, scores = _best(known, known_scores, count)
    total = float(_exp(known_scores - scores[0]).sum())
    if not np.isneginf(noise.loud.bound):
        quiet = _total_exp(logits, scores[0]) - float(_exp(logits[known] - scores[0]).sum())
        total += max(0.0, quiet) * _mean_gain(float(temperature), noise.vocab_size)
    return ids, scores, total


def _contenders(logits: Logits, temperature: np.float32, noise: PositionNoise, count: int) -> tuple[Ids, Logits]:
    """Ids, each once, and scores of a superset of the `count` tokens of largest score, ties at the edge included."""
    loud = noise.loud
    ids, scores = loud.ids, logits[loud.ids] + temperature * loud.noise
    if np.isneginf(loud.bound):  # all tokens are loud
        return ids, scores
    gain = temperature * loud.bound
    floor = max(_nth_largest(scores, count), logits.max() - gain)  # a guess; the loop ends when so many reached it
    while True:
        is_near = logits + gain >= floor
        is_near[loud.ids] = False
        near = np.flatnonzero(is_near)
        near_scores = logits[near] + temperature * noise.of(near)
        all_scores = np.concatenate((scores, near_scores))
        reached = _nth_largest(all_scores, count)
        if reached >= floor:
            return np.concatenate((ids, near)), all_scores
        floor = reached


def _winner(ids: Ids, scores: Logits) -> int:
    return int(ids[scores == scores.max()].min())


def _nth_largest(scores: Logits, count: int) -> np.float32:
    """-inf if there are fewer."""
    if len(scores) < count:
        return np.float32(-np.inf)
    return np.float32(np.partition(scores, len(scores) - count)[len(scores) - count])


def _best(ids: Ids, scores: Logits, count: int) -> tuple[Ids, Logits]:
    """The `count` of largest score, falling, equal ones by rising id; without those that are -inf."""
    if len(ids) > 8 * count:
        is_best = scores >= _nth_largest(scores, count)
        ids, scores = ids[is_best], scores[is_best]
    order = np.lexsort((ids, -scores))[:count]
    order = order[scores[order] > -np.inf]
    return ids[order], scores[order]


def _largest(logits: Logits, count: int) -> Ids:
    """Ids of the `count` largest logits, falling, equal ones by rising id; without those that are -inf."""
    edge = _nth_largest(logits, min(count, len(logits)))
    ids = np.flatnonzero(logits >= edge)
    return _best(ids, logits[ids], count)[0]


def _exp(values: Logits) -> npt.NDArray[np.float64]:
    """exp in float64, never infinite."""
    return np.exp(np.minimum(values, np.float32(600.0)).astype(np.float64))


def _total_exp(logits: Logits, top: np.float32) -> float:
    """The sum of exp(logits - top), but for what is too small to matter in a confidence."""
    above = logits[np.flatnonzero(logits >= top - _NEGLIGIBLE)] - top
    return float(np.exp(np.minimum(above, np.float32(80.0))).sum(dtype=np.float64))


@functools.lru_cache(maxsize=256)
def _mean_gain(temperature: float, vocab_size: int) -> float:
    """Mean of exp(temperature * g) over the noise of tokens that are not loud: it stands for the tokens that could not
    win and whose noise was never computed. Good enough for a confidence, which is calibrated anyway."""
    loudest = float(loud_limit(vocab_size)[0]) / 2.0**64
    u = loudest + (1.0 - loudest) * (np.arange(4096) + 0.5) / 4096
    with np.errstate(over="ignore"):
        gain = float(np.exp(-temperature * np.log(-np.log1p(-u))).mean())
    return min(gain, _LARGEST_GAIN)
