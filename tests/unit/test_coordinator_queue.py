"""Requests in the coordinator's queue while no target worker is ready, by a clock that the test sets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from coordinator_world import a_request
from waiting import wait_until

import coordinator.driver
from coordinator.answer_stream import AnswerStream
from coordinator.detokenizer import AnswerText, Detokenizer, SpacedDecoder
from coordinator.driver import Coordinator
from coordinator.settings import DriverSettings
from specpipe.config import CoordinatorConfig
from specpipe.errors import DeadlineExceededError, SpecpipeError, WorkerUnavailableError
from specpipe.worker_client import WorkerLink

MAX_WAIT_MS = 1000 * DriverSettings().max_target_wait_s


class Queue:
    """A coordinator that reaches no worker and runs one request at a time."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.now_ms = 0.0
        self._coordinator = coordinator

    def ask(self, request_id: str, **changes: Any) -> AnswerStream:
        request = a_request(request_id=request_id, received_ms=self.now_ms, **changes)
        return self._coordinator.submit(request, AnswerText(Detokenizer(str, SpacedDecoder()), ()))

    async def go_to(self, now_ms: float) -> None:
        """Returns when every request has been told of this time: one with a deadline then has ended of it."""
        probe = self.ask(f"deadline at {now_ms}", deadline_ms=now_ms)
        self.now_ms = now_ms
        await wait_until(lambda: probe.machine.phase.is_over)
        assert isinstance(await error_of(probe), DeadlineExceededError)
        await wait_until(lambda: probe not in self._coordinator._queue)


@asynccontextmanager
async def nobody(address: str, *_: object) -> AsyncIterator[WorkerLink]:
    raise WorkerUnavailableError(f"{address}: nothing listens there")
    yield


@pytest.fixture
async def queue(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Queue]:
    config = CoordinatorConfig(targets=("127.0.0.1:1",), max_sessions=1, max_queue=3000)
    made = Queue(Coordinator(config, settings=DriverSettings(tick_s=0.001), connect=nobody))
    monkeypatch.setattr(coordinator.driver, "_now_ms", lambda: made.now_ms)
    async with made._coordinator.running():
        await made.go_to(1.0)
        yield made


async def error_of(stream: AnswerStream) -> SpecpipeError:
    with pytest.raises(SpecpipeError) as caught:
        await anext(stream)
    stream.close()
    return caught.value


async def test_all_that_wait_end_when_no_target_has_been_ready_for_the_longest_wait(queue: Queue) -> None:
    """However many: that each makes room for the next is no reason to wait once more, or to run out of stack."""
    streams = [queue.ask(f"r{number}") for number in range(2000)]
    await queue.go_to(5000.0)
    late = queue.ask("late")
    await queue.go_to(MAX_WAIT_MS - 1)
    assert not any(stream.machine.phase.is_over for stream in streams)
    await queue.go_to(MAX_WAIT_MS + 2)
    assert all(stream.machine.phase.is_over for stream in streams)
    for stream in streams:
        error = await error_of(stream)
        assert isinstance(error, WorkerUnavailableError)
        assert str(error) == "no target worker took the request within 8.5 s: no target worker is ready"
    await queue.go_to(5000.0 + MAX_WAIT_MS - 1)
    assert not late.machine.phase.is_over, "it came later, and waits as long"
    await queue.go_to(5000.0 + MAX_WAIT_MS)
    assert isinstance(await error_of(late), WorkerUnavailableError)
