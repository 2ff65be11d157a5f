"""Two draft workers, two target workers, two coordinators: any session may be on any pair, and any worker may die.

The draft has more tokens than the target (special tokens were added to it), so that its vocabulary and its output are
larger. One service start, and one coordinator beside it.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import grpc
import pytest
import torch
from oracle import Oracle, Sampling
from running import RunningService, running_part, running_service
from tcp_relay import TcpRelay
from tiny_models import VOCAB_SIZE, TinyPair, make_llama, make_tokenizer
from transformers import AutoModelForCausalLM
from waiting import wait_until

from specpipe.client import Answer, GenerateClient, GenerateRequest
from specpipe.rpc.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from specpipe.types import Mode

RESTART_TIMEOUT_S = 150.0  # a few seconds on a quiet machine
NUM_EXTRA_TOKENS = 32
NUM_TOKENS = 400
PROMPTS = ("def tokens(line):", "A fast draft", "for index", "x")
SAMPLING = (Sampling(), Sampling(temperature=0.8, seed=31))

STUBS = {
    "draft-worker": (draft_pb2_grpc.DraftServiceStub, draft_pb2.DraftServiceGetInfoRequest),
    "target-worker": (target_pb2_grpc.TargetServiceStub, target_pb2.TargetServiceGetInfoRequest),
}


def make_larger_draft(folder: Path, pair: TinyPair) -> Path:
    """The pair's draft with tokens added at the end, whose logits are as large as any."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{i}|>" for i in range(NUM_EXTRA_TOKENS)]})
    small = AutoModelForCausalLM.from_pretrained(pair.draft, dtype=torch.float32).state_dict()
    larger = make_llama(num_layers=1, max_positions=512, seed=5, vocab_size=VOCAB_SIZE + NUM_EXTRA_TOKENS)
    weights = larger.state_dict()
    for name, weight in small.items():
        weights[name][: len(weight)] = weight  # rows of the extra tokens stay as they were drawn
    larger.load_state_dict(weights)
    larger.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def many(tiny_pair: TinyPair, log_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    draft = make_larger_draft(tmp_path_factory.mktemp("larger") / "draft", tiny_pair)
    models = ("--target", str(tiny_pair.target), "--draft", str(draft), "--dtype", "float32")
    numbers = ("--target-workers", "2", "--draft-workers", "2", "--log-level", "info")
    with running_service(log_folder / "many.log", *models, *numbers) as running:
        yield running


@pytest.fixture(scope="module")
def second_coordinator(many: RunningService, tiny_pair: TinyPair, log_folder: Path) -> Iterator[str]:
    """Another coordinator of the same workers."""
    flags = coordinator_flags(many, tiny_pair)
    with running_part(log_folder / "second_coordinator.log", "coordinator", *flags) as address:
        yield address


def coordinator_flags(many: RunningService, pair: TinyPair) -> list[str]:
    flags = ["--tokenizer", str(pair.target)]
    for role, flag in (("target-worker", "--target"), ("draft-worker", "--draft")):
        for _, address in many.workers(role):
            flags += [flag, address]
    return flags


@pytest.fixture
async def clients(many: RunningService, second_coordinator: str) -> AsyncIterator[list[GenerateClient]]:
    async with AsyncExitStack() as stack:
        addresses = (many.address, second_coordinator)
        yield [await stack.enter_async_context(GenerateClient(address)) for address in addresses]


async def num_sessions(role: str, address: str) -> int:
    """That this worker holds, for all coordinators. Raises AioRpcError if it does not answer."""
    stub, request = STUBS[role]
    async with grpc.aio.insecure_channel(address) as channel:
        return int((await stub(channel).GetInfo(request(), timeout=5)).heartbeat.num_sessions)


async def count_sessions(service: RunningService) -> dict[str, list[int]]:
    """By role, of workers that answer."""
    counts: dict[str, list[int]] = {}
    for role in STUBS:
        counts[role] = []
        for _, address in service.workers(role):
            found = await asyncio.gather(num_sessions(role, address), return_exceptions=True)
            counts[role] += [count for count in found if isinstance(count, int)]
    return counts


class Readings:
    """Eight answers under way, four at each coordinator."""

    def __init__(self, clients: list[GenerateClient]) -> None:
        self.cases = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLING]
        self.answers = [Answer() for _ in self.cases]
        self._tasks = [asyncio.create_task(self._read(clients[index % 2], index)) for index, _ in enumerate(self.cases)]

    async def _read(self, client: GenerateClient, index: int) -> None:
        prompt, sampling = self.cases[index]
        request = GenerateRequest(
            prompt=prompt,
            temperature=sampling.temperature,
            seed=sampling.seed,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            mode=Mode.PIPELINED,
        )
        async for event in client.generate(request, timeout_s=250):
            self.answers[index].add(event)

    async def have(self, num_tokens: int) -> None:
        """Each has so many tokens, and none is complete."""
        await wait_until(lambda: all(len(answer.token_ids) >= num_tokens for answer in self.answers), timeout_s=150)
        assert not any(answer.finished for answer in self.answers)

    async def end(self) -> None:
        await asyncio.gather(*self._tasks)


