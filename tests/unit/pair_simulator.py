"""A real draft loop and a real target loop side by side in virtual time, joined by a network with a delay.

Each worker has a clock of its own. The one that is furthest behind goes next, so that nothing arrives in its past.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

from report_books import DraftBook
from target_simulator import LINK, Answer, Clock, TimedModel

from draft_worker.worker import DraftLoop
from specpipe.config import DraftWorkerConfig, EngineConfig, TargetWorkerConfig
from specpipe.reports import Report
from specpipe.step_costs import StepCosts
from specpipe.testing import TableModel
from specpipe.types import Close, Closed, Commit, Extension, Open, SessionMessage
from target_worker.worker import TargetLoop

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)


class Worker:
    """A loop with its clock and its mail."""

    def __init__(self, clock: Clock, *, is_checked: bool) -> None:
        self.clock = clock
        self._is_checked = is_checked
        self.wake: float | None = clock.now  # when it wants to run next; None: when mail comes
        self.loop: TargetLoop | DraftLoop
        self._mail: list[tuple[float, int, SessionMessage]] = []
        self._numbers = itertools.count()

    def post(self, at: float, message: SessionMessage) -> None:
        heapq.heappush(self._mail, (at, next(self._numbers), message))

    @property
    def next_run(self) -> float:
        due = max(self.clock.now, self._mail[0][0]) if self._mail else math.inf
        return min(due, math.inf if self.wake is None else self.wake)

    def run(self) -> None:
        self.clock.now = self.next_run
        while self._mail and self._mail[0][0] <= self.clock.now:
            self.loop.receive(LINK, heapq.heappop(self._mail)[2])
        wait_s = self.loop.run_once()
        if self._is_checked:
            self.loop.check()
        self.wake = None if wait_s is None else self.clock.now + wait_s


class PairSimulator:
    """`draft_ms` and `target_ms`: time of a step; `hop_ms`: from a worker through the coordinator to the other.

    `max_nodes` bounds the trees of both; `is_checked` asserts the invariants after every turn, which is half the time.
    """

    def __init__(
        self,
        target: TableModel,
        draft: TableModel,
        *,
        target_ms: float = 10.0,
        draft_ms: float = 2.0,
        hop_ms: float = 0.5,
        flat_rows: int = 16,
        max_nodes: int = 256,
        is_checked: bool = True,
        loses: Callable[[Extension], bool] = lambda extension: False,
    ) -> None:
        self.answers: dict[int, Answer] = {}
        self.draft_books: dict[int, DraftBook] = {}
        self.draft_steps = 0
        self._hop_s = hop_ms / 1e3
        self._loses = loses
        target_clock, draft_clock = Clock(), Clock()
        self.target = Worker(target_clock, is_checked=is_checked)
        self.draft = Worker(draft_clock, is_checked=is_checked)
        self.target_model = TimedModel(target, target_clock, base_ms=target_ms, flat_rows=flat_rows)
        self.draft_model = TimedModel(draft, draft_clock, base_ms=draft_ms, flat_rows=flat_rows)
        engine = EngineConfig(model="table", max_batch_tokens=64)
        costs = StepCosts(64)
        for rows in BUCKETS:
            costs.observe(rows, 0, self.target_model.step_ms(rows))
        target_config = TargetWorkerConfig(engine=engine, max_nodes=max_nodes)
        self.target.loop = TargetLoop(self.target_model, target_config, self._from_target, target_clock, costs)
        draft_config = DraftWorkerConfig(engine=engine, max_nodes=max_nodes)
        draft_costs = StepCosts(64)
        for rows in BUCKETS:
            draft_costs.observe(rows, 0, self.draft_model.step_ms(rows))
        self.draft.loop = DraftLoop(self.draft_model, draft_config, self._from_draft, draft_clock, costs=draft_costs)

    @property
    def seconds(self) -> float:
        return self.target.clock.now - 100.0

    def open(self, opened: Open) -> Answer:
        answer = self.answers[opened.session] = Answer(opened, list(opened.tokens))
        self.draft_books[opened.session] = DraftBook(opened)
        self.target.post(self.target.clock.now, opened)
        if opened.speculation.drafter == "model":
            self.draft.post(self.target.clock.now, opened)
        return answer

    def run(self, *, max_runs: int = 200_000) -> None:
        for _ in range(max_runs):
            worker = min(self.target, self.draft, key=lambda worker: worker.next_run)
            if math.isinf(worker.next_run):
                return
            worker.run()
        raise AssertionError("the workers do not come to an end")

    def _from_target(self, link: int, message: SessionMessage) -> None:
        self.answers[message.session].take(message)
        now = self.target.clock.now
        if isinstance(message, Commit):
            self.draft.post(now + self._hop_s, message)  # one of a session that it does not have says nothing to it
            if message.finish_reason is not None:
                self.target.post(now, Close(session=message.session))
                self.draft.post(now + self._hop_s, Close(session=message.session))

    def _from_draft(self, link: int, message: SessionMessage) -> None:
        self.draft_books[message.session].take(message)
        if isinstance(message, Extension) and not self._loses(message):
            at = self.draft.clock.now + self._hop_s
            self.target.post(at, replace(message, arrived_s=at))
        assert isinstance(message, Extension | Closed | Report), message
