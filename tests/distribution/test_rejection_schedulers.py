"""Answers of the real draft and target loops under the rejection rule follow the target's distribution.

Trees, delays, lost extensions, many sessions in one step and selection by reach are all on, in virtual time. Selection
that looks at the token drawn is noticed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import findings
import numpy as np
import numpy.typing as npt
import pytest
from chi_square import LEAST_P, Chain, follower_p_value, worst_p_value
from pair_simulator import PairSimulator
from slow_scale import scaled
from target_simulator import Answer, create_open, plain_run

from specpipe.sampling import rejection
from specpipe.testing import TableModel
from specpipe.types import Extension, Mode, Proposal, Rule, SamplingParams

PROMPT = (3, 7)
LENGTH = 5
NUM_SLOW_ANSWERS = scaled(20_000, least=320)
TARGET = TableModel(16, num_slots=600, seed=5, spread=1.5, order=1)
DRAFTS = {
    "mixed": TableModel.like(TARGET, 0.6, num_slots=3000, seed=2),
    "random": TableModel(16, num_slots=3000, seed=99, spread=1.5, order=1),
}


class Blurred(TableModel):
    """A draft that is near the target everywhere and equal to it nowhere."""

    def _compute(self, key: tuple[int, ...]) -> npt.NDArray[np.float32]:
        mixed: npt.NDArray[np.float32] = 0.8 * TARGET.logits_of(key) + 0.5 * super()._compute(key)
        return mixed


DRAFTS["near"] = Blurred(16, num_slots=3000, seed=98, spread=1.5, order=1)
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.3, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
]


def answer_all(
    setting: dict[str, float],
    draft: TableModel,
    number: int,
    *,
    mode: Mode = Mode.PIPELINED,
    drafter: str = "model",
    k: int | None = None,
    at_once: int = 8,
    length: int = LENGTH,
    first_seed: int = 0,
    is_quick: bool = False,
    max_nodes: int = 256,
) -> list[Answer]:
    """`number` answers with consecutive seeds, `at_once` of them in flight; every fifth extension is lost.

    `is_quick`: a fast draft nearby, so that most rounds test something.
    """
    answers: list[Answer] = []
    for start in range(0, number, at_once):
        extensions = itertools.count()
        pair = PairSimulator(
            TARGET,
            draft,
            target_ms=10.0,
            draft_ms=1.0 if is_quick else 2.0 + start % 5,
            hop_ms=0.3 if is_quick else 0.3 + start % 7,
            flat_rows=32,
            max_nodes=max_nodes,
            is_checked=number < 200,
            loses=lambda extension, numbers=extensions: loses(extension, next(numbers)),  # type: ignore[misc]
        )
        for seed in range(first_seed + start, first_seed + start + at_once):
            opened = create_open(
                1 + seed, PROMPT, max_tokens=length, mode=mode, k=k, seed=seed, drafter=drafter, **setting
            )  # type: ignore[arg-type]
            answers.append(pair.open(replace(opened, speculation=replace(opened.speculation, rule=Rule.REJECTION))))
        pair.run()
    return answers


def loses(extension: Extension, number: int) -> bool:
    return number % 5 == 4


def texts(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.new_tokens for answer in answers]


def least_p(answers: Sequence[Answer], setting: dict[str, float]) -> float:
    """Of every position, every pair of neighbours, and the tokens that followed each token anywhere."""
    chain = Chain.of(TARGET, SamplingParams(**setting))  # type: ignore[arg-type]
    return min(worst_p_value(texts(answers), chain, PROMPT[-1]), follower_p_value(texts(answers), chain, PROMPT[-1]))


@dataclass
class DrawWatch:
    """Every test of a drawn token: how likely it was to be drawn and to pass, and what became of it."""

    drawn: list[float] = field(default_factory=list)  # probability of the token drawn ...
    expected: list[float] = field(default_factory=list)  # ... and its mean over draws
    variances: list[float] = field(default_factory=list)
    passed: list[float] = field(default_factory=list)
    overlaps: list[float] = field(default_factory=list)  # sum of min(target_prob, draft_prob)

    def add(self, target_probs: npt.NDArray[np.float64], tested: Proposal, choice: int) -> None:
        probs = np.array(tested.probs)
        self.drawn.append(tested.probs[tested.index])
        self.expected.append(float((probs**2).sum()))
        self.variances.append(float((probs**3).sum() - (probs**2).sum() ** 2))
        self.passed.append(float(choice == tested.token))
        self.overlaps.append(float(np.minimum(target_probs[list(tested.tokens)], probs).sum()))

    @property
    def draw_bias(self) -> float:
        """In standard deviations: 0 if whether a draw was tested did not depend on it."""
        return float(np.subtract(self.drawn, self.expected).sum() / np.sqrt(np.sum(self.variances)))

    @property
    def accept_bias(self) -> float:
        """In standard deviations: 0 if the accept rate is the overlap."""
        overlaps = np.array(self.overlaps)
        return float((np.sum(self.passed) - overlaps.sum()) / np.sqrt((overlaps * (1 - overlaps)).sum()))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> DrawWatch:
    seen = DrawWatch()
    choose = rejection.Judge.choose

    def watched(judge: rejection.Judge, logits: npt.NDArray[np.float32], position: int, tested: Proposal | None) -> int:
        choice = choose(judge, logits, position, tested)
        if tested is not None:
            seen.add(rejection.target_shares(logits, judge._params), tested, choice)
        return choice

    monkeypatch.setattr(rejection.Judge, "choose", watched)
    return seen


@pytest.mark.parametrize(("setting", "draft"), list(zip(SETTINGS, ["mixed", "random", "near"], strict=True)), ids=str)
def test_pipelined_answers_follow_the_target(setting: dict[str, float], draft: str, watch: DrawWatch) -> None:
    answers = answer_all(setting, DRAFTS[draft], 160)
    assert least_p(answers, setting) > LEAST_P
    assert len(watch.drawn) > 20
    assert abs(watch.draw_bias) < 4


def test_answers_with_a_quick_draft_follow_the_target(watch: DrawWatch) -> None:
    answers = answer_all(SETTINGS[0], DRAFTS["near"], 320, is_quick=True, at_once=2, max_nodes=32)
    assert least_p(answers, SETTINGS[0]) > LEAST_P
    assert len(watch.drawn) > 300
    assert abs(watch.draw_bias) < 4
    assert abs(watch.accept_bias) < 4


def test_sync_answers_follow_the_target(watch: DrawWatch) -> None:
    answers = answer_all(SETTINGS[0], DRAFTS["near"], 160, mode=Mode.SYNC)
    assert least_p(answers, SETTINGS[0]) > LEAST_P
    assert len(watch.drawn) > 200
    assert abs(watch.draw_bias) < 4
    assert abs(watch.accept_bias) < 4


def test_ngram_answers_follow_the_target(watch: DrawWatch) -> None:
    answers = answer_all(SETTINGS[0], DRAFTS["mixed"], 40, drafter="ngram", length=24)
    assert least_p(answers, SETTINGS[0]) > LEAST_P
    assert sum(answer.stats.num_accepted for answer in answers) > 20
    assert set(watch.expected) == {1.0}
    assert abs(watch.accept_bias) < 4


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.SYNC, Mode.PIPELINED])
@pytest.mark.parametrize("drafter", ["model", "ngram", "none"])
def test_greedy_answers_are_the_targets_own(mode: Mode, drafter: str) -> None:
    answers = answer_all({"temperature": 0.0}, DRAFTS["mixed"], 4, mode=mode, drafter=drafter, length=24, at_once=4)
    for answer in answers:
        assert answer.new_tokens == plain_run(TARGET, answer.opened)[0]


right_children = rejection._children


def confidence_of_the_drawn_token(proposal: Proposal, others: list[int]) -> list[tuple[int, float]]:
    """The wrong variant: a sampled child's confidence is the probability of the token that was drawn."""
    return [(proposal.token, proposal.probs[proposal.index]), *right_children(proposal, others)[1:]]