@pytest.mark.slow  # make test has the kind in tests/chaos, whose fleet is as large
@pytest.mark.timeout(400)
async def test_a_draft_and_a_target_worker_that_are_killed_change_no_token_of_eight_answers(
    many: RunningService, clients: list[GenerateClient], oracle: Oracle
) -> None:
    readings = Readings(clients)
    await readings.have(10)
    assert await count_sessions(many) == {"draft-worker": [4, 4], "target-worker": [4, 4]}
    os.kill(many.workers("draft-worker")[0][0], signal.SIGKILL)

    async def has_one_draft_worker_all() -> bool:
        return await count_sessions(many) == {"draft-worker": [8], "target-worker": [4, 4]}

    await wait_until(has_one_draft_worker_all, timeout_s=60)
    assert not any(answer.finished for answer in readings.answers), "sessions of both targets share a draft worker"
    os.kill(many.workers("target-worker")[0][0], signal.SIGKILL)
    await readings.end()
    for (prompt, sampling), answer in zip(readings.cases, readings.answers, strict=True):
        assert len(answer.token_ids) == NUM_TOKENS
        assert oracle.check(oracle.encode(prompt), answer.token_ids, sampling) == 0
        assert answer.finished is not None
        assert answer.finished.speculation.wasted_draft_ms <= answer.finished.speculation.draft_ms


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_workers_that_return_are_used_by_both_coordinators(
    many: RunningService, clients: list[GenerateClient]
) -> None:
    request = GenerateRequest(prompt="for", temperature=0, max_tokens=200, ignore_eos=True, mode=Mode.SYNC)

    async def are_back() -> bool:
        return {role: len(counts) for role, counts in (await count_sessions(many)).items()} == dict.fromkeys(STUBS, 2)

    async def share_the_load() -> bool:
        """Two answers at each coordinator, at once: one for each worker of a kind."""
        answers = [asyncio.ensure_future(client.answer(request, timeout_s=250)) for client in clients for _ in range(2)]
        most = {role: [0, 0] for role in STUBS}
        while not all(task.done() for task in answers):
            most = {role: list(map(max, most[role], now)) for role, now in (await count_sessions(many)).items()}
            await asyncio.sleep(0.05)
        return most == {"draft-worker": [2, 2], "target-worker": [2, 2]}

    await wait_until(are_back, timeout_s=RESTART_TIMEOUT_S)
    await wait_until(share_the_load, timeout_s=RESTART_TIMEOUT_S)
    await wait_until(lambda: is_idle(many))


async def is_idle(service: RunningService) -> bool:
    return not any(count for counts in (await count_sessions(service)).values() for count in counts)


class RequestStream:
    """Requests that never cease, two at once at each coordinator. One that fails fails whoever looks."""

    def __init__(self, clients: list[GenerateClient]) -> None:
        self.answers: list[tuple[str, Answer]] = []
        self._is_ending = False
        self._tasks = [asyncio.create_task(self._ask_on(client, first)) for client in clients for first in range(2)]

    async def answers_more(self) -> None:
        """Each that asks has had an answer since, and a second one that it began since."""
        enough = len(self.answers) + 2 * len(self._tasks)
        await wait_until(lambda: len(self.answers) >= enough or self._has_failed, timeout_s=RESTART_TIMEOUT_S)

    async def end(self) -> list[tuple[str, Answer]]:
        self._is_ending = True
        await asyncio.gather(*self._tasks)
        return self.answers

    @property
    def _has_failed(self) -> bool:
        return any(task.done() for task in self._tasks)

    async def _ask_on(self, client: GenerateClient, index: int) -> None:
        while not self._is_ending:
            prompt = PROMPTS[index % len(PROMPTS)]
            request = GenerateRequest(prompt=prompt, temperature=0, max_tokens=60, ignore_eos=True, mode=Mode.PIPELINED)
            self.answers.append((prompt, await client.answer(request, timeout_s=250)))
            index += 1


