"""Real draft loop, real target loop, a network with a delay: what pipelining is for, in virtual time."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import numpy.typing as npt
import pytest
from pair_simulator import PairSimulator
from target_simulator import create_open, plain_run

from specpipe.testing import TableModel
from specpipe.types import Mode, RoundStats


class Blurred(TableModel):
    """A draft whose logits are the target's with noise on top: where its first guess is wrong, a later one is right."""

    def __init__(self, target: TableModel, blur: float) -> None:
        super().__init__(target.info.vocab_size, 4096, 77, spread=1.0)
        self._target = target
        self._blur = blur

    def _compute(self, key: tuple[int, ...]) -> npt.NDArray[np.float32]:
        return (self._target.logits_of(key) + self._blur * super()._compute(key)).astype(np.float32)


def pair(blur: float) -> tuple[TableModel, Blurred]:
    target = TableModel(32, 4096, 3, spread=4.0)
    return target, Blurred(target, blur)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
def test_self_is_nearly_always_accepted(mode: Mode, temperature: float) -> None:
    target = TableModel(32, 4096, 3)
    sim = PairSimulator(target, TableModel(32, 4096, 3))
    answer = sim.open(create_open(1, max_tokens=80, mode=mode, temperature=temperature))
    sim.run()
    assert answer.new_tokens == plain_run(target, answer.opened)[0]
    assert answer.stats.num_first_ranked == answer.stats.num_judged > 0
    if mode is Mode.SYNC:
        assert answer.stats.num_rounds <= math.ceil(80 / 5) + 2


def test_what_lookups_guess_is_no_fault_of_the_draft_model() -> None:
    """Text that repeats, sampled: lookups are often wrong, and surer of themselves than the draft is."""
    target = TableModel(16, 1000, 5, spread=1.5, order=2)
    draft = TableModel.like(target, 1.0, num_slots=3000)
    numbers = itertools.count()
    sim = PairSimulator(target, draft, draft_ms=3.0, hop_ms=3.0, loses=lambda extension: next(numbers) % 3 == 2)
    answers = [sim.open(create_open(i, max_tokens=120, temperature=1.0, seed=i)) for i in range(4)]
    sim.run()
    assert sum(answer.stats.num_first_ranked for answer in answers) > 200
    for answer in answers:
        assert answer.stats.num_first_ranked == answer.stats.num_judged


def run(mode: Mode, blur: float, *, num_sessions: int = 1, max_tokens: int = 120) -> tuple[float, RoundStats]:
    """Tokens per plain step, and the sums over all sessions."""
    target, draft = pair(blur)
    sim = PairSimulator(target, draft, target_ms=10.0, draft_ms=3.0, hop_ms=0.1)
    opens = [create_open(i, [i, 2, 3], max_tokens=max_tokens, mode=mode, temperature=0.5) for i in range(num_sessions)]
    answers = [sim.open(opened) for opened in opens]
    sim.run()
    for answer in answers:
        assert answer.new_tokens == plain_run(target, answer.opened)[0]
    stats = RoundStats()
    for answer in answers:
        stats += answer.stats
    return num_sessions * max_tokens / (sim.seconds * 100), stats


def test_pipelined_beats_sync_and_hides_the_draft() -> None:
    sync_speed, _ = run(Mode.SYNC, 0.8)
    speed, stats = run(Mode.PIPELINED, 0.8)
    assert speed > 1.35 * sync_speed
    assert speed > 1.6
    assert stats.num_hits - stats.num_lookup_hits > 0.75 * (stats.num_hits + stats.num_misses)
    assert stats.exposed_ms < 0.08 * stats.step_ms
    assert stats.gap_ms == pytest.approx(0.0, abs=1e-6)


def test_sessions_share_one_draft_worker() -> None:
    speed, stats = run(Mode.PIPELINED, 0.8, num_sessions=4, max_tokens=40)
    assert speed > 4.0
    assert stats.num_accepted > 0


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_lost_extensions_cost_speed_only(share: float) -> None:
    chance = random.Random(4)
    target, draft = pair(0.8)
    sim = PairSimulator(target, draft, loses=lambda extension: chance.random() < share)
    answer = sim.open(create_open(1, max_tokens=60))
    sim.run()
    assert answer.new_tokens == plain_run(target, answer.opened)[0]
