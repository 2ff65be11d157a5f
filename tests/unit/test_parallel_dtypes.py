"""Two ranks in bfloat16 and with packed weights: as near the truth as one rank, and its tokens by the margin rule.

Where FBGEMM is there (x86), weights that came from bfloat16 are packed as float16 and computed in float32, on each rank
by itself: two ranks differ from one by the order of float32 sums. Elsewhere rows are bfloat16 all the way; each rank's
part of a sum is then rounded once more than on one rank, which moves logits no further from those of float32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from engine_cases import Driver, SeenRow, create_model, stock_copy
from engine_folders import save_model
from parallel_ranks import parallel_model
from test_parallel_families import drive

from specpipe.config import EngineConfig
from specpipe.engine import linear
from specpipe.engine.interface import StepModel
from specpipe.engine.loader import load_model

PACKED_TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 0.05  # of the largest logit
MAX_ERROR_RATIO = 1.25  # of two ranks over one, as root mean squares over all rows

Rows = npt.NDArray[np.float32]  # [num_rows, vocab]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def steps_of(model: StepModel) -> list[SeenRow]:
    driver = Driver(model, seed=3)  # type: ignore[arg-type]
    drive(driver)
    return driver.seen


def truth_of(family: str, seen: list[SeenRow]) -> Rows:
    """The stock model's logits for the same rows, computed in float32 from the same bfloat16 weights."""
    stock = stock_copy(create_model(family))
    with torch.inference_mode():
        for weight in stock.parameters():
            weight.copy_(weight.to(torch.bfloat16))
        rows = [stock(input_ids=torch.tensor([row.path]), use_cache=False).logits[0, -1].numpy() for row in seen]
    return np.stack(rows)


def rows_of_one_and_two_ranks(folder: Path, family: str, dtype: str) -> tuple[Rows, Rows, Rows]:
    """One rank's and two ranks' logits of the same steps, and the truth."""
    save_model(folder, family, dtype=torch.bfloat16)
    one = steps_of(load_model(EngineConfig(model=str(folder), num_slots=400, dtype=dtype)))
    with parallel_model(folder, 2, dtype=dtype) as model:
        two = steps_of(model)
    assert [row.path for row in one] == [row.path for row in two]
    return np.stack([row.logits for row in one]), np.stack([row.logits for row in two]), truth_of(family, one)


def worst_margin(one: Rows, two: Rows, truth: Rows) -> float:
    """Where the two choose different tokens: the largest gap that the truth has between them. 0: they never do."""
    rows = np.arange(len(truth))
    return float(np.abs(truth[rows, one.argmax(axis=1)] - truth[rows, two.argmax(axis=1)]).max())


def rms(error: Rows) -> float:
    return float(np.sqrt((error.astype(np.float64) ** 2).mean()))


@pytest.mark.skipif(not linear._has_fbgemm(), reason="weights are not packed on this machine")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "phi3", "mixtral"])
def test_packed_weights_over_two_ranks_equal_one_rank(family: str, tmp_path: Path) -> None:
    one, two, truth = rows_of_one_and_two_ranks(tmp_path, family, "auto")
    assert np.abs(one - two).max() < PACKED_TOLERANCE
    assert np.abs(two - truth).max() < PACKED_TOLERANCE
    assert worst_margin(one, two, truth) < 2 * PACKED_TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bfloat16_over_two_ranks_is_as_near_the_truth_as_one_rank(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_has_fbgemm", lambda: False)
    one, two, truth = rows_of_one_and_two_ranks(tmp_path, family, "bfloat16")
    bound = BFLOAT16_TOLERANCE * float(np.abs(truth).max())
    assert rms(one - truth) > 1e-3  # it was bfloat16 that summed
    assert rms(two - truth) < MAX_ERROR_RATIO * rms(one - truth)
    assert np.abs(two - truth).max() < bound
    assert worst_margin(one, two, truth) < 2 * bound
