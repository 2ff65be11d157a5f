"""A draft worker that dies costs speed and nothing else; clients that leave, or run out of time, free both workers."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import grpc
import psutil
import pytest
from oracle import Oracle, Sampling
from running import RunningService
from waiting import wait_until

from specpipe.answers import Chunk
from specpipe.client import Answer, GenerateClient, GenerateRequest
from specpipe.errors import DeadlineExceededError
from specpipe.rpc.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from specpipe.types import Mode

RESTART_TIMEOUT_S = 150.0  # a few seconds on a quiet machine
LONG = GenerateRequest(prompt="def tokens(line):", temperature=0.7, seed=77, max_tokens=400, ignore_eos=True)


async def num_sessions(service: RunningService) -> int:
    """Sessions that both workers hold, by their own word."""
    async with grpc.aio.insecure_channel(service.address_of("target-worker")) as channel:
        target = await target_pb2_grpc.TargetServiceStub(channel).GetInfo(target_pb2.TargetServiceGetInfoRequest())
    async with grpc.aio.insecure_channel(service.address_of("draft-worker")) as channel:
        draft = await draft_pb2_grpc.DraftServiceStub(channel).GetInfo(draft_pb2.DraftServiceGetInfoRequest())
    return int(target.heartbeat.num_sessions + draft.heartbeat.num_sessions)


async def wait_for_no_sessions(service: RunningService, timeout_s: float) -> None:
    async def are_gone() -> bool:
        return await num_sessions(service) == 0

    await wait_until(are_gone, timeout_s=timeout_s)


async def test_an_answer_whose_draft_worker_is_killed_goes_on_and_is_the_same(
    service: RunningService, client: GenerateClient, oracle: Oracle
) -> None:
    answer = Answer()
    killed_pid = 0
    async for event in client.generate(LONG):
        answer.add(event)
        if isinstance(event, Chunk) and len(answer.token_ids) > 40 and not killed_pid:
            killed_pid = service.pid("draft-worker")
            os.kill(killed_pid, signal.SIGKILL)
    assert killed_pid
    assert len(answer.token_ids) == 400
    assert oracle.check(oracle.encode("def tokens(line):"), answer.token_ids, Sampling(temperature=0.7, seed=77)) == 0


async def test_a_draft_worker_that_returns_is_used_again(service: RunningService, client: GenerateClient) -> None:
    os.kill(service.pid("draft-worker"), signal.SIGKILL)
    request = GenerateRequest(prompt="for", temperature=0, max_tokens=24, ignore_eos=True, mode=Mode.SYNC)

    async def is_drafted() -> bool:
        answer = await client.answer(request)
        assert answer.finished is not None
        assert len(answer.token_ids) == 24
        return answer.finished.speculation.accepted_tokens > 0

    await wait_until(is_drafted, timeout_s=RESTART_TIMEOUT_S)


async def test_a_frozen_draft_worker_stops_no_answer(
    service: RunningService, client: GenerateClient, oracle: Oracle
) -> None:
    pid = service.pid("draft-worker")
    os.kill(pid, signal.SIGSTOP)
    try:
        request = GenerateRequest(
            prompt="for index", temperature=0, max_tokens=24, ignore_eos=True, mode=Mode.PIPELINED
        )
        answer = await client.answer(request, timeout_s=30)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert oracle.check(oracle.encode("for index"), answer.token_ids, Sampling()) == 0


async def test_leaving_a_stream_frees_both_workers(service: RunningService, client: GenerateClient) -> None:
    async for event in client.generate(LONG):
        if isinstance(event, Chunk):
            break
    await wait_for_no_sessions(service, 2)


async def test_cancelling_before_the_first_token_frees_both_workers(
    service: RunningService, client: GenerateClient
) -> None:
    for delay_s in (0.0, 0.001, 0.005, 0.02):
        tasks = [asyncio.create_task(client.answer(LONG)) for _ in range(12)]
        await asyncio.sleep(delay_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await wait_for_no_sessions(service, 2)
    assert len((await client.answer(GenerateRequest(prompt="x", max_tokens=4, ignore_eos=True))).token_ids) == 4


async def test_a_deadline_ends_the_answer_on_time_and_frees_both_workers(
    service: RunningService, client: GenerateClient
) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        await client.answer(LONG, timeout_s=0.15)
    assert time.monotonic() - started < 1.5
    await wait_for_no_sessions(service, 2)


async def test_a_running_coordinator_has_no_torch_loaded(service: RunningService, client: GenerateClient) -> None:
    await client.answer(GenerateRequest(prompt="x", max_tokens=2, ignore_eos=True))
    libraries = [m.path for m in psutil.Process(service.pid("coordinator")).memory_maps()]
    assert libraries
    assert not [path for path in libraries if "/torch/" in path]


async def test_a_target_worker_that_dies_fails_its_answers_and_is_started_again(
    service: RunningService, client: GenerateClient
) -> None:
    """Last of this file: every other test of the session can rely on the service being whole again after it."""
    pid = service.pid("target-worker")
    os.kill(pid, signal.SIGKILL)
    await wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    request = GenerateRequest(prompt="x", max_tokens=4, ignore_eos=True)

    async def is_back() -> bool:
        answers = await asyncio.gather(client.answer(request, timeout_s=5), return_exceptions=True)
        return isinstance(answers[0], Answer)

    await wait_until(is_back, timeout_s=RESTART_TIMEOUT_S)