def test_selection_by_the_drawn_tokens_probability_is_noticed(
    monkeypatch: pytest.MonkeyPatch, watch: DrawWatch
) -> None:
    monkeypatch.setattr(rejection, "_children", confidence_of_the_drawn_token)
    monkeypatch.setattr("target_worker.scheduler.MIN_BLIND_REACH", 0.3)
    answers = answer_all(SETTINGS[0], DRAFTS["near"], 800, is_quick=True, at_once=1, max_nodes=32)
    assert least_p(answers, SETTINGS[0]) < LEAST_P
    assert watch.draw_bias > 10


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("setting", "draft"), list(zip(SETTINGS, ["near", "mixed", "near"], strict=True)), ids=str)
def test_twenty_thousand_answers_follow_the_target(setting: dict[str, float], draft: str, watch: DrawWatch) -> None:
    answers = answer_all(setting, DRAFTS[draft], NUM_SLOW_ANSWERS, at_once=16)
    p = least_p(answers, setting)
    findings.record(
        f"{len(answers)} answers, p = {p:.3g}; {len(watch.drawn)} draws tested, bias of drawing {watch.draw_bias:.2f},"
        f" of accepting {watch.accept_bias:.2f} standard deviations"
    )
    assert p > LEAST_P
    assert len(watch.drawn) > NUM_SLOW_ANSWERS / 8
    assert abs(watch.draw_bias) < 4
    assert abs(watch.accept_bias) < 4
