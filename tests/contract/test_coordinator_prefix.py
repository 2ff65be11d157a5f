"""A prompt that was answered before is not computed again, by neither worker, and the usage says so."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from coordinator_cluster import Reading, Worker, ask, cluster, draft_model, target_model
from waiting import wait_until

from specpipe.client import Answer, GenerateRequest
from specpipe.engine.interface import StepBatch
from specpipe.testing import TableModel
from specpipe.types import Mode

PROMPT = tuple(i * i % 4000 + 2 for i in range(200))


class Counter:
    """Counts the committed rows that a model computes."""

    def __init__(self, model: TableModel) -> None:
        self.num_rows = 0
        self._forward = model.forward
        model.forward = self.forward  # type: ignore[method-assign]

    def forward(self, batch: StepBatch) -> npt.NDArray[np.float32]:
        self.num_rows += sum(rows.num_committed_rows for rows in batch.sessions)
        return self._forward(batch)

    def take(self) -> int:
        taken, self.num_rows = self.num_rows, 0
        return taken


def cached(answer: Answer) -> int | None:
    assert answer.finished is not None
    return answer.finished.cached_prompt_tokens


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.SYNC, Mode.PIPELINED])
async def test_the_second_time_only_the_last_token_of_a_prompt_is_computed(mode: Mode) -> None:
    target, draft = target_model(), draft_model()
    at_target, at_draft = Counter(target), Counter(draft)
    async with cluster([Worker("target", target)], [Worker("draft", draft)]) as service:
        request = GenerateRequest(prompt=PROMPT, temperature=0, seed=1, max_tokens=12, mode=mode)
        answers, rows = [], []
        for _ in range(3):
            answers.append(await service.client.answer(request, timeout_s=30))
            await wait_until(lambda: service.is_idle)
            rows.append((at_target.take(), at_draft.take()))
        assert [cached(answer) for answer in answers] == [0, 199, 199]
        assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
        assert 200 <= rows[0][0] <= 212
        assert all(target_rows <= 12 for target_rows, _ in rows[1:])
        if mode is Mode.SYNC:  # the target waits for its drafts, so the first answer's prompt was computed to its end
            assert 200 <= rows[0][1] <= 212
            assert all(draft_rows <= 12 for _, draft_rows in rows[1:])
        assert [worker.num_free_slots for worker in service.workers] == [19_999, 19_999]


async def test_choices_of_one_prompt_share_it_and_differ() -> None:
    target = target_model()
    at_target = Counter(target)
    async with cluster([Worker("target", target)], []) as service:
        answers = [
            await service.client.answer(
                GenerateRequest(prompt=PROMPT, temperature=1, seed=seed, max_tokens=20, mode=Mode.OFF), timeout_s=30
            )
            for seed in range(5)
        ]
    assert len({tuple(answer.token_ids) for answer in answers}) == 5
    assert at_target.num_rows <= 200 + 5 * 20
    assert [cached(answer) for answer in answers] == [0] + [199] * 4


async def test_a_prompt_goes_to_the_target_that_has_computed_it_before() -> None:
    """Not to the one that has been connected longest, which is as idle by then."""
    targets = [Worker("target", target_model()) for _ in range(2)]
    async with cluster(targets, []) as service:
        request = GenerateRequest(prompt=PROMPT, temperature=0, seed=1, max_tokens=12, mode=Mode.OFF)
        for worker in targets:
            worker.gate.clear()
        occupying = Reading(service, ask(mode=Mode.OFF))
        await wait_until(lambda: sum(worker.num_sessions for worker in targets) == 1)
        (free,) = [worker for worker in targets if not worker.num_sessions]
        free.gate.set()
        first = await service.client.answer(request, timeout_s=30)
        for worker in targets:
            worker.gate.set()
        await occupying.task
        await wait_until(lambda: service.is_idle)
        second = await service.client.answer(request, timeout_s=30)
        assert [cached(first), cached(second)] == [0, 199]
        assert first.token_ids == second.token_ids
