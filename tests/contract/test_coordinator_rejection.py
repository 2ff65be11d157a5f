"""The rejection rule through the whole service over gRPC: proposals travel, greedy answers are the target's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from coordinator_cluster import DEMO, Cluster, cluster, target_model
from waiting import wait_until

from coordinator.tokenization import load_tokenization
from specpipe.client import GenerateRequest
from specpipe.types import Mode, Origin, Rule

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = load_tokenization(str(DEMO))
PROMPT = "def add(left, right):\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[Cluster]:
    async with cluster() as running:
        yield running


def ask(**options: Any) -> GenerateRequest:
    return GenerateRequest(prompt=PROMPT, **{"seed": 5, "max_tokens": 24, "rule": Rule.REJECTION, **options})


def greedy(num_tokens: int) -> list[int]:
    table = target_model()
    text = TOKENS.encode(PROMPT)
    for _ in range(num_tokens):
        text.append(int(table.logits_of(text).argmax()))
    return text[-num_tokens:]


@pytest.mark.parametrize("mode", list(Mode))
async def test_greedy_answers_are_the_targets_own_in_every_mode(service: Cluster, mode: Mode) -> None:
    answer = await service.client.answer(ask(mode=mode, temperature=0.0), timeout_s=30)
    assert answer.token_ids == greedy(24)
    assert answer.finished is not None
    assert answer.finished.speculation.rule is Rule.REJECTION
    if mode is Mode.SYNC:
        assert answer.finished.speculation.accepted_tokens > 0


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
async def test_sampled_answers_accept_drafted_tokens(service: Cluster, mode: Mode) -> None:
    """Tested ones: the draft agrees with the target in four cases of five, and there a test always passes."""
    answers = await asyncio.gather(
        *(service.client.answer(ask(mode=mode, temperature=1.0, seed=seed), timeout_s=60) for seed in range(6))
    )
    assert len({tuple(answer.token_ids) for answer in answers}) == 6
    origins = [origin for answer in answers for origin in answer.origins]
    assert len(origins) == 6 * 24
    if mode is Mode.SYNC:
        assert origins.count(Origin.ACCEPTED) > origins.count(Origin.RECOVERED) > 0
    await wait_until(lambda: service.is_idle)


async def test_the_rule_may_be_the_services_default() -> None:
    async with cluster(rule=Rule.REJECTION) as running:
        answer = await running.client.answer(ask(rule=None, temperature=0.0), timeout_s=30)
        assert answer.token_ids == greedy(24)
        assert answer.finished is not None
        assert answer.finished.speculation.rule is Rule.REJECTION
