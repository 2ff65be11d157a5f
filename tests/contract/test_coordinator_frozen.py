"""The coordinator as a process: in the middle of an answer a worker of it freezes, or it is frozen itself."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator

import pytest
from coordinator_process import running_coordinator, workers
from waiting import wait_until

from specpipe.answers import AnswerEvent
from specpipe.client import Answer, GenerateClient, GenerateRequest
from specpipe.errors import WorkerUnavailableError


async def read_all(events: AsyncIterator[AnswerEvent], answer: Answer) -> None:
    async for event in events:
        answer.add(event)


async def test_a_client_hears_of_a_frozen_target_worker_within_ten_seconds() -> None:
    """As patient as it is in use: the worker's kernel goes on, and nobody else can take the answer over."""
    target, draft = workers()
    async with running_coordinator(target, draft) as running:
        await wait_until(lambda: running.is_ready, timeout_s=60)
        async with GenerateClient(running.address) as client:
            answer = Answer()
            events = client.generate(GenerateRequest(prompt=(5, 6), max_tokens=400, ignore_eos=True))
            while not answer.token_ids:
                answer.add(await anext(events))
            target.freeze()
            frozen_at = time.monotonic()
            with pytest.raises(WorkerUnavailableError, match="no target worker took the request"):
                await read_all(events, answer)
            assert time.monotonic() - frozen_at < 10
            assert answer.finished is None
            await wait_until(lambda: "not serving" in running.log)


async def test_a_coordinator_that_was_stopped_goes_on_with_its_answers_and_blames_nobody() -> None:
    """Its workers end its sessions by their own patience; it opens them again from the tokens it holds."""
    target, draft = workers()
    async with running_coordinator(target, draft) as running:
        await wait_until(lambda: running.is_ready, timeout_s=60)
        async with GenerateClient(running.address) as client:
            request = GenerateRequest(prompt=(5, 6), max_tokens=300, ignore_eos=True, seed=9)
            expected = await client.answer(request, timeout_s=60)
            answer = Answer()
            events = client.generate(request, timeout_s=60)
            while not answer.token_ids:
                answer.add(await anext(events))
            running.process.send_signal(signal.SIGSTOP)
            try:
                await wait_until(lambda: target.num_sessions == draft.num_sessions == 0, timeout_s=20)
            finally:
                running.process.send_signal(signal.SIGCONT)
            await read_all(events, answer)
            assert answer.token_ids == expected.token_ids
            assert "has said nothing" not in running.log
