"""Draft workers that die, hang, return or talk nonsense: speed may go, answers stay. Nothing is left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from collected import nothing_is_collected, num_calls
from coordinator_cluster import FAST, Reading, Worker, ask, cluster, draft_model, plain, target_model
from waiting import wait_until

from coordinator.events import Kind
from specpipe.answers import Chunk
from specpipe.types import Extension, FinishReason, Mode, Origin

DRAFT = Kind.DRAFT


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
async def test_a_draft_worker_that_dies_costs_speed_only_and_is_used_again_when_it_returns(mode: Mode) -> None:
    async with cluster() as service:
        expected = await plain(service)
        reading = Reading(service, ask(mode=mode))
        await reading.has(20)
        await service.drafts[0].stop()
        assert (await reading.task).token_ids == expected
        assert service.app.is_ready, "a service without drafts still answers"
        await service.drafts[0].start()
        await wait_until(lambda: service.coordinator.pools[DRAFT].is_ready)
        again = await service.client.answer(ask(mode=Mode.SYNC), timeout_s=60)
        assert again.token_ids == expected
        assert again.finished is not None
        assert again.finished.speculation.accepted_tokens > 0
        assert again.finished.speculation.wasted_draft_ms < 0.5 * again.finished.speculation.draft_ms
        await wait_until(lambda: service.is_idle)


async def test_a_draft_worker_that_returns_joins_a_running_answer() -> None:
    async with cluster() as service:
        expected = await plain(service)
        gate = service.targets[0].gate
        reading = Reading(service, ask(mode=Mode.SYNC))
        await reading.has(10)
        gate.clear()
        await service.drafts[0].stop()
        await wait_until(lambda: not len(service.coordinator.pools[DRAFT]))
        before = len(reading.answer.token_ids)
        await service.drafts[0].start()
        await wait_until(lambda: service.drafts[0].num_sessions == 1)
        gate.set()
        answer = await reading.task
        assert answer.token_ids == expected
        assert Origin.ACCEPTED in answer.origins[before + 10 :]
        assert answer.finished is not None
        speculation = answer.finished.speculation
        assert speculation.wasted_draft_ms < speculation.draft_ms, "steps of neither worker are taken for the other's"


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
async def test_a_draft_worker_that_hangs_costs_bounded_time(mode: Mode) -> None:
    async with cluster() as service:
        expected = await plain(service)
        reading = Reading(service, ask(mode=mode))
        await reading.has(20)
        service.drafts[0].freeze()
        assert (await asyncio.wait_for(reading.task, 30)).token_ids == expected
        answer = await service.client.answer(ask(mode=mode), timeout_s=30)
        assert answer.token_ids == expected


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
async def test_a_draft_worker_that_hangs_in_a_step_and_still_speaks_is_left(mode: Mode) -> None:
    """In sync mode the target waits up to a second for each chain, so this must not go on for long."""
    async with cluster(settings=replace(FAST, max_draft_step_s=1.0)) as service:
        expected = await plain(service)
        reading = Reading(service, ask(mode=mode))
        await reading.has(20)
        service.drafts[0].gate.clear()
        assert (await asyncio.wait_for(reading.task, 30)).token_ids == expected
        await wait_until(lambda: not len(service.coordinator.pools[DRAFT]))
        service.drafts[0].gate.set()
        await wait_until(lambda: service.coordinator.pools[DRAFT].is_ready)
        assert (await service.client.answer(ask(mode=mode), timeout_s=30)).token_ids == expected


async def test_a_draft_worker_much_slower_than_the_target_changes_no_answer() -> None:
    async with cluster() as service:
        expected = await plain(service)
        service.drafts[0].gated.delay_s = 0.05
        for mode in (Mode.PIPELINED, Mode.SYNC):
            answer = await service.client.answer(ask(mode=mode, max_tokens=20), timeout_s=60)
            assert answer.token_ids == expected[:20]
        await wait_until(lambda: service.is_idle)


@pytest.mark.parametrize("num_prompt", [30, 47, 48, 49, 90])
async def test_a_draft_with_a_shorter_context_stops_drafting_and_the_answer_goes_on(num_prompt: int) -> None:
    draft = Worker("draft", draft_model(max_context=48))
    async with cluster(drafts=[draft]) as service:
        prompt = tuple(range(100, 100 + num_prompt))
        expected = await plain(service, prompt=prompt)
        neighbours = [Reading(service, ask(mode=Mode.SYNC)) for _ in range(3)]
        for mode in (Mode.SYNC, Mode.PIPELINED):
            answer = await service.client.answer(ask(prompt=prompt, mode=mode), timeout_s=60)
            assert answer.token_ids == expected
        assert len({tuple((await neighbour.task).token_ids) for neighbour in neighbours}) == 1
        await wait_until(lambda: service.is_idle)


@pytest.mark.parametrize("num_prompt", [60, 61, 62, 63])
async def test_every_position_of_a_short_context_is_used(num_prompt: int) -> None:
    async with cluster([Worker("target", target_model(max_context=64))], [Worker("draft", draft_model())]) as service:
        prompt = tuple(range(100, 100 + num_prompt))
        expected = await plain(service, prompt=prompt, max_tokens=None)
        assert len(expected) == 64 - num_prompt
        for mode in (Mode.SYNC, Mode.PIPELINED):
            request = ask(prompt=prompt, mode=mode, max_tokens=None, num_speculative_tokens=8)
            answer = await service.client.answer(request, timeout_s=60)
            assert answer.token_ids == expected
            assert answer.finished is not None
            assert answer.finished.finish_reason is FinishReason.LENGTH
        await wait_until(lambda: service.is_idle)


async def test_a_draft_worker_that_was_never_there_is_no_obstacle() -> None:
    draft = Worker("draft", draft_model())
    async with cluster(drafts=[draft]) as service:
        await draft.stop()
        answer = await service.client.answer(ask(mode=Mode.SYNC), timeout_s=60)
        assert answer.token_ids == await plain(service)
        assert answer.finished is not None
        assert answer.finished.speculation.acceptance_rate is None
        await draft.start()


@pytest.mark.parametrize("nonsense", ["token", "parent", "base", "nan", "huge"])
async def test_a_draft_worker_that_talks_nonsense_changes_no_answer(nonsense: str) -> None:
    changes: dict[str, dict[str, Any]] = {
        "token": {"tokens": (4096,)},
        "parent": {"parents": (5,)},
        "base": {"base": 100_000},
        "nan": {"confidences": (float("nan"),)},
        "huge": {"parents": tuple(range(5000)), "tokens": (1,) * 5000, "confidences": (0.5,) * 5000},
    }
    async with cluster() as service:
        expected = await plain(service)
        bystander = Reading(service, ask(mode=Mode.PIPELINED))
        loop = service.drafts[0].thread._step_loop
        assert loop is not None
        send = loop._send  # type: ignore[attr-defined]

        def lie(link: int, message: Any) -> None:
            if isinstance(message, Extension):
                first = replace(message, parents=(0,), tokens=(1,), confidences=(0.5,))
                message = replace(first, **changes[nonsense])
            send(link, message)

        loop._send = lie  # type: ignore[attr-defined]
        answers = await asyncio.gather(
            *(service.client.answer(ask(mode=mode), timeout_s=60) for mode in (Mode.SYNC, Mode.PIPELINED)),
            bystander.task,
        )
        assert [answer.token_ids for answer in answers] == [expected] * 3
        await wait_until(lambda: not any(worker.num_sessions for worker in service.targets))


async def test_workers_that_are_lost_leave_no_call_behind() -> None:
    """Neither the link that was lost nor the dials that fail."""
    async with cluster() as service:
        with nothing_is_collected():
            await wait_until(lambda: num_calls() == 2)
            reading = Reading(service, ask(mode=Mode.PIPELINED))
            await reading.has(5)
            service.drafts[0].freeze()
            await wait_until(lambda: not len(service.coordinator.pools[DRAFT]))
            await wait_until(lambda: num_calls() == 1)
            await service.drafts[0].stop()
            await reading.task
            await service.drafts[0].start()
            await wait_until(lambda: service.coordinator.pools[DRAFT].is_ready)
            assert num_calls() == 2


async def test_two_hundred_cancels_at_every_stage_leave_nothing() -> None:
    async with cluster() as service:
        free = [worker.num_free_slots for worker in service.workers]
        for number in range(200):
            events = service.client.generate(ask(mode=list(Mode)[number % 3], max_tokens=400), timeout_s=30)
            for _ in range(number % 5):
                if isinstance(await anext(events), Chunk):
                    break
            await events.aclose()
        await wait_until(lambda: service.is_idle)
        await wait_until(lambda: [worker.num_free_slots for worker in service.workers] == free)
