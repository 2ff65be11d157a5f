"""Drafting that moves under the rejection rule: two draft workers whose models differ tell of the same nodes for a
while, and answers follow the target's distribution all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from chi_square import LEAST_P, Chain, follower_p_value, worst_p_value
from coordinated_workers import Service
from target_simulator import create_open
from test_rejection_schedulers import DrawWatch, watch  # noqa: F401 - a fixture

from coordinator.events import Cause, Kind
from coordinator.requests import Request
from specpipe.testing import TableModel
from specpipe.types import Mode, Origin, Rule, SamplingParams

PROMPT = (3, 7)
LENGTH = 6
NUM_ANSWERS = 240


def target() -> TableModel:
    return TableModel(16, num_slots=600, seed=5, spread=1.5, order=1)


def create_model(kind: Kind, number: int) -> TableModel:
    """Each draft worker guesses in its own way: half of the first one's guesses are random, all of the second one's."""
    if kind is Kind.TARGET:
        return target()
    return (
        TableModel(16, num_slots=600, seed=99, spread=1.5, order=1)
        if number % 2
        else TableModel.like(target(), 0.5, num_slots=600, seed=2)
    )


def answer(mode: Mode, seed: int) -> Service:
    """With drafting that moves once or twice, earlier or later."""
    opened = create_open(1, PROMPT, max_tokens=LENGTH, mode=mode, temperature=1.0, seed=seed)
    request = Request(
        request_id="r",
        model="m",
        prompt=PROMPT,
        sampling=opened.sampling,
        stops=opened.stops,
        speculation=replace(opened.speculation, rule=Rule.REJECTION),
        vocab_size=16,
    )
    service = Service(request, create_model)
    service.run({1 + seed % 3: Cause.LEAVES, 5: Cause.LEAVES if seed % 2 else Cause.SILENT})
    return service


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
def test_answers_whose_drafting_moves_follow_the_target(mode: Mode, watch: DrawWatch) -> None:  # noqa: F811
    answers = [answer(mode, seed) for seed in range(NUM_ANSWERS)]
    chain = Chain.of(target(), SamplingParams(temperature=1.0))
    texts = [service.tokens for service in answers]
    assert worst_p_value(texts, chain, PROMPT[-1]) > LEAST_P
    assert follower_p_value(texts, chain, PROMPT[-1]) > LEAST_P
    assert sum(service.origins.count(Origin.ACCEPTED) for service in answers) > 40
    assert len(watch.drawn) > NUM_ANSWERS
    assert abs(watch.draw_bias) < 4
    assert abs(watch.accept_bias) < 4
