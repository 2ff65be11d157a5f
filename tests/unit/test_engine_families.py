"""Every proven family: each row of any mixed batch equals a fresh stock forward of exactly its path."""

from __future__ import annotations

import pytest
import torch
from engine_cases import CONFIGS, Driver, create_model, create_runner, stock_copy

from specpipe.engine.families import PROVEN

TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_all_proven_families_are_tested() -> None:
    assert {type(create_model(family)).__name__ for family in CONFIGS} == PROVEN


@pytest.mark.parametrize("family", CONFIGS)
def test_a_sequence_in_any_split_equals_the_stock_forward(family: str) -> None:
    model = create_model(family)
    stock = stock_copy(model)
    driver = Driver(create_runner(model))
    for splits in ([30], [1, 29], [17, 1, 5, 1, 6], [20, 10], [1] * 12):
        session = driver.open(sum(splits))
        for count in splits:
            driver.step(driver.rows(session, count))
    assert driver.worst_error(stock) < TOLERANCE


@pytest.mark.parametrize("family", CONFIGS)
def test_mixed_batches_with_trees_equal_the_stock_forward(family: str) -> None:
    model = create_model(family)
    stock = stock_copy(model)
    driver = Driver(create_runner(model), seed=1)
    prefilling, decoding, drafting, verifying = (driver.open(count) for count in (60, 12, 21, 33))
    driver.step(driver.rows(decoding), driver.rows(drafting), driver.rows(verifying, 25))
    for round_index in range(3):
        decoding.tokens += driver.random_tokens(1)
        driver.grow_tree(drafting, 4)
        verifying.tokens += driver.random_tokens(1 if round_index else 0)
        driver.grow_tree(verifying, 5)
        driver.step(driver.rows(prefilling, 19), driver.rows(decoding), driver.rows(drafting), driver.rows(verifying))
        driver.commit(verifying, verifying.nodes[-1])
        verifying.tokens.pop()
    driver.commit(drafting, drafting.nodes[3])
    driver.grow_tree(drafting, 6)
    driver.step(driver.rows(drafting), driver.rows(prefilling))
    assert driver.worst_error(stock) < TOLERANCE
