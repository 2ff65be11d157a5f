"""Bounds that a run must keep whatever explains its failures: no endless pause, and most requests answered."""

from __future__ import annotations

from typing import Any

import pytest
from chaos import MIN_ANSWERED, Report
from judge import MAX_PAUSE_S, Judge
from oracle import Sampling
from questions import Outcome, Question

from specpipe.errors import WorkerUnavailableError
from specpipe.types import Mode


class NoOracle:
    """For answers without a token."""

    def decode(self, token_ids: list[int]) -> str:
        assert not token_ids
        return ""


def failed_after(pause_s: float) -> Outcome:
    question = Question(prompt="x", sampling=Sampling(), max_tokens=24, mode=Mode.OFF)
    return Outcome(question=question, asked_s=5.0, over_s=5.0 + pause_s, error=WorkerUnavailableError("nobody"))


def test_a_pause_longer_than_any_client_has_patience_is_a_problem() -> None:
    oracle: Any = NoOracle()
    judge = Judge(oracle)
    assert judge.check([failed_after(MAX_PAUSE_S - 1)]) == []
    (problem,) = judge.check([failed_after(MAX_PAUSE_S + 1)])
    assert problem.startswith("a pause of 81 s: ")


@pytest.mark.parametrize("num_left", [0, 5])
def test_a_service_that_seldom_answers_is_a_problem_whatever_explains_it(num_left: int) -> None:
    report = Report(seed=1, outcomes=[failed_after(1.0) for _ in range(100 + num_left)])
    report.counts["left"] = num_left
    report.counts["answered"] = round(100 * MIN_ANSWERED)
    assert report.too_few() == []
    report.counts["answered"] -= 1
    assert report.too_few() == ["74 of 100 requests were answered"]
