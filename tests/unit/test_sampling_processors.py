"""Cuts are those of transformers' warpers, in their order, ties at the edges included."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specpipe.sampling import allowed_ids, process
from specpipe.types import SamplingParams

Logits = npt.NDArray[np.float32]

SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.5},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 50},
    {"top_k": 100_000},
    {"top_p": 0.05},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.01},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 0.3, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 0.7, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.2, "top_k": 5, "min_p": 0.3},
]
ROWS = ["normal", "flat", "peaked", "coarse", "ties", "banned"]


def random_row(kind: str, size: int, rng: np.random.Generator) -> Logits:
    row = rng.normal(0, 3, size).astype(np.float32)
    if kind == "flat":
        return row * np.float32(1e-3)
    if kind == "peaked":
        return np.sign(row) * row * row
    if kind == "coarse":  # as bfloat16 rows are: many ties
        return np.round(row * 8) / np.float32(8)
    if kind == "ties":
        return np.round(row)
    if kind == "banned":
        return np.where(rng.random(size) < 0.5, -np.inf, row).astype(np.float32)
    return row


def warped(logits: Logits, params: SamplingParams) -> Logits:
    warpers = LogitsProcessorList()
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    result: Logits = warpers(torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(logits)[None])[0].numpy()
    return result


def is_at_an_edge(logits: Logits, params: SamplingParams, token: int) -> bool:
    """Whether rounding alone decides on this token: its mass or ratio is within 2e-6 of the edge of top-p or min-p."""
    scaled = logits.astype(np.float64) / params.temperature
    if params.top_k:
        scaled[scaled < np.sort(scaled)[::-1][: params.top_k][-1]] = -np.inf
    share = np.exp(scaled - scaled.max())
    share /= share.sum()
    order = np.lexsort((np.arange(len(share)), share))
    behind = np.cumsum(share[order])[np.flatnonzero(order == token)[0]]
    near_top_p = params.top_p < 1.0 and abs(behind - (1 - params.top_p)) < 2e-6
    near_min_p = params.min_p > 0.0 and abs(share[token] / share.max() - params.min_p) < 2e-6
    return bool(near_top_p or near_min_p)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_rows_equal_transformers(setting: dict[str, float], kind: str) -> None:
    params = SamplingParams(**setting)  # type: ignore[arg-type]
    rng = np.random.default_rng(7)
    for size in (1, 2, 17, 64, 1000, 5000):
        for _ in range(5):
            logits = random_row(kind, size, rng)
            if not np.isfinite(logits).any():
                continue
            assert_equal_but_for_ties(logits, params)


def assert_equal_but_for_ties(logits: Logits, params: SamplingParams) -> None:
    """As many of each value stay; which of equal ones at the edge of top-p is open: torch's sort is not stable."""
    ours, theirs = process(logits, params), warped(logits, params)
    assert np.isfinite(ours).any()
    different = np.flatnonzero(ours != theirs)
    if len(different) == 0:
        return
    if (np.sort(ours) == np.sort(theirs)).all():
        assert params.top_p < 1.0
        assert len(set(logits[different].tolist())) == 1
    else:
        assert all(is_at_an_edge(logits, params, int(token)) for token in different), different


def test_large_vocabulary_equals_transformers() -> None:
    rng = np.random.default_rng(11)
    for setting in (
        {"top_p": 0.95},
        {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
        {"temperature": 1.5, "top_p": 0.999},
    ):
        params = SamplingParams(**setting)  # type: ignore[arg-type]
        logits = random_row("normal", 151_936, rng)
        assert_equal_but_for_ties(logits, params)


@pytest.mark.parametrize(
    ("logits", "setting", "kept"),
    [
        ([2.0, 1.0, 1.0, 0.0], {"top_k": 2}, [0, 1, 2]),  # ties at the edge stay
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 0.5}, [2, 3]),  # equal mass: the later ids, as a stable rising sort leaves
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 0.51}, [1, 2, 3]),  # the crossing token stays
        ([0.0, 5.0, 0.0], {"top_p": 1e-9}, [1]),  # the first always stays
        ([np.log(8.0), np.log(4.0), 0.0], {"min_p": 0.5}, [0, 1]),
        ([np.log(6.0), np.log(3.0), np.log(1.0)], {"top_k": 2, "top_p": 0.66}, [0]),  # 6/9 > 0.66: renormalised
        ([3.0, -np.inf, 1.0], {"top_k": 3, "top_p": 0.999}, [0, 2]),
    ],
)
def test_edges(logits: list[float], setting: dict[str, float], kept: list[int]) -> None:
    params = SamplingParams(**setting)  # type: ignore[arg-type]
    ids = allowed_ids(np.array(logits, np.float32), params)
    assert sorted(i for i in ids if logits[i] > -np.inf) == kept


def test_temperature_too_small_to_divide_by_leaves_the_largest() -> None:
    params = SamplingParams(temperature=1e-38, top_p=0.9)
    assert allowed_ids(np.array([1.0, 50.0, 49.0], np.float32), params).tolist() == [1]
    assert process(np.array([1.0, 50.0, 50.0], np.float32), SamplingParams(temperature=1e-38)).tolist() == [
        -np.inf,
        0,
        0,
    ]
