"""A target worker of two ranks: the same answers, and a rank that dies or freezes costs an error, then all is well.

One service start; each fault leaves it whole again for the next.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from oracle import Oracle, Sampling
from running import RunningService, running_service
from tiny_models import TinyPair
from waiting import wait_until

from specpipe.answers import Chunk
from specpipe.client import Answer, GenerateClient, GenerateRequest
from specpipe.errors import WorkerUnavailableError
from specpipe.types import Mode

FAULT_LIMIT_S = 10.0
RESTART_TIMEOUT_S = 250.0  # a few seconds on a quiet machine
LONG = GenerateRequest(prompt="def", temperature=0, max_tokens=200, ignore_eos=True)
PROMPTS = ("def tokens(line):", "for index", "A fast draft", "中文")


@pytest.fixture(scope="module")
def ranked(tiny_pair: TinyPair, log_folder: Path) -> Iterator[RunningService]:
    flags = ("--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft), "--tensor-parallel-size", "2")
    with running_service(log_folder / "ranked.log", *flags) as running:
        yield running


@pytest.fixture
async def asking(ranked: RunningService) -> AsyncIterator[GenerateClient]:
    async with GenerateClient(ranked.address) as connected:
        yield connected


def rank_pid(service: RunningService) -> int:
    """Of the rank that runs now."""
    worker = psutil.Process(service.pid("target-worker"))
    return next(child.pid for child in worker.children() if "target-rank" in child.cmdline())


async def works_again(client: GenerateClient) -> None:
    request = GenerateRequest(prompt="x", temperature=0, max_tokens=4, ignore_eos=True)

    async def answers() -> bool:
        result = await asyncio.gather(client.answer(request, timeout_s=10), return_exceptions=True)
        return isinstance(result[0], Answer)

    await wait_until(answers, timeout_s=RESTART_TIMEOUT_S)


async def answer_with_fault(
    service: RunningService, client: GenerateClient, oracle: Oracle, number: signal.Signals
) -> None:
    """Signal the second rank while an answer is under way: rank 0's process ends in time.

    The answer goes on in the group that forms again, if that is soon enough; else it fails, and may be asked again.
    """
    worker, answer = service.pid("target-worker"), Answer()
    ended: asyncio.Task[None] | None = None
    try:
        async for event in client.generate(LONG, timeout_s=RESTART_TIMEOUT_S):
            answer.add(event)
            if isinstance(event, Chunk) and ended is None:
                os.kill(rank_pid(service), number)
                ended = asyncio.create_task(wait_until(lambda: has_ended(service, worker), timeout_s=FAULT_LIMIT_S))
    except WorkerUnavailableError:
        assert answer.finished is None
    oracle.check(oracle.encode("def"), answer.token_ids, Sampling())
    assert ended is not None
    await ended


def has_ended(service: RunningService, worker: int) -> bool:
    return not any(pid == worker for pid, _ in service.children())


async def test_ranks_are_listed_and_answers_are_the_same(
    ranked: RunningService, asking: GenerateClient, oracle: Oracle
) -> None:
    listed = [process for process in ranked.processes if process["role"] == "target-rank"]
    assert [(process["pid"], process["address"]) for process in listed] == [(rank_pid(ranked), None)]
    requests = [
        GenerateRequest(prompt=prompt, temperature=0, max_tokens=32, ignore_eos=True, mode=mode)
        for prompt, mode in zip(PROMPTS, (Mode.OFF, Mode.SYNC, Mode.PIPELINED, Mode.PIPELINED), strict=True)
    ]
    answers = await asyncio.gather(*(asking.answer(request) for request in requests))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        oracle.check(oracle.encode(prompt), answer.token_ids, Sampling())
        assert len(answer.token_ids) == 32


@pytest.mark.timeout(2 * RESTART_TIMEOUT_S + 60)
async def test_a_rank_killed_while_idle_ends_the_group_which_forms_again(
    ranked: RunningService, asking: GenerateClient
) -> None:
    worker, rank = ranked.pid("target-worker"), rank_pid(ranked)
    os.kill(rank, signal.SIGKILL)
    await wait_until(lambda: has_ended(ranked, worker), timeout_s=FAULT_LIMIT_S)
    await works_again(asking)


@pytest.mark.timeout(2 * RESTART_TIMEOUT_S + 60)
async def test_a_rank_frozen_in_a_step_ends_the_group_in_time(
    ranked: RunningService, asking: GenerateClient, oracle: Oracle
) -> None:
    frozen = rank_pid(ranked)
    await answer_with_fault(ranked, asking, oracle, signal.SIGSTOP)
    assert not psutil.pid_exists(frozen)
    await works_again(asking)


@pytest.mark.timeout(2 * RESTART_TIMEOUT_S + 60)
async def test_a_rank_killed_in_a_step_ends_the_group_in_time(
    ranked: RunningService, asking: GenerateClient, oracle: Oracle
) -> None:
    await answer_with_fault(ranked, asking, oracle, signal.SIGKILL)
    await works_again(asking)
