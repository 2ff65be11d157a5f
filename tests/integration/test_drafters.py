"""Services whose drafts are nearly always right (the target drafts for itself) or come from the text so far."""

from __future__ import annotations

import asyncio
import math

import pytest
from oracle import Oracle, Sampling
from running import RunningService

from specpipe.client import Answer, GenerateClient, GenerateRequest
from specpipe.types import Mode

PROMPTS = ("def tokens(line):", "A fast draft model", "for index", "한국어")


async def ask(service: RunningService, requests: list[GenerateRequest]) -> list[Answer]:
    async with GenerateClient(service.address) as client:
        return await asyncio.gather(*(client.answer(request, timeout_s=60) for request in requests))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
async def test_a_draft_that_is_the_target_is_nearly_always_accepted(
    self_service: RunningService, mode: Mode, temperature: float
) -> None:
    requests = [
        GenerateRequest(prompt=prompt, temperature=temperature, seed=5, max_tokens=64, ignore_eos=True, mode=mode)
        for prompt in PROMPTS
    ]
    stats = [answer.finished.speculation for answer in await ask(self_service, requests) if answer.finished]
    assert len(stats) == len(requests)
    assert sum(of_answer.accepted_tokens for of_answer in stats) > 0
    for of_answer in stats:  # None: on a busy host no guess of this answer came in time
        assert of_answer.acceptance_rate is None or of_answer.acceptance_rate >= 0.99


@pytest.mark.parametrize("k", [1, 4, 8])
async def test_sync_needs_no_more_rounds_than_full_blocks(self_service: RunningService, k: int) -> None:
    request = GenerateRequest(
        prompt="def", temperature=0, max_tokens=60, ignore_eos=True, mode=Mode.SYNC, num_speculative_tokens=k
    )
    (answer,) = await ask(self_service, [request])
    assert answer.finished is not None
    assert answer.finished.speculation.rounds <= math.ceil(60 / (k + 1)) + 2


async def test_no_round_commits_more_than_k_plus_one_tokens(self_service: RunningService) -> None:
    request = GenerateRequest(prompt="def", temperature=0, max_tokens=40, ignore_eos=True, num_speculative_tokens=3)
    (answer,) = await ask(self_service, [request])
    assert answer.finished is not None
    assert answer.finished.speculation.rounds >= 40 / (3 + 1)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, seed=21)], ids=["greedy", "sampled"])
async def test_looking_drafts_up_in_the_text_changes_no_answer(
    ngram_service: RunningService, oracle: Oracle, sampling: Sampling
) -> None:
    requests = [
        GenerateRequest(
            prompt=prompt * 3,
            temperature=sampling.temperature,
            seed=sampling.seed,
            max_tokens=48,
            ignore_eos=True,
        )
        for prompt in PROMPTS
    ]
    for request, answer in zip(requests, await ask(ngram_service, requests), strict=True):
        assert isinstance(request.prompt, str)
        assert len(answer.token_ids) == 48
        assert oracle.check(oracle.encode(request.prompt), answer.token_ids, sampling) == 0


async def test_a_service_without_draft_workers_has_no_draft_process(ngram_service: RunningService) -> None:
    assert [process["role"] for process in ngram_service.processes] == ["coordinator", "target-worker"]
