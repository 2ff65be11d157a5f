"""Answers of the real draft and target loops, in one process and virtual time, follow the target's distribution.

Trees, delays, lost extensions, many sessions in one step and confidence-driven selection are all on.
"""

from __future__ import annotations

import itertools

import findings
import pytest
from chi_square import assert_follows
from pair_simulator import PairSimulator
from slow_scale import scaled
from target_simulator import Answer, create_open, plain_run

from specpipe.testing import TableModel
from specpipe.types import Extension, Mode, SamplingParams

PROMPT = (3, 7)
LENGTH = 5
TARGET = TableModel(16, num_slots=600, seed=5, order=1)
DRAFTS = {
    "mixed": TableModel.like(TARGET, 0.6, num_slots=3000, seed=2),
    "random": TableModel(16, num_slots=3000, seed=99, order=1),
}
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.3, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
]


def answer_all(
    setting: dict[str, float], draft: TableModel, number: int, *, mode: Mode = Mode.PIPELINED, at_once: int = 8
) -> list[Answer]:
    """`number` answers with consecutive seeds, `at_once` of them in flight; every fifth extension is lost."""
    answers: list[Answer] = []
    for start in range(0, number, at_once):
        extensions = itertools.count()
        pair = PairSimulator(
            TARGET,
            draft,
            target_ms=10.0,
            draft_ms=2.0 + start % 5,
            hop_ms=0.3 + start % 7,
            flat_rows=32,
            is_checked=number < 1000,
            loses=lambda extension, numbers=extensions: loses(extension, next(numbers)),  # type: ignore[misc]
        )
        for seed in range(start, start + at_once):
            opened = create_open(1 + seed, PROMPT, max_tokens=LENGTH, mode=mode, seed=seed, **setting)  # type: ignore[arg-type]
            answers.append(pair.open(opened))
        pair.run()
    return answers


def loses(extension: Extension, number: int) -> bool:
    return number % 5 == 4


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_pipelined_answers_follow_the_target(setting: dict[str, float], draft: str) -> None:
    answers = answer_all(setting, DRAFTS[draft], 240)
    assert_follows([answer.new_tokens for answer in answers], TARGET, SamplingParams(**setting), PROMPT[-1])  # type: ignore[arg-type]
    for answer in answers:
        assert answer.new_tokens == plain_run(TARGET, answer.opened)[0]
    assert sum(answer.stats.num_verified for answer in answers) > 40  # speculation really took part
    if draft == "mixed":
        assert sum(answer.stats.num_accepted for answer in answers) > 50


def test_sync_answers_follow_the_target() -> None:
    answers = answer_all(SETTINGS[0], DRAFTS["mixed"], 80, mode=Mode.SYNC)
    assert_follows([answer.new_tokens for answer in answers], TARGET, SamplingParams(temperature=1.0), PROMPT[-1])
    assert sum(answer.stats.num_accepted for answer in answers) > 50


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_twenty_thousand_answers_follow_the_target(setting: dict[str, float]) -> None:
    answers = answer_all(setting, DRAFTS["mixed"], scaled(20_000, least=320), at_once=16)
    said = [answer.new_tokens for answer in answers]
    p = assert_follows(said, TARGET, SamplingParams(**setting), PROMPT[-1])  # type: ignore[arg-type]
    num_accepted = sum(answer.stats.num_accepted for answer in answers)
    findings.record(f"{len(answers)} answers, p = {p:.3g}; {num_accepted} tokens accepted")
    assert said == [plain_run(TARGET, answer.opened)[0] for answer in answers]
    assert num_accepted > len(answers) / 8
