"""The real request machine between real loops of both workers, in virtual time, while workers die and others take over.

Whatever dies, the tokens are what the target alone would say, and the statistics say truly what drafts were good for.
"""

from __future__ import annotations

import functools

import pytest
from coordinated_workers import COST_S, Service
from draft_harness import continuation, open_message

from coordinator.events import Cause, Kind
from coordinator.requests import Request
from specpipe.answers import Finished, SpeculationStats
from specpipe.config import DEFAULT_SYNC_K
from specpipe.types import Mode, Origin

PROMPT = (1, 2, 3, 4)
LENGTH = 60


def a_request(mode: Mode, temperature: float) -> Request:
    opened = open_message(1, PROMPT, mode=mode, temperature=temperature, max_length=len(PROMPT) + LENGTH)
    return Request(
        request_id="r",
        model="m",
        prompt=PROMPT,
        sampling=opened.sampling,
        stops=opened.stops,
        speculation=opened.speculation,
        vocab_size=32,
    )


KILLS: list[dict[int, Kind]] = [
    {},
    {20: Kind.DRAFT},
    {20: Kind.TARGET},
    {10: Kind.DRAFT, 20: Kind.TARGET, 30: Kind.DRAFT},
]


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_workers_that_die_change_no_token_and_what_they_drafted_still_counts(
    mode: Mode, temperature: float, kills: dict[int, Kind]
) -> None:
    service = Service(a_request(mode, temperature))
    report = service.run(kills).speculation
    opened = open_message(1, PROMPT, mode=mode, temperature=temperature, max_length=len(PROMPT) + LENGTH)
    assert service.tokens == continuation(service.target_model, opened, PROMPT, LENGTH)
    assert report.accepted_tokens == service.origins.count(Origin.ACCEPTED) > 10
    assert report.hidden_draft_ms + report.exposed_draft_ms == pytest.approx(
        max(report.draft_ms, report.exposed_draft_ms)
    )
    assert report.wasted_draft_ms < report.draft_ms, "some drafts were accepted"
    if mode is Mode.SYNC:  # each chain is verified but one that is under way when a worker dies
        assert report.wasted_draft_ms <= len(kills) * DEFAULT_SYNC_K * 1000 * COST_S[Kind.DRAFT] + 1e-6


def num_misses(report: SpeculationStats) -> int:
    return 0 if report.hit_rate is None else round((1 - report.hit_rate) * (report.rounds - 1))


@functools.cache
def undisturbed(mode: Mode) -> Service:
    service = Service(a_request(mode, 1.0))
    service.run({})
    return service


MOVES: list[tuple[dict[int, Kind | Cause], int]] = [  # and how many rounds they cost in sync mode
    ({20: Cause.DRAINS}, 0),
    ({20: Cause.LOAD}, 0),
    ({10: Cause.LEAVES, 20: Cause.LEAVES, 30: Cause.LEAVES, 40: Cause.LEAVES}, 0),
    ({20: Cause.SILENT}, 1),
    ({15: Cause.DRAINS, 35: Cause.SILENT}, 1),
    ({10: Cause.DRAINS, 11: Kind.DRAFT, 30: Kind.TARGET}, 1),
]


@pytest.mark.parametrize(("moves", "num_rounds"), MOVES)
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
def test_drafting_that_moves_changes_no_token_and_costs_a_round_at_most_each_time(
    mode: Mode, moves: dict[int, Kind | Cause], num_rounds: int
) -> None:
    still, moved = undisturbed(mode), Service(a_request(mode, 1.0))
    finished = still.events[-1]
    assert isinstance(finished, Finished)
    report = moved.run(moves).speculation
    opened = open_message(1, PROMPT, temperature=1.0, max_length=len(PROMPT) + LENGTH)
    assert moved.tokens == still.tokens == continuation(still.target_model, opened, PROMPT, LENGTH)
    max_rounds = num_rounds if mode is Mode.SYNC else len(moves)
    assert num_misses(report) <= num_misses(finished.speculation) + max_rounds
    assert report.wasted_draft_ms < report.draft_ms
    assert report.accepted_tokens == moved.origins.count(Origin.ACCEPTED) <= report.verified_tokens
    if Kind.DRAFT not in moves.values():
        assert not any(worker.loop.heartbeat().num_sessions for worker in moved.left), "whom it left holds nothing"
