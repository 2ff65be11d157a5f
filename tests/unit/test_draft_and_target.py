"""The real draft loop and the real target loop in one process, in virtual time, with a relay that loses and doubles.

Whatever happens to extensions, the committed tokens are what the target alone would say.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from draft_harness import continuation, open_message

from draft_worker.worker import DraftLoop
from specpipe.config import DraftWorkerConfig, EngineConfig, TargetWorkerConfig
from specpipe.model_thread import StepLoop
from specpipe.testing import TableModel
from specpipe.types import Commit, Extension, Mode, RoundStats, SessionMessage
from target_worker.worker import TargetLoop

PROMPT = (1, 2, 3, 4)
HOP_S = 0.00001
IDLE_S = 0.002


@dataclass
class Side:
    """One worker with a clock of its own that moves while it computes."""

    cost_s: float
    now_s: float = 0.0
    sent: list[SessionMessage] = field(default_factory=list)
    arriving: list[tuple[float, SessionMessage]] = field(default_factory=list)
    loop: StepLoop = field(init=False)

    def timed(self, model: TableModel) -> TableModel:
        forward = model.forward

        def slow(batch):
            self.now_s += self.cost_s
            return forward(batch)

        model.forward = slow  # type: ignore[method-assign]
        return model

    def turn(self) -> list[SessionMessage]:
        """Receive what has arrived, run once; returns what was sent."""
        due = [message for at_s, message in self.arriving if at_s <= self.now_s]
        self.arriving = [(at_s, message) for at_s, message in self.arriving if at_s > self.now_s]
        for message in due:
            self.loop.receive(1, message)
        wait_s = self.loop.run_once()
        if wait_s != 0.0:
            self.now_s += IDLE_S
        self.loop.check()  # type: ignore[attr-defined]
        sent, self.sent = self.sent, []
        return sent


def speculate(
    target_model: TableModel, draft_model: TableModel, opened, mangle: Callable[[SessionMessage], list[SessionMessage]]
) -> tuple[list[int], RoundStats]:
    """Run one request to its end; returns its tokens and statistics."""
    engine = EngineConfig(model="table")
    target, draft = Side(cost_s=0.01), Side(cost_s=0.002)
    target.loop = TargetLoop(
        target.timed(target_model),
        TargetWorkerConfig(engine=engine),
        lambda _, message: target.sent.append(message),
        clock=lambda: target.now_s,
    )
    draft.loop = DraftLoop(
        draft.timed(draft_model),
        DraftWorkerConfig(engine=engine, max_nodes=64),
        lambda _, message: draft.sent.append(message),
        clock=lambda: draft.now_s,
    )
    for side in (target, draft):
        side.loop.receive(1, opened)
    tokens: list[int] = []
    stats = RoundStats()
    while True:
        if draft.now_s < target.now_s:
            for message in draft.turn():
                target.arriving += [(draft.now_s + HOP_S, copy) for copy in mangle(message)]
            continue
        for message in target.turn():
            assert isinstance(message, Commit), message
            tokens += message.tokens
            stats += message.stats
            draft.arriving.append((target.now_s + HOP_S, message))
            if message.finish_reason is not None:
                return tokens, stats


def as_it_is(message: SessionMessage) -> list[SessionMessage]:
    return [message]


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_as_its_own_draft_is_always_right(mode: Mode, temperature: float) -> None:
    """SELF: every first-ranked node that was judged was the choice; in sync a round commits K + 1 tokens."""
    opened = open_message(1, PROMPT, mode=mode, temperature=temperature, max_length=28)
    target = TableModel(num_slots=400, seed=1)
    tokens, stats = speculate(target, TableModel(num_slots=400, seed=1), opened, as_it_is)
    assert tokens == continuation(target, opened, PROMPT, 24)
    assert stats.num_judged == stats.num_first_ranked > 0
    if mode is Mode.SYNC:
        assert stats.num_rounds <= 24 // 5 + 1 + 2


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lost_doubled_and_late_extensions_change_no_token(mode: Mode, temperature: float) -> None:
    opened = open_message(1, PROMPT, mode=mode, temperature=temperature, max_length=28)
    target = TableModel(num_slots=400, seed=1)
    rng = random.Random(0)
    held: list[SessionMessage] = []

    def mangle(message: SessionMessage) -> list[SessionMessage]:
        assert isinstance(message, Extension)
        held.append(message)
        return [held[rng.randrange(len(held))] for _ in range(rng.choice([0, 1, 1, 2]))]

    tokens, stats = speculate(target, TableModel.like(target, 0.8, num_slots=400), opened, mangle)
    assert tokens == continuation(target, opened, PROMPT, 24)
    assert stats.num_accepted > 0
