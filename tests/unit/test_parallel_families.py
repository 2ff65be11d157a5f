"""Every proven family over two ranks, Llama over four: rows of mixed batches equal a fresh stock forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CONFIGS, Driver, create_model, stock_copy
from engine_folders import save_model
from parallel_ranks import parallel_model

from specpipe.errors import SpecpipeError

TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def drive(driver: Driver) -> None:
    """Prefill in chunks, decode rows and trees of several sessions in the same steps."""
    prefilling, drafting, verifying = (driver.open(count) for count in (40, 21, 12))
    driver.step(driver.rows(drafting), driver.rows(verifying, 9))
    for _ in range(2):
        driver.grow_tree(drafting, 4)
        driver.grow_tree(verifying, 5)
        driver.step(driver.rows(prefilling, 19), driver.rows(drafting), driver.rows(verifying))
        driver.commit(verifying, verifying.nodes[-1])
    driver.commit(drafting, drafting.nodes[3])
    driver.grow_tree(drafting, 70)  # more than one word of bits
    driver.step(driver.rows(drafting))


def worst_error(folder: Path, family: str, size: int, *, is_shared: bool = True, **overrides: Any) -> float:
    save_model(folder, family, **overrides)
    with parallel_model(folder, size, is_shared=is_shared) as model:
        driver = Driver(model, seed=3)  # type: ignore[arg-type]
        drive(driver)
    return driver.worst_error(stock_copy(create_model(family, **overrides)))


@pytest.mark.parametrize("family", CONFIGS)
def test_two_ranks_equal_the_stock_forward(family: str, tmp_path: Path) -> None:
    assert worst_error(tmp_path, family, 2) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "llama_mha_bias", "phi3", "qwen3"])
def test_four_ranks_equal_the_stock_forward_also_with_fewer_kv_heads(family: str, tmp_path: Path) -> None:
    assert worst_error(tmp_path, family, 4) < TOLERANCE


def test_ranks_that_share_no_memory_meet_over_gloo(tmp_path: Path) -> None:
    assert worst_error(tmp_path, "llama", 2, is_shared=False) < TOLERANCE


def test_tied_embeddings_over_two_ranks(tmp_path: Path) -> None:
    assert worst_error(tmp_path, "llama", 2, tie_word_embeddings=True) < TOLERANCE


def test_heads_that_do_not_divide_are_refused_with_the_numbers(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    with (
        pytest.raises(SpecpipeError, match=r"tensor_parallel_size 3 .* 4 attention heads"),
        parallel_model(tmp_path, 3),
    ):
        pass
