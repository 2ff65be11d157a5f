"""The test of the tests: p-values against printed tables of the chi-square distribution."""

from __future__ import annotations

import numpy as np
import pytest
from chi_square import p_value


@pytest.mark.parametrize(
    ("statistic", "degrees", "expected"),
    [(3.841459, 1, 0.05), (11.070498, 5, 0.05), (23.209251, 10, 0.01), (62.487, 30, 0.00046)],
)
def test_p_values_are_those_of_the_tables(statistic: float, degrees: int, expected: float) -> None:
    """Counts of equally likely outcomes, of which one is off by what makes up the statistic."""
    size = degrees + 1
    each = 1_000_000.0
    off = (statistic * each * degrees / size) ** 0.5
    counts = np.full(size, each - off / degrees)
    counts[0] = each + off
    assert p_value(counts, np.full(size, 1 / size)) == pytest.approx(expected, rel=0.01)


def test_what_is_as_expected_has_p_one_and_what_cannot_be_has_zero() -> None:
    assert p_value([100, 300], [0.25, 0.75]) == 1.0
    assert p_value([1, 100], [0.0, 1.0]) == 0.0
