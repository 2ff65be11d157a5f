"""Drafting that goes to another draft worker while answers stream: because one joins, drains, is silent or hangs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from coordinator_cluster import FAST, Cluster, Reading, Worker, ask, cluster, draft_model, plain
from waiting import wait_until

from coordinator.events import Kind
from coordinator.metrics import CoordinatorMetrics
from specpipe.telemetry.instruments import Instruments
from specpipe.types import Mode, Origin

PATIENT = replace(FAST, suspect_after_s=60.0, max_draft_silence_s=60.0, max_draft_step_s=60.0)  # nothing is lost
TIMEOUT_S = 60.0
LENGTH = 300


def two_drafts() -> list[Worker]:
    return [Worker("draft", draft_model()) for _ in range(2)]


def num_moves(instruments: Instruments) -> dict[str, int]:
    """By cause."""
    (moves,) = [one for one in instruments.observed if one.description.name == "specpipe.draft_moves"]
    return {cause: int(count) for (cause,), count in moves.read().items() if count}


async def halfway(service: Cluster, mode: Mode, number: int = 1) -> list[Reading]:
    """Answers that stream, held up at the target worker."""
    readings = [Reading(service, ask(mode=mode, max_tokens=LENGTH)) for _ in range(number)]
    gate, gated = service.targets[0].gate, service.targets[0].gated
    while not all(len(reading.answer.token_ids) >= 5 for reading in readings):
        gated.hold_at = gated.num_steps + 2
        gate.set()
        await wait_until(lambda: not gate.is_set(), timeout_s=TIMEOUT_S)
    assert all(len(reading.answer.token_ids) < LENGTH // 2 for reading in readings)
    return readings


async def the_rest(service: Cluster, readings: list[Reading]) -> None:
    """All answers are what the target alone says. Where it waits for drafts there are some in what was to come."""
    counts = [len(reading.answer.token_ids) for reading in readings]
    service.targets[0].gated.hold_at = float("inf")
    service.targets[0].gate.set()
    expected = await plain(service, max_tokens=LENGTH)
    for reading, count in zip(readings, counts, strict=True):
        answer = await asyncio.wait_for(reading.task, TIMEOUT_S)
        assert answer.token_ids == expected
        assert answer.finished is not None
        speculation = answer.finished.speculation
        if speculation.mode is Mode.SYNC:
            assert Origin.ACCEPTED in answer.origins[count + 10 :]
            assert speculation.wasted_draft_ms < speculation.draft_ms, "steps of either worker are told apart"


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
async def test_a_draft_worker_that_joins_takes_over_half_of_the_answers_that_stream(mode: Mode) -> None:
    drafts, instruments = two_drafts(), Instruments()
    async with cluster(drafts=drafts, metrics=CoordinatorMetrics(instruments), settings=PATIENT) as service:
        await drafts[1].stop()
        await wait_until(lambda: len(service.coordinator.pools[Kind.DRAFT]) == 1)
        readings = await halfway(service, mode, number=6)
        await wait_until(lambda: drafts[0].num_sessions == 6)
        await drafts[1].start()
        await wait_until(lambda: [draft.num_sessions for draft in drafts] == [3, 3], timeout_s=TIMEOUT_S)
        await the_rest(service, readings)
        assert num_moves(instruments) == {"load": 3}
        await wait_until(lambda: service.is_idle)


async def test_a_draft_worker_that_drains_hands_its_answers_over_and_may_end_at_once() -> None:
    drafts, instruments = two_drafts(), Instruments()
    async with cluster(drafts=drafts, metrics=CoordinatorMetrics(instruments), settings=PATIENT) as service:
        readings = await halfway(service, Mode.SYNC, number=4)
        await wait_until(lambda: [draft.num_sessions for draft in drafts] == [2, 2])
        await asyncio.wait_for(drafts[0].service.drain(drafts[0].server), TIMEOUT_S)
        assert [draft.num_sessions for draft in drafts] == [0, 4]
        await drafts[0].stop()
        await the_rest(service, readings)
        assert num_moves(instruments) == {"drains": 2}
        await drafts[0].start()


@pytest.mark.parametrize("fault", ["silent", "hangs"])
async def test_a_draft_worker_that_is_silent_or_hangs_is_left_before_it_is_taken_for_lost(fault: str) -> None:
    drafts, instruments = two_drafts(), Instruments()
    impatient = replace(PATIENT, suspect_after_s=1.0, suspect_draft_step_s=1.0)
    async with cluster(drafts=drafts, metrics=CoordinatorMetrics(instruments), settings=impatient) as service:
        (reading,) = await halfway(service, Mode.SYNC)
        stuck, other = drafts if drafts[0].num_sessions else drafts[::-1]
        if fault == "silent":
            stuck.freeze()
        else:
            stuck.gate.clear()
            service.targets[0].gated.hold_at += 2  # a commit gives it a step to hang in
            service.targets[0].gate.set()
        await wait_until(lambda: other.num_sessions == 1, timeout_s=TIMEOUT_S)
        assert num_moves(instruments).keys() == {"silent"}, "it was left, and not lost"
        await the_rest(service, [reading])


async def test_an_answer_begun_without_draft_workers_is_drafted_when_one_joins() -> None:
    draft = Worker("draft", draft_model())
    async with cluster(drafts=[draft]) as service:
        await draft.stop()
        await wait_until(lambda: not len(service.coordinator.pools[Kind.DRAFT]))
        readings = await halfway(service, Mode.SYNC)
        await draft.start()
        await wait_until(lambda: draft.num_sessions == 1, timeout_s=TIMEOUT_S)
        await the_rest(service, readings)
        await wait_until(lambda: service.is_idle)
