"""The draft is the target itself: both sides use one noise for one position, so nearly every guess is right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import findings
import pytest
from oracle import Oracle, Sampling
from real_prompts import PromptSet, RealPrompt
from running import RunningService, running_service
from slow_scale import scaled
from tally import Tally, ask_all

from specpipe import demo
from specpipe.client import Answer, GenerateRequest
from specpipe.types import Mode

pytestmark = pytest.mark.slow

MAX_TOKENS = scaled(128, least=48)
SPECULATING = (Mode.SYNC, Mode.PIPELINED)


@pytest.fixture(scope="module")
def self_drafted(log_folder: Path) -> Iterator[RunningService]:
    with running_service(log_folder / "self_draft.log", "--draft", str(demo.target_folder())) as running:
        yield running


@pytest.fixture(scope="module")
def chosen(prompts: PromptSet) -> list[RealPrompt]:
    return prompts.first(scaled(16, least=4))


async def ask(
    service: RunningService, chosen: list[RealPrompt], mode: Mode, temperature: float, *, k: int | None, in_flight: int
) -> list[Answer]:
    requests = [
        GenerateRequest(
            prompt=prompt.text,
            temperature=temperature,
            seed=index,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            mode=mode,
            num_speculative_tokens=k,
        )
        for index, prompt in enumerate(chosen)
    ]
    return await ask_all(service.address, requests, in_flight=in_flight)


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", SPECULATING)
async def test_nearly_every_guess_is_accepted(
    chosen: list[RealPrompt],
    self_drafted: RunningService,
    demo_oracle: Oracle,
    mode: Mode,
    temperature: float,
    in_flight: int,
) -> None:
    answers = await ask(self_drafted, chosen, mode, temperature, k=None, in_flight=in_flight)
    tally = Tally(oracle=demo_oracle)
    for index, (prompt, answer) in enumerate(zip(chosen, answers, strict=True)):
        tally.check(prompt.ids, MAX_TOKENS, answer, Sampling(temperature=temperature, seed=index))
    tally.conclude("")
    stats = [answer.finished.speculation for answer in answers if answer.finished]
    rates = [of_answer.acceptance_rate for of_answer in stats if of_answer.acceptance_rate is not None]
    accepted = sum(of_answer.accepted_tokens for of_answer in stats)
    findings.record(f"{len(rates)} acceptance rates, the least {min(rates, default=1.0):.4f}; {accepted} accepted")
    if in_flight == 1 or mode is Mode.SYNC:  # a draft as slow as its target seldom has a guess in time for four at once
        assert accepted > 0
    assert sum(rates) >= 0.99 * len(rates)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_sync_needs_no_more_rounds_than_full_blocks(
    chosen: list[RealPrompt], self_drafted: RunningService, temperature: float, k: int
) -> None:
    answers = await ask(self_drafted, chosen[:4], Mode.SYNC, temperature, k=k, in_flight=1)
    rounds = [answer.finished.speculation.rounds for answer in answers if answer.finished]
    findings.record(f"{rounds} rounds, {math.ceil(MAX_TOKENS / (k + 1))} blocks")
    assert max(rounds) <= math.ceil(MAX_TOKENS / (k + 1)) + 2
