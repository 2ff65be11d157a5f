"""Workers that die, hang, return, do not fit or talk nonsense: speed may go, answers stay."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from coordinator_cluster import Cluster, Worker, cluster, draft_model, target_model
from waiting import wait_until

from coordinator.driver import DriverSettings
from coordinator.events import Kind
from specpipe.answers import Chunk
from specpipe.client import Answer, GenerateRequest
from specpipe.errors import ModelMismatchError, WorkerUnavailableError
from specpipe.types import Extension, Mode, Origin

DRAFT = Kind.DRAFT
LONG = {"max_tokens": 60, "ignore_eos": True, "seed": 3}


def ask(**options: Any) -> GenerateRequest:
    return GenerateRequest(prompt=(7, 8, 9), **{**LONG, **options})


async def plain(service: Cluster) -> list[int]:
    return (await service.client.answer(ask(mode=Mode.OFF), timeout_s=60)).token_ids


class Reading:
    """Reads an answer in the background."""

    def __init__(self, service: Cluster, request: GenerateRequest) -> None:
        self.answer = Answer()
        self.task = asyncio.ensure_future(self._read(service, request))

    async def _read(self, service: Cluster, request: GenerateRequest) -> Answer:
        async for event in service.client.generate(request, timeout_s=60):
            self.answer.add(event)
        return self.answer

    async def has(self, num_tokens: int) -> None:
        await wait_until(lambda: len(self.answer.token_ids) >= num_tokens or self.task.done())


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


async def test_a_target_worker_that_dies_hands_its_sessions_to_another() -> None:
    targets = [Worker("target", target_model()), Worker("target", target_model())]
    async with cluster(targets) as service:
        expected = await plain(service)
        readings = [Reading(service, ask(mode=Mode.PIPELINED)) for _ in range(4)]
        for reading in readings:
            await reading.has(15)
        assert all(target.num_sessions for target in targets), "load is shared"
        await targets[0].stop()
        for reading in readings:
            answer = await reading.task
            assert answer.token_ids == expected
            assert answer.finished is not None
        await targets[0].start()
        await wait_until(lambda: service.is_idle)


async def test_a_target_worker_that_returns_in_time_goes_on_where_it_was() -> None:
    async with cluster(settings=DriverSettings(tick_s=0.01)) as service:
        expected = await plain(service)
        reading = Reading(service, ask(mode=Mode.SYNC))
        await reading.has(15)
        await service.targets[0].stop()
        await wait_until(lambda: not service.app.server.is_serving)
        await service.targets[0].start()
        assert (await asyncio.wait_for(reading.task, 30)).token_ids == expected


async def test_a_target_worker_that_hangs_is_left() -> None:
    targets = [Worker("target", target_model()), Worker("target", target_model())]
    async with cluster(targets) as service:
        expected = await plain(service)
        readings = [Reading(service, ask(mode=Mode.OFF)) for _ in range(2)]
        for reading in readings:
            await reading.has(10)
        targets[0].freeze()
        for reading in readings:
            assert (await asyncio.wait_for(reading.task, 30)).token_ids == expected


async def test_without_any_target_requests_end_as_unavailable_in_time() -> None:
    async with cluster() as service:
        reading = Reading(service, ask(mode=Mode.OFF))
        await reading.has(5)
        service.targets[0].gate.clear()
        await service.targets[0].stop()
        with pytest.raises(WorkerUnavailableError, match="no target worker took the request"):
            await asyncio.wait_for(reading.task, 15)
        assert reading.answer.finished is None
        assert not service.app.server.is_serving
        with pytest.raises(WorkerUnavailableError):
            await asyncio.wait_for(service.client.answer(ask()), 15)
        await service.targets[0].start()
        await wait_until(lambda: service.app.server.is_serving, timeout_s=20)
        assert (await service.client.answer(ask(max_tokens=3), timeout_s=30)).token_ids


async def test_a_draft_worker_with_another_tokenizer_is_refused_at_start() -> None:
    wrong = Worker("draft", draft_model(tokenizer_fingerprint="other"))
    with pytest.raises(BaseExceptionGroup) as caught:
        async with cluster(drafts=[wrong]):
            pass
    assert caught.group_contains(ModelMismatchError, match="stand for other tokens")


async def test_a_draft_worker_with_another_tokenizer_that_comes_later_is_not_used() -> None:
    async with cluster() as service:
        await service.drafts[0].stop()
        service.drafts[0].model.info = replace(service.drafts[0].model.info, tokenizer_fingerprint="other")
        await service.drafts[0].start()
        answer = await service.client.answer(ask(mode=Mode.SYNC), timeout_s=60)
        assert answer.token_ids == await plain(service)
        assert not len(service.coordinator.pools[DRAFT])


async def test_target_workers_must_serve_one_model() -> None:
    targets = [Worker("target", target_model()), Worker("target", target_model(fingerprint="bf16"))]
    with pytest.raises(BaseExceptionGroup) as caught:
        async with cluster(targets):
            pass
    assert caught.group_contains(ModelMismatchError, match="another model or dtype")


async def test_a_tokenizer_that_is_not_the_targets_is_refused_at_start() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with cluster([Worker("target", target_model(tokenizer_fingerprint="x"))], []):
            pass
    assert caught.group_contains(ModelMismatchError, match="does not fit the target model")


async def test_before_a_target_is_there_requests_are_refused_at_once() -> None:
    async with cluster([], [], must_be_ready=False) as service:
        assert not service.app.server.is_serving
        with pytest.raises(WorkerUnavailableError, match="starting"):
            await service.client.answer(ask(), timeout_s=10)


async def test_a_worker_that_drains_gets_no_new_sessions_and_ends_its_own() -> None:
    targets = [Worker("target", target_model()), Worker("target", target_model())]
    async with cluster(targets) as service:
        expected = await plain(service)
        readings = [Reading(service, ask(mode=Mode.SYNC)) for _ in range(2)]
        for reading in readings:
            await reading.has(5)
        targets[0].service._is_draining = True
        more = [Reading(service, ask(mode=Mode.SYNC)) for _ in range(4)]
        for reading in [*readings, *more]:
            assert (await asyncio.wait_for(reading.task, 30)).token_ids == expected


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
