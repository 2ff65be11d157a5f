"""What the target believes a step costs."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest

from specpipe.engine.interface import StepBatch
from specpipe.step_costs import StepCosts, measure
from specpipe.testing import TableModel


def staircase(rows: int) -> float:
    return 10.0 if rows <= 16 else 12.0 if rows <= 32 else 12.0 * rows / 32


def learnt(*sizes: int, max_rows: int = 64) -> StepCosts:
    costs = StepCosts(max_rows)
    for rows in sizes:
        costs.observe(rows, 0, staircase(rows))
    return costs


def test_measured_buckets_are_returned_and_others_lie_between() -> None:
    costs = learnt(1, 16, 32, 64)
    assert costs.estimate(1) == pytest.approx(10.0, rel=0.1)
    assert costs.estimate(5) == pytest.approx(10.0, rel=0.1)
    assert 10.0 <= costs.estimate(24) <= 12.5
    assert costs.estimate(64) == pytest.approx(24.0, rel=0.2)


def test_rows_beyond_the_largest_measured_bucket_cost_in_proportion() -> None:
    costs = StepCosts(64)
    costs.observe(8, 0, 10.0)
    assert costs.estimate(64) == pytest.approx(80.0)
    assert costs.estimate(1) == pytest.approx(10.0)


def test_estimates_never_fall_as_rows_grow() -> None:
    costs = StepCosts(256)
    noise = random.Random(5)
    for _ in range(300):
        rows = noise.randint(1, 256)
        costs.observe(rows, noise.randint(1, 4000), staircase(rows) * noise.uniform(0.7, 2.0))
        values = [costs.estimate(n, 100) for n in range(1, 257)]
        assert values == sorted(values)


def test_an_outlier_changes_little() -> None:
    costs = learnt(*[1] * 9, *[16] * 9)
    costs.observe(1, 0, 500.0)
    assert costs.estimate(1) < 13.0


def test_a_slower_machine_moves_all_buckets_together() -> None:
    costs = learnt(*[1, 16, 32, 64] * 4)
    ratio = costs.estimate(64) / costs.estimate(1)
    for _ in range(60):
        costs.observe(1, 0, 30.0)
    assert costs.estimate(1) == pytest.approx(30.0, rel=0.15)
    assert costs.estimate(64) / costs.estimate(1) == pytest.approx(ratio, rel=0.3)


def test_the_price_of_attended_tokens_is_learnt() -> None:
    costs = StepCosts(64)
    for i in range(400):
        attended = (i * 37) % 2000
        costs.observe(4, attended, 10.0 + 0.01 * attended)
    assert costs.estimate(4, 2000) - costs.estimate(4, 0) == pytest.approx(20.0, rel=0.2)


def test_measuring_fills_every_bucket_that_the_model_allows() -> None:
    table = TableModel(num_slots=40)
    costs = StepCosts(64)
    ticks = iter(range(10_000))
    measure(table, costs, max_rows=64, max_s=1000.0, clock=lambda: float(next(ticks)))
    assert table.num_forwards == 2 * 9  # 1, 2, 4, 6, 8, 12, 16, 24, 32 rows: 64 do not fit into 39 slots
    assert costs.estimate(1) > 0


def test_measuring_stops_when_its_time_is_over() -> None:
    table = TableModel(num_slots=400)
    ticks = iter(range(10_000))
    measure(table, StepCosts(64), max_rows=64, max_s=5.0, clock=lambda: float(next(ticks)))
    assert table.num_forwards == 7 + 1  # up to 16 rows, whatever they cost, and one more


def test_a_slow_moment_while_measuring_is_forgotten() -> None:
    table, costs, now = TableModel(num_slots=400), StepCosts(64), [0.0]
    forward = table.forward

    def slow_at_first(batch: StepBatch) -> npt.NDArray[np.float32]:
        now[0] += 0.5 if table.num_forwards == 2 else 0.01
        return forward(batch)

    table.forward = slow_at_first  # type: ignore[method-assign]
    measure(table, costs, max_rows=64, max_s=3.0, clock=lambda: now[0])
    assert costs.estimate(8) < 15.0
