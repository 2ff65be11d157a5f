"""What a request's sampling parameters leave of a row of logits.

Owns: the one implementation of temperature, top-k, top-p and min-p, in this order, as transformers' warpers do it.
Must not know: noise, seeds, trees. Bias, bans and penalties (counted along the path) will come before temperature.

Work is on `scaled` = logits / temperature in float32. Sums of probabilities are in float64, rounded once to float32.

top-k   stay: all tokens whose scaled logit is at least the k-th largest (ties at the edge stay)
top-p   renormalised over what top-k left. Rank tokens by scaled logit, falling, equal ones by falling id (as where
        transformers' rising sort is stable; where it is not, it leaves this open). A token goes if the mass of itself
        and all behind it is at most 1 - p. So the token that crosses p stays, and the first always does.
min-p   stay: all tokens of what is left whose probability is at least min_p times the largest
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specpipe.types import SamplingParams

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_FIRST_REACH = 6.0  # below the largest scaled logit: how far down the first search for the edge of top-p goes


def has_cuts(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def process(logits: Logits, params: SamplingParams) -> Logits:
    """logits' of a temperature above 0: scaled, and -inf where cut. [vocab] float32 -> [vocab] float32.

    softmax of the result is the distribution that the request asked for.
    """
    scaled = scale(logits, params.temperature)
    if not has_cuts(params):
        return scaled
    processed = np.full_like(scaled, -np.inf)
    ids = allowed_ids(logits, params)
    processed[ids] = scaled[ids]
    return processed


def scale(logits: Logits, temperature: float) -> Logits:
    """logits / temperature; where that overflows, the largest become 0 and all others -inf."""
    if temperature == 1.0:
        return logits
    with np.errstate(over="ignore"):
        scaled: Logits = logits / np.float32(temperature)
    if np.isinf(scaled.max()):
        return np.where(logits == logits.max(), np.float32(0.0), np.float32(-np.inf))
    return scaled


def allowed_ids(logits: Logits, params: SamplingParams) -> Ids:
    """Ids that the cuts leave, in no particular order. `logits` hold no NaN, no +inf and something finite."""
    scaled = scale(logits, params.temperature)
    ids = _cut_top_k(scaled, params.top_k)
    if params.top_p < 1.0:
        ids = _cut_top_p(scaled, ids, params.top_p)
    if params.min_p > 0.0:
        ids = _cut_min_p(scaled, ids, params.min_p)
    return np.arange(len(scaled)) if ids is None else ids


def _cut_top_k(scaled: Logits, top_k: int) -> Ids | None:
    """None: nothing is cut."""
    if not 0 < top_k < len(scaled):
        return None
    edge = np.partition(scaled, len(scaled) - top_k)[len(scaled) - top_k]
    return np.flatnonzero(scaled >= edge)


def _cut_top_p(scaled: Logits, ids: Ids | None, top_p: float) -> Ids:
    values = scaled if ids is None else scaled[ids]
    top = values.max()
    total = _mass(values, top)
    reach = np.float32(_FIRST_REACH)
    while True:
        near = np.flatnonzero(values >= top - reach)
        reaches_all = len(near) == len(values) or not np.isfinite(top - reach)
        if reaches_all or _share_behind(total, _mass(values[near], top)) <= np.float32(1.0 - top_p):
            break
        reach *= 2
    kept = near[_first_by_mass(values[near], top, total, top_p)]
    return kept if ids is None else ids[kept]


def _first_by_mass(values: Logits, top: np.float32, total: float, top_p: float) -> Ids:
    """Indices of the shortest prefix, by falling value then falling index, behind which at most 1 - top_p is left."""
    falling = np.sort(values)[::-1]
    weights = np.exp(falling - top).astype(np.float64)
    before = np.concatenate(([0.0], np.cumsum(weights)[:-1]))
    behind = ((total - before) / total).astype(np.float32)  # of the token itself and all behind it
    goes = behind <= np.float32(1.0 - top_p)
    num_kept = max(1, int(np.argmax(goes)) if goes.any() else len(falling))
    edge = falling[num_kept - 1]
    surely = np.flatnonzero(values > edge)
    tied = np.flatnonzero(values == edge)
    return np.concatenate((surely, tied[len(tied) - (num_kept - len(surely)) :]))


def _cut_min_p(scaled: Logits, ids: Ids | None, min_p: float) -> Ids:
    values = scaled if ids is None else scaled[ids]
    kept = np.flatnonzero(np.exp(values - values.max()) >= np.float32(min_p))
    return kept if ids is None else ids[kept]


def _mass(values: Logits, top: np.float32) -> float:
    return float(np.exp(values - top).sum(dtype=np.float64))


def _share_behind(total: float, mass: float) -> np.float32:
    return np.float32((total - mass) / total)