async def pid_of(role: str, address: str) -> int:
    """Of the worker that serves there now. Raises AioRpcError if none does."""
    stub, request = STUBS[role]
    async with grpc.aio.insecure_channel(address) as channel:
        return int((await stub(channel).GetInfo(request(), timeout=5)).hello.process.pid)


async def is_another(role: str, address: str, *, pid: int) -> bool:
    try:
        return await pid_of(role, address) != pid
    except grpc.aio.AioRpcError:
        return False


@pytest.mark.slow  # make test has the kind in tests/contract/test_drain.py and in tests/chaos
@pytest.mark.timeout(600)
async def test_a_rolling_restart_of_every_worker_ends_no_answer(
    many: RunningService, second_coordinator: str, clients: list[GenerateClient], oracle: Oracle, log_folder: Path
) -> None:
    """One after the other: the next is told to end when both coordinators have the last one back."""
    assert second_coordinator
    logs = (many.log, log_folder / "second_coordinator.log")
    workers = [(role, address) for role in STUBS for _, address in many.workers(role)]
    for role, address in workers:  # what the tests above have killed may still be starting
        await wait_until(lambda of=(role, address): is_another(*of, pid=0), timeout_s=RESTART_TIMEOUT_S)
    stream = RequestStream(clients)
    for role, address in workers:
        pid = await pid_of(role, address)
        before = num_connects(logs, address)
        os.kill(pid, signal.SIGTERM)
        await wait_until(lambda of=(role, address), pid=pid: is_another(*of, pid=pid), timeout_s=RESTART_TIMEOUT_S)
        await wait_until(
            lambda address=address, before=before: all(map(operator.gt, num_connects(logs, address), before)),
            timeout_s=RESTART_TIMEOUT_S,
        )
        await stream.answers_more()
    answers = await stream.end()
    assert len(answers) >= 2 * len(workers) * len(clients)
    for prompt, answer in answers:
        assert answer.finished is not None
        assert oracle.check(oracle.encode(prompt), answer.token_ids, Sampling()) == 0
    await wait_until(lambda: is_idle(many))


class CoordinatorPart:
    """A coordinator as a process of its own, one after the other on one port."""

    def __init__(self, log_folder: Path, name: str, flags: list[str]) -> None:
        self.address = "127.0.0.1:0"
        self._logs = (log_folder / f"{name}_{number}.log" for number in itertools.count())
        self._flags = flags
        self._running = ExitStack()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def start(self) -> None:
        """Returns when it is ready."""
        flags = ("coordinator", "--port", str(self.port), *self._flags)
        self.address = self._running.enter_context(running_part(next(self._logs), *flags))

    def end(self) -> None:
        """By SIGTERM. Returns when its last answer is complete, and it is gone."""
        self._running.close()


@pytest.mark.slow  # make test has the kind in tests/contract/test_coordinator_drain.py
@pytest.mark.timeout(600)
async def test_a_rolling_restart_of_every_coordinator_ends_no_answer(
    many: RunningService, tiny_pair: TinyPair, oracle: Oracle, log_folder: Path
) -> None:
    """Whether clients know both addresses, or one behind which new connections lead to a coordinator that stays."""
    flags = coordinator_flags(many, tiny_pair)
    parts = [CoordinatorPart(log_folder, f"rolling_coordinator_{name}", flags) for name in "ab"]
    async with AsyncExitStack() as stack:
        for part in parts:
            stack.callback(part.end)
            await asyncio.to_thread(part.start)
        relay = await stack.enter_async_context(TcpRelay(parts[0].port))
        known = [part.address for part in parts]
        clients = [
            await stack.enter_async_context(GenerateClient(addresses))
            for addresses in (known, known[::-1], relay.address)
        ]
        stream = RequestStream(clients)
        await stream.answers_more()
        for part, other in (parts, parts[::-1]):
            relay.target_port = other.port
            await asyncio.to_thread(part.end)
            await stream.answers_more()
            await asyncio.to_thread(part.start)
            await stream.answers_more()
        answers = await stream.end()
        assert relay.num_connections == 3
    assert all(answer.finished for _, answer in answers)
    for prompt, token_ids in {(prompt, tuple(answer.token_ids)) for prompt, answer in answers}:
        assert oracle.check(oracle.encode(prompt), list(token_ids), Sampling()) == 0
    await wait_until(lambda: is_idle(many))


def num_connects(logs: tuple[Path, ...], address: str) -> list[int]:
    """How often each coordinator has reached the worker at this address."""
    return [log.read_text().count(f"worker {address} is connected") for log in logs]
