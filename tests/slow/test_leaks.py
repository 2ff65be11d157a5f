"""Request after request, nothing grows: memory, slots, sessions, tasks, threads, descriptors (case P2)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import findings
import grpc
import psutil
import pytest
from coordinator_cluster import Cluster, cluster
from real_prompts import PromptSet
from running import RunningService, running_service
from slow_scale import scaled
from tally import ask_all
from waiting import wait_until

from specpipe.client import GenerateRequest
from specpipe.rpc.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from specpipe.types import Mode

pytestmark = pytest.mark.slow

NUM_WARM = 100
NUM_REQUESTS = NUM_WARM + scaled(400, least=40)
MAX_TOKENS = 32
MAX_GROWTH_BYTES = 4 * 2**20
NUM_SLOTS = 2048  # few, so that caches are full before the first measurement
MAX_PROMPT_TOKENS = 200
PATIENCE_S = 120.0  # gRPC's pool takes another thread where one seems stuck, and lets it go after some idle time


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of one process."""

    anonymous_bytes: int
    num_threads: int
    num_descriptors: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        kilobytes = sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))
        process = psutil.Process(pid)
        return cls(
            anonymous_bytes=kilobytes * 1024, num_threads=process.num_threads(), num_descriptors=process.num_fds()
        )

    @property
    def counts(self) -> tuple[int, int]:
        return self.num_threads, self.num_descriptors


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """What the workers of a service say they hold: (sessions, free slots) of target and draft."""

    target: tuple[int, int]
    draft: tuple[int, int]

    @classmethod
    async def of(cls, service: RunningService) -> Books:
        async with grpc.aio.insecure_channel(service.address_of("target-worker")) as channel:
            target = await target_pb2_grpc.TargetServiceStub(channel).GetInfo(target_pb2.TargetServiceGetInfoRequest())
        async with grpc.aio.insecure_channel(service.address_of("draft-worker")) as channel:
            draft = await draft_pb2_grpc.DraftServiceStub(channel).GetInfo(draft_pb2.DraftServiceGetInfoRequest())
        held = [(info.heartbeat.num_sessions, info.heartbeat.num_free_slots) for info in (target, draft)]
        return cls(target=held[0], draft=held[1])


@pytest.fixture(scope="module")
def small_service(log_folder: Path) -> Iterator[RunningService]:
    with running_service(log_folder / "leaks.log", "--num-slots", str(NUM_SLOTS)) as running:
        yield running


def requests_of(prompts: PromptSet, first: int, count: int) -> list[GenerateRequest]:
    """Never the same request twice: prompts begin anywhere, seeds and modes change."""
    requests = []
    for number in range(first, first + count):
        prompt = prompts.all_ids[number % len(prompts.all_ids)]
        start = 7 * number % max(1, len(prompt) - MAX_PROMPT_TOKENS // 2)
        requests.append(
            GenerateRequest(
                prompt=prompt[start : start + MAX_PROMPT_TOKENS],
                temperature=(0.0, 0.8)[number % 2],
                seed=number,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                mode=(Mode.PIPELINED, Mode.PIPELINED, Mode.SYNC, Mode.OFF)[number % 4],
            )
        )
    return requests


def usages(service: RunningService) -> dict[str, Usage]:
    """By role and process id: the parent and all its descendants."""
    parent = psutil.Process(service.process.pid)
    found = [parent, *parent.children(recursive=True)]
    roles = ("coordinator", "draft-worker", "target-worker", "serve")
    return {
        f"{next((role for role in roles if role in process.cmdline()), 'other')} {process.pid}": Usage.of(process.pid)
        for process in found
    }


async def test_five_hundred_requests_leave_every_process_as_it_was(
    prompts: PromptSet, small_service: RunningService
) -> None:
    at_start = await Books.of(small_service)

    async def is_idle() -> bool:
        return await Books.of(small_service) == at_start

    async def ask(first: int, count: int) -> dict[str, Usage]:
        for answer in await ask_all(small_service.address, requests_of(prompts, first, count), in_flight=1):
            assert len(answer.token_ids) == MAX_TOKENS
        await wait_until(is_idle, timeout_s=30)
        return usages(small_service)

    before = await ask(0, NUM_WARM)
    after = await ask(NUM_WARM, NUM_REQUESTS - NUM_WARM)
    growth = {name: after[name].anonymous_bytes - before[name].anonymous_bytes for name in before}
    findings.record(f"{NUM_REQUESTS} requests, growth in KB: { {name: size // 1024 for name, size in growth.items()} }")
    assert after.keys() == before.keys()
    assert max(growth.values()) <= MAX_GROWTH_BYTES

    await settles(lambda: {name: usage.counts for name, usage in usages(small_service).items()}, before)


async def settles(count: Callable[[], dict[str, tuple[int, int]]], before: dict[str, Usage]) -> None:
    """Wait until no process has more threads or descriptors than before. Raises AssertionError if one keeps them."""

    def is_settled() -> bool:
        return all(ours <= before[name].counts[i] for name, now in count().items() for i, ours in enumerate(now))

    with contextlib.suppress(TimeoutError):
        await wait_until(is_settled, timeout_s=PATIENCE_S)
    assert is_settled(), f"(threads, descriptors) {count()}, before {before}"


async def test_requests_leave_no_task_behind() -> None:
    """The whole service in this process, so that tasks can be counted."""
    async with cluster() as running:
        await ask_and_cancel(running, 10)
        num_tasks, before = len(asyncio.all_tasks()), {"this": Usage.of(os.getpid())}
        await ask_and_cancel(running, scaled(200, least=50))
        findings.record(f"{num_tasks} tasks, then {len(asyncio.all_tasks())}")
        assert len(asyncio.all_tasks()) == num_tasks
        await settles(lambda: {"this": Usage.of(os.getpid()).counts}, before)


async def ask_and_cancel(running: Cluster, num_requests: int) -> None:
    """Every fifth request is cancelled at once. Returns when nothing of any is left."""
    for seed in range(num_requests):
        request = GenerateRequest(prompt="def f(", seed=seed, max_tokens=12, ignore_eos=True)
        task = asyncio.create_task(running.client.answer(request, timeout_s=60))
        if seed % 5 == 4:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await wait_until(lambda: running.is_idle, timeout_s=30)
