"""Sampled answers depend on prompt, parameters, seed and target alone: not on mode, draft, workers, ranks or faults."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from oracle import Oracle, Sampling
from real_prompts import PromptSet, RealPrompt
from running import RunningService, running_service
from slow_scale import scaled
from tally import ANSWER_TIMEOUT_S, Tally, Verdict, ask_all

from specpipe import demo
from specpipe.answers import Chunk
from specpipe.client import Answer, GenerateClient, GenerateRequest
from specpipe.types import Mode

pytestmark = pytest.mark.slow

MAX_TOKENS = scaled(64, least=24)
TEMPERATURES = (0.3, 0.7, 1.0)
SERVICES = {  # kind of draft, draft workers, target workers, ranks of each
    "one of each": ("model", 1, 1, 1),
    "random draft": ("random", 1, 1, 1),
    "target as draft": ("self", 1, 1, 1),
    "two draft workers": ("model", 2, 1, 1),
    "two target workers": ("model", 1, 2, 1),
    "two of each": ("model", 2, 2, 1),
    "two ranks": ("model", 1, 1, 2),
    "two workers of two ranks": ("model", 2, 2, 2),
    "lookup": ("ngram", 0, 1, 1),
}
WITH_DRAFT_WORKERS = [name for name, (_, draft_workers, _, _) in SERVICES.items() if draft_workers]
KNOWN: dict[Verdict, int] = {}  # answers that the oracle has judged: nearly all are the same


def samplings(index: int) -> list[Sampling]:
    """For the prompt at `index`: each temperature, with a seed of its own."""
    return [Sampling(temperature=t, seed=1000 * index + 10 * i + 2**40) for i, t in enumerate(TEMPERATURES)]


@pytest.fixture(scope="module")
def chosen(demo_oracle: Oracle, prompts: PromptSet) -> list[RealPrompt]:
    return [prompt for prompt in prompts.first(12) if len(prompt.ids) < 300][: scaled(8, least=2)]


@pytest.fixture(scope="module")
def sampled_service(
    request: pytest.FixtureRequest, random_demo_draft: Path, log_folder: Path
) -> Iterator[RunningService]:
    draft, draft_workers, target_workers, ranks = SERVICES[request.param]
    folder = {"model": demo.draft_folder(), "random": random_demo_draft, "self": demo.target_folder()}.get(draft, draft)
    flags = ["--draft", str(folder), "--target-workers", str(target_workers), "--tensor-parallel-size", str(ranks)]
    flags += ["--draft-workers", str(draft_workers)] if draft_workers else []
    with running_service(log_folder / f"sampled_{request.param.replace(' ', '_')}.log", *flags) as running:
        yield running


def request_of(prompt: RealPrompt, sampling: Sampling, mode: Mode) -> GenerateRequest:
    return GenerateRequest(
        prompt=prompt.text,
        temperature=sampling.temperature,
        seed=sampling.seed,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        mode=mode,
    )


def all_cases(chosen: list[RealPrompt]) -> list[tuple[RealPrompt, Sampling]]:
    return [(prompt, sampling) for index, prompt in enumerate(chosen) for sampling in samplings(index)]


def conclude(oracle: Oracle, cases: list[tuple[RealPrompt, Sampling]], answers: list[Answer]) -> None:
    """Each answer is the oracle's own, which is one and the same for all services."""
    tally = Tally(oracle=oracle, known=KNOWN)
    for (prompt, sampling), answer in zip(cases, answers, strict=True):
        tally.check(prompt.ids, MAX_TOKENS, answer, sampling)
    tally.conclude("")


@pytest.mark.parametrize("sampled_service", SERVICES, indirect=True)
@pytest.mark.parametrize("mode", list(Mode))
async def test_sampled_answers_are_the_oracles_own(
    chosen: list[RealPrompt], sampled_service: RunningService, demo_oracle: Oracle, mode: Mode
) -> None:
    cases = all_cases(chosen)
    requests = [request_of(prompt, sampling, mode) for prompt, sampling in cases]
    answers = await ask_all(sampled_service.address, requests, in_flight=12)
    conclude(demo_oracle, cases, answers)
    verified = sum(answer.finished.speculation.verified_tokens for answer in answers if answer.finished)
    assert (verified == 0) is (mode is Mode.OFF)


@pytest.mark.parametrize("sampled_service", WITH_DRAFT_WORKERS, indirect=True)
async def test_answers_whose_draft_worker_is_killed_half_way_are_the_oracles_own(
    chosen: list[RealPrompt], sampled_service: RunningService, demo_oracle: Oracle
) -> None:
    cases = all_cases(chosen)
    answers = [Answer() for _ in cases]
    killed: list[int] = []

    async def ask(client: GenerateClient, request: GenerateRequest, answer: Answer) -> None:
        async for event in client.generate(request, timeout_s=ANSWER_TIMEOUT_S):
            answer.add(event)
            is_half_way = sum(len(each.token_ids) for each in answers) * 2 >= MAX_TOKENS * len(answers)
            if isinstance(event, Chunk) and is_half_way and not killed:
                killed.append(sampled_service.pid("draft-worker"))
                os.kill(killed[0], signal.SIGKILL)

    async with GenerateClient(sampled_service.address) as client:
        requests = [request_of(prompt, sampling, Mode.PIPELINED) for prompt, sampling in cases]
        await asyncio.gather(*(ask(client, *pair) for pair in zip(requests, answers, strict=True)))
    assert killed
    conclude(demo_oracle, cases, answers)
