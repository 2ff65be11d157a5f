"""The calibrator learns the rate at which drafted nodes come true."""

from __future__ import annotations

import random

import pytest

from specpipe.calibration import Calibrator


def teach(calibrator: Calibrator, rate: float, number: int = 3000, *, rank: int = 0, confidence: float = 0.6) -> None:
    rng = random.Random(1)
    for _ in range(number):
        calibrator.observe(rank, 1 + rng.randrange(8), confidence, "model", rng.random() < rate)


@pytest.mark.parametrize("confidence", [0.0, 1e-7, 0.3, 0.999, 1.0])
def test_starts_as_identity(confidence: float) -> None:
    assert Calibrator().estimate(0, 1, confidence, "model") == confidence


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.6, 0.9])
def test_learns_the_rate(rate: float) -> None:
    calibrator = Calibrator()
    teach(calibrator, rate)
    assert calibrator.estimate(0, 4, 0.6, "model") == pytest.approx(rate, abs=0.06)


def test_learns_that_the_hopeless_sometimes_comes_true() -> None:
    calibrator = Calibrator()
    teach(calibrator, 0.05, rank=3, confidence=1e-6)
    assert calibrator.estimate(3, 2, 1e-6, "model") == pytest.approx(0.05, abs=0.02)


def test_ranks_drafters_and_degrees_of_sureness_are_learned_apart() -> None:
    calibrator = Calibrator()
    teach(calibrator, 0.1)
    assert calibrator.estimate(0, 1, 0.6, "ngram") == 0.6
    assert calibrator.estimate(1, 1, 0.6, "model") > 0.3
    assert calibrator.estimate(0, 1, 0.99, "model") > 0.5


def test_depth_is_learned() -> None:
    calibrator = Calibrator()
    rng = random.Random(2)
    for _ in range(6000):
        depth = rng.choice([1, 12])
        calibrator.observe(0, depth, 0.7, "model", rng.random() < (0.8 if depth == 1 else 0.4))
    assert calibrator.estimate(0, 1, 0.7, "model") == pytest.approx(0.8, abs=0.07)
    assert calibrator.estimate(0, 12, 0.7, "model") == pytest.approx(0.4, abs=0.07)


def test_few_observations_move_it_little_and_old_ones_are_forgotten() -> None:
    calibrator = Calibrator()
    calibrator.observe(0, 1, 0.6, "model", False)
    assert calibrator.estimate(0, 1, 0.6, "model") == pytest.approx(0.6, abs=0.05)
    teach(calibrator, 0.9, 20_000)
    teach(calibrator, 0.2, 20_000)
    assert calibrator.estimate(0, 4, 0.6, "model") == pytest.approx(0.2, abs=0.06)


def test_estimates_stay_probabilities() -> None:
    calibrator = Calibrator()
    for confidence in (0.0, 1e-9, 0.5, 1.0):
        for _ in range(500):
            calibrator.observe(0, 1, confidence, "model", True)
            calibrator.observe(1, 1, confidence, "model", False)
        for rank in (0, 1, 30):
            assert 0.0 <= calibrator.estimate(rank, 1, confidence, "model") <= 1.0


def test_drafters_without_number_cost_no_memory_and_those_known_are_told_apart() -> None:
    """A drafter's name comes over the wire."""
    calibrator = Calibrator()
    teach(calibrator, 0.9, 2000)
    for number in range(1000):
        calibrator.observe(0, 1, 0.6, f"drafter {number}", False)
    assert len(calibrator._kinds) < 100
    assert len(calibrator._depths) < 100
    assert calibrator.estimate(0, 4, 0.6, "model") == pytest.approx(0.9, abs=0.06)
    assert calibrator.estimate(0, 1, 0.6, "drafter 999") < 0.2, "those beyond the number share what is learned"
