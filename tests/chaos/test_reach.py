"""Failures that faults explain, and those that nothing explains, so that a service without fail-over is found out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from members import Member
from oracle import Sampling
from questions import Outcome, Question
from reach import GRACE_S, UNSERVED_S, Reach, Span, unexplained

from specpipe.errors import WorkerUnavailableError
from specpipe.types import Mode

WELL = Reach(own=(), targets=((), ()))
ENDLESS: Span = (0.0, math.inf)


def failure(*, asked_s: float, over_s: float, asks_elsewhere: bool = False, first_place: int = 0) -> Outcome:
    question = Question(
        prompt="x",
        sampling=Sampling(),
        max_tokens=24,
        mode=Mode.OFF,
        first_place=first_place,
        asks_elsewhere=asks_elsewhere,
    )
    return Outcome(question=question, asked_s=asked_s, over_s=over_s, error=WorkerUnavailableError("nobody is there"))


@pytest.mark.parametrize("over_s", [1.0, 100.0])
def test_nothing_explains_a_failure_where_all_was_well(over_s: float) -> None:
    assert len(unexplained([failure(asked_s=0.0, over_s=over_s)], [WELL, WELL])) == 1


def test_a_coordinator_out_of_reach_explains_failures_there_until_it_is_found_again() -> None:
    gone = Reach(own=((10.0, 12.0),), targets=((), ()))
    assert not gone.explains(2.0, 9.9)
    assert gone.explains(2.0, 10.0)
    assert gone.explains(12.0 + GRACE_S, 30.0)
    assert not gone.explains(12.1 + GRACE_S, 30.0)


def test_what_a_client_can_ask_elsewhere_fails_only_where_both_coordinators_explain_it() -> None:
    gone = Reach(own=(ENDLESS,), targets=((), ()))
    one, both = failure(asked_s=5.0, over_s=9.0), failure(asked_s=5.0, over_s=9.0, asks_elsewhere=True)
    assert unexplained([one, both], [gone, gone]) == []
    assert unexplained([one, both], [gone, WELL]) == [f"no fault explains this error: {both}"]
    assert len(unexplained([one, both], [WELL, gone])) == 2


@pytest.mark.parametrize(
    ("targets", "is_explained"),
    [
        ([[ENDLESS], []], False),  # the other one is there: answers go on with it
        ([[ENDLESS], [ENDLESS]], True),
        ([[(0.0, 3.0)], [(3.0 + GRACE_S, 40.0)]], False),  # one after the other, and always one there
        ([[(0.0, 3.0)], [(2.9 + GRACE_S - UNSERVED_S, 40.0)]], True),
        ([[(0.0, 3.0)], [(3.1 + GRACE_S - UNSERVED_S, 40.0)]], False),  # together, but not for long
        ([[(0.0, 1.0), (9.0, 10.0)], [(0.0, 30.0)]], True),  # lost again before it was found
    ],
)
def test_target_workers_explain_a_failure_where_all_were_gone_at_once_for_long(
    targets: Sequence[Sequence[Span]], is_explained: bool
) -> None:
    reach = Reach(own=(), targets=tuple(map(tuple, targets)))
    assert reach.explains(1.0, 35.0) is is_explained


def test_a_failure_sooner_than_a_request_waits_is_not_for_want_of_target_workers() -> None:
    unserved = Reach(own=(), targets=((ENDLESS,), (ENDLESS,)))
    assert not unserved.explains(1.0, 0.9 + UNSERVED_S)
    assert unserved.explains(1.0, 1.1 + UNSERVED_S)


def test_the_pause_before_the_end_counts_among_the_pauses_of_an_answer() -> None:
    outcome = failure(asked_s=1.0, over_s=19.0)
    outcome.arrivals_s += [3.0, 4.0]
    assert outcome.longest_pause_s == 15.0


def test_a_member_tells_when_it_was_not_usable(tmp_path_factory: pytest.TempPathFactory) -> None:
    member = Member("target-1", "target-worker", (), folder=tmp_path_factory.mktemp("logs"))
    ((_, end_s),) = member.outages
    assert end_s == math.inf, "it was never ready"
    member.note(is_ready=True)
    ((_, end_s),) = member.outages
    assert end_s == member.changed_s
    member.note(is_frozen=True)
    frozen_s = member.changed_s
    member.note(is_ready=False)
    assert member.outages[1:] == [(frozen_s, math.inf)]
    member.note(is_ready=True, is_frozen=False)
    assert member.outages[1:] == [(frozen_s, member.changed_s)]
