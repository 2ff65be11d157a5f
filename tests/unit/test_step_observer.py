"""What the step loops tell their observer adds up to what they did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from draft_harness import Harness, close_message, commit_message, open_message
from target_simulator import Simulator, chain, create_open, self_drafter

from specpipe.telemetry.observer import ExtensionOutcome, IdleCause
from specpipe.testing import TableModel
from specpipe.types import Mode


@dataclass
class Heard:
    """A StepObserver that keeps what it is told."""

    seconds: float = 0.0
    steps: Counter[str] = field(default_factory=Counter)
    causes: list[IdleCause] = field(default_factory=list)
    extensions: list[tuple[ExtensionOutcome, int, float | None]] = field(default_factory=list)
    num_preempted: int = 0
    prefixes: list[tuple[int, int]] = field(default_factory=list)

    def step(self, seconds: float, **counts: int) -> None:
        self.seconds += seconds
        self.steps.update(counts, num_steps=1)

    def idle(self, cause: IdleCause) -> None:
        self.causes.append(cause)

    def extension(self, outcome: ExtensionOutcome, *, num_nodes: int, lag_s: float | None = None) -> None:
        self.extensions.append((outcome, num_nodes, lag_s))

    def preempted(self) -> None:
        self.num_preempted += 1

    def prefix(self, *, num_cached: int, num_computed: int) -> None:
        self.prefixes.append((num_cached, num_computed))


@pytest.fixture
def table() -> TableModel:
    return TableModel(vocab_size=24, num_slots=512, seed=3)


def observed(sim: Simulator) -> Heard:
    heard = Heard()
    sim.loop._observer = heard
    return heard


def test_rows_of_the_target_are_prefill_tokens_nodes_and_last_tokens(table: TableModel) -> None:
    sim = Simulator(table, drafter=self_drafter(table, 4), max_batch_tokens=32)
    heard = observed(sim)
    answer = sim.open(create_open(1, [i % 24 for i in range(70)], max_tokens=20))
    sim.run()
    stats = answer.stats
    assert heard.steps["num_steps"] == stats.num_steps
    assert heard.steps["num_nodes"] == stats.num_verified
    assert heard.steps["num_prefill_rows"] == 70
    assert heard.steps["num_rows"] == 70 + stats.num_verified + stats.num_rounds - 1
    assert heard.seconds == pytest.approx(stats.step_ms / 1e3)
    assert heard.prefixes == [(0, 70)]


def test_what_was_cached_is_told_with_what_was_computed(table: TableModel) -> None:
    sim = Simulator(table)
    heard = observed(sim)
    for session in (1, 2):
        sim.open(create_open(session, [i % 24 for i in range(70)], max_tokens=3, mode=Mode.OFF))
        sim.run()
    assert heard.prefixes == [(0, 70), (69, 1)]


def test_extensions_are_told_by_outcome_and_the_first_after_a_commit_by_its_lag(table: TableModel) -> None:
    sim = Simulator(table, auto_close=False)
    heard = observed(sim)
    answer = sim.open(create_open(1, [1, 2, 3], max_tokens=30))
    sim.loop.run_once()
    sim.clock.now += 0.003
    sim.loop.receive(1, chain(1, 4, [5, 6]))
    sim.loop.receive(1, chain(1, 4, [7]))
    sim.loop.run_once()
    sim.loop.run_once()
    sim.loop.receive(1, chain(1, 3, [*answer.tokens[3:], 9]))
    sim.loop.receive(1, chain(1, 3, [(answer.tokens[3] + 1) % 24]))
    sim.loop.receive(1, chain(1, 99, [1]))
    [first, second, *others] = heard.extensions
    assert first == ("grafted", 2, pytest.approx(0.003))
    assert second == ("grafted", 1, None)
    assert [outcome for outcome, _, _ in others] == ["late", "stale", "stale"]
    assert {lag for _, _, lag in others} == {None}


def test_the_target_says_why_it_runs_nothing(table: TableModel) -> None:
    sim = Simulator(table, drafter=self_drafter(table, 4), delay_ms=lambda: 7.0)
    heard = observed(sim)
    sim.open(create_open(1, max_tokens=12, mode=Mode.SYNC))
    sim.at(1.0, lambda: sim.loop.link_paused(1, True))
    sim.at(50.0, lambda: sim.loop.link_paused(1, False))
    sim.run()
    assert set(heard.causes) == {"extension", "paused", "no sessions"}
    assert heard.causes[-1] == "no sessions"


def test_preemptions_of_the_target_are_told() -> None:
    table = TableModel(vocab_size=24, num_slots=100, seed=3)
    sim = Simulator(table)
    heard = observed(sim)
    for session in (1, 2, 3):
        sim.open(create_open(session, [session], max_tokens=90, mode=Mode.OFF))
    sim.run()
    assert heard.num_preempted == sim.loop._room.num_preempted > 0


def test_a_draft_worker_tells_its_rows_what_it_pushed_and_why_it_rests() -> None:
    harness = Harness(TableModel(vocab_size=24, seed=5, num_slots=400), max_batch_tokens=40)
    heard = Heard()
    harness.loop._observer = heard
    harness.run()
    assert heard.causes == ["no sessions"]
    for session in (1, 2):
        harness.receive(open_message(session, [i % 7 for i in range(100)]))
        harness.run()
    assert heard.causes[-1] == "exhausted"
    assert heard.prefixes == [(0, 100), (99, 1)]
    assert heard.steps["num_prefill_rows"] == 101
    assert heard.steps["num_rows"] == 101 + heard.steps["num_nodes"] == harness.model.num_rows
    pushed = harness.take_extensions()
    assert heard.extensions == [("pushed", len(extension.tokens), None) for extension in pushed]
    harness.loop.link_paused(1, True)
    harness.run()
    assert heard.causes[-1] == "paused"
    for session in (1, 2):
        harness.receive(close_message(session))
    harness.run()
    assert heard.causes[-1] == "no sessions"


def test_preemptions_of_a_draft_worker_are_told_and_it_may_rest_for_want_of_slots() -> None:
    harness = Harness(TableModel(vocab_size=24, seed=13, num_slots=220))
    heard = Heard()
    harness.loop._observer = heard
    harness.receive(open_message(1, [1] * 20))
    harness.run()
    harness.receive(open_message(2, [2] * 20))
    harness.run()
    for base in range(20, 140, 3):
        for session in (1, 2):
            harness.receive(commit_message(session, base, [base % 24] * 3))
        harness.run()
    assert heard.num_preempted > 0
    assert "slots" in heard.causes
