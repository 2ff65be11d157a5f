"""At temperature 0 every answer is what transformers `generate` says on the target alone, whatever drafts for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import findings
import pytest
from oracle import Oracle
from real_prompts import MAX_TOKENS, PromptSet, RealPrompt
from running import RunningService, running_service
from slow_scale import scaled
from tally import Tally, ask_all

from specpipe import demo
from specpipe.client import Answer, GenerateRequest
from specpipe.types import Mode

pytestmark = pytest.mark.slow

MODES = (Mode.OFF, Mode.SYNC, Mode.PIPELINED)
DRAFTS = ("model", "ngram", "random", "self")
COVER_TOKENS = min(64, MAX_TOKENS)
RANKED_TOKENS = min(32, MAX_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the pairwise cover."""

    mode: Mode
    draft: str
    ranks: int
    in_flight: int


COVER = [
    Case(mode=mode, draft=draft, ranks=1 + (m + d) % 2, in_flight=(1, 16)[(m + d // 2) % 2])
    for d, draft in enumerate(DRAFTS)
    for m, mode in enumerate(MODES)
]


def test_every_pair_of_choices_is_in_the_cover() -> None:
    choices = {"mode": MODES, "draft": DRAFTS, "ranks": (1, 2), "in_flight": (1, 16)}
    for one, other in itertools.combinations(choices, 2):
        seen = {(getattr(case, one), getattr(case, other)) for case in COVER}
        assert seen == set(itertools.product(choices[one], choices[other]))


@pytest.fixture(scope="module")
def demo_service(log_folder: Path) -> Iterator[RunningService]:
    with running_service(log_folder / "greedy.log") as running:
        yield running


@pytest.fixture(scope="module")
def covered(
    request: pytest.FixtureRequest, random_demo_draft: Path, prompts: PromptSet, log_folder: Path
) -> Iterator[RunningService]:
    """The service of one kind of draft and number of ranks."""
    draft, ranks = request.param
    prompts.first(scaled(24, least=4))  # the reference wants the core for itself
    folder = {"model": demo.draft_folder(), "random": random_demo_draft, "self": demo.target_folder()}.get(draft, draft)
    flags = ("--draft", str(folder), "--tensor-parallel-size", str(ranks))
    with running_service(log_folder / f"cover_{draft}_{ranks}.log", *flags) as running:
        yield running


async def ask(
    service: RunningService, prompts: list[RealPrompt], length: int, *, mode: Mode, in_flight: int
) -> list[Answer]:
    requests = [
        GenerateRequest(prompt=prompt.text, temperature=0, max_tokens=length, ignore_eos=True, mode=mode)
        for prompt in prompts
    ]
    return await ask_all(service.address, requests, in_flight=in_flight)


def conclude(
    name: str, oracle: Oracle, prompts: list[RealPrompt], answers: list[Answer], length: int
) -> dict[str, float]:
    """Compare and record. Returns how many tokens were accepted and verified in all."""
    tally = Tally(oracle=oracle)
    for prompt, answer in zip(prompts, answers, strict=True):
        tally.compare(prompt.ids, prompt.expected[:length], answer)
    tally.conclude(name)
    stats = [answer.finished.speculation for answer in answers if answer.finished]
    sums = {key: sum(getattr(s, key) for s in stats) for key in ("rounds", "verified_tokens", "accepted_tokens")}
    findings.record(f"{name}: {sums}")
    return sums


@pytest.mark.parametrize("mode", MODES)
async def test_two_hundred_answers_equal_generate_on_the_target_alone(
    prompts: PromptSet, demo_service: RunningService, demo_oracle: Oracle, mode: Mode
) -> None:
    chosen = prompts.first(scaled(200, least=8))
    answers = await ask(demo_service, chosen, MAX_TOKENS, mode=mode, in_flight=16)
    sums = conclude(mode.value, demo_oracle, chosen, answers, MAX_TOKENS)
    assert (sums["accepted_tokens"] == 0) is (mode is Mode.OFF)


@pytest.mark.parametrize(
    ("covered", "case"),
    [
        pytest.param((case.draft, case.ranks), case, id=f"{case.draft}-{case.ranks}-{case.mode.value}-{case.in_flight}")
        for case in sorted(COVER, key=lambda case: (case.draft, case.ranks))
    ],
    indirect=["covered"],
)
async def test_no_draft_number_of_ranks_or_load_changes_an_answer(
    prompts: PromptSet, covered: RunningService, demo_oracle: Oracle, case: Case
) -> None:
    chosen = prompts.first(scaled(24, least=4))
    answers = await ask(covered, chosen, COVER_TOKENS, mode=case.mode, in_flight=case.in_flight)
    sums = conclude("", demo_oracle, chosen, answers, COVER_TOKENS)
    assert (sums["verified_tokens"] == 0) is (case.mode is Mode.OFF)


async def test_four_ranks_change_no_answer(prompts: PromptSet, demo_oracle: Oracle, log_folder: Path) -> None:
    chosen = prompts.first(scaled(8, least=2))
    with running_service(log_folder / "four_ranks.log", "--tensor-parallel-size", "4") as service:
        answers = await ask(service, chosen, RANKED_TOKENS, mode=Mode.PIPELINED, in_flight=8)
    conclude("", demo_oracle, chosen, answers, RANKED_TOKENS)
