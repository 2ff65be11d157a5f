"""Two ranks, each started by its own command: the same answers, and none outlives the other.

The group is formed twice: each fault ends it, and whoever supervises the commands starts them again.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator

import findings
import pytest
from oracle import Oracle, Sampling
from ranks_on_hosts import Host, RanksOnHosts, ranks_on_hosts
from running import READY_TIMEOUT_S
from tiny_models import TinyPair
from waiting import wait_until

from specpipe.answers import Chunk
from specpipe.client import Answer, GenerateClient, GenerateRequest

LONG = GenerateRequest(prompt="def", temperature=0, max_tokens=150, ignore_eos=True)
PROMPTS = ("def tokens(line):", "for index", "中文")

pytestmark = pytest.mark.timeout(6 * READY_TIMEOUT_S)


@pytest.fixture(scope="module")
def group(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RanksOnHosts]:
    with ranks_on_hosts(tmp_path_factory.mktemp("ranks"), tiny_pair.target, (Host(), Host())) as found:
        found.form()
        yield found


@pytest.fixture(scope="module")
def coordinator(group: RanksOnHosts) -> str:
    """Its address. It finds the worker again when the group has formed anew."""
    flags = ("--target", group.target, "--tokenizer", str(group.model), "--drafter", "ngram")
    return group.start("coordinator", Host(), "coordinator", *flags).address()


@pytest.fixture
async def client(coordinator: str) -> AsyncIterator[GenerateClient]:
    async with GenerateClient(coordinator) as connected:
        yield connected


async def check_answers(client: GenerateClient, oracle: Oracle) -> None:
    requests = [GenerateRequest(prompt=text, temperature=0, max_tokens=24, ignore_eos=True) for text in PROMPTS]
    for prompt, answer in zip(PROMPTS, await asyncio.gather(*map(client.answer, requests)), strict=True):
        oracle.check(oracle.encode(prompt), answer.token_ids, Sampling())
        assert len(answer.token_ids) == 24


async def test_answers_are_those_of_one_process_and_a_frozen_rank_ends_the_worker_in_mid_answer(
    group: RanksOnHosts, client: GenerateClient, oracle: Oracle
) -> None:
    await check_answers(client, oracle)
    rank_0, rank_1 = group.ranks
    answer, frozen_s = Answer(), 0.0

    async def ask() -> None:
        nonlocal frozen_s
        async for event in client.generate(LONG, timeout_s=6 * READY_TIMEOUT_S):
            answer.add(event)
            if isinstance(event, Chunk) and not frozen_s:
                frozen_s = time.monotonic()
                rank_1.signal(signal.SIGSTOP)

    asking = asyncio.create_task(ask())
    await wait_until(lambda: rank_0.has_ended, timeout_s=READY_TIMEOUT_S)
    findings.record(f"rank 0 had ended {time.monotonic() - frozen_s:.1f} s after rank 1 was frozen")
    assert rank_0.process.returncode == 1
    assert "silent" in rank_0.said() or "lost one another" in rank_0.said()
    rank_1.signal(signal.SIGCONT)
    await asyncio.to_thread(rank_1.process.wait, READY_TIMEOUT_S)
    assert rank_1.process.returncode == 1
    assert "error: " in rank_1.said()
    await asyncio.gather(asking, return_exceptions=True)  # there was nowhere to go on
    oracle.check(oracle.encode("def"), answer.token_ids, Sampling())


async def test_a_group_that_was_started_again_answers_and_no_rank_outlives_rank_0(
    group: RanksOnHosts, client: GenerateClient, oracle: Oracle
) -> None:
    await asyncio.to_thread(group.form)

    async def answers() -> bool:
        asked = await asyncio.gather(check_answers(client, oracle), return_exceptions=True)
        return asked == [None]

    await wait_until(answers, timeout_s=READY_TIMEOUT_S)
    rank_0, rank_1 = group.ranks
    rank_0.signal(signal.SIGKILL)
    seconds = await asyncio.to_thread(rank_1.seconds_until_end)
    findings.record(f"rank 1 had ended {seconds:.1f} s after rank 0 was killed")
    assert rank_1.process.returncode == 1
    assert "rank 0 is gone" in rank_1.said()
