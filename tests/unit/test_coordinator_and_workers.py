"""The real request machine between real loops of both workers, in virtual time, while workers die and others take over.

Whatever dies, the tokens are what the target alone would say, and the statistics say truly what drafts were good for.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from draft_harness import continuation, open_message

from coordinator.detokenizer import AnswerText, Detokenizer, SpacedDecoder
from coordinator.events import (
    Admitted,
    Cause,
    Emit,
    Event,
    Fail,
    Kind,
    Lost,
    Moving,
    Placed,
    Received,
    Seek,
    Send,
    Tick,
    Unplaced,
)
from coordinator.requests import Request
from coordinator.state import RequestMachine
from draft_worker.session import DEFAULT_CHAIN_LENGTH
from draft_worker.worker import DraftLoop
from specpipe.answers import AnswerEvent, Chunk, Finished, SpeculationStats
from specpipe.config import DraftWorkerConfig, EngineConfig, TargetWorkerConfig
from specpipe.model_thread import StepLoop
from specpipe.testing import TableModel
from specpipe.types import Mode, Origin, SessionMessage
from target_worker.worker import TargetLoop

PROMPT = (1, 2, 3, 4)
LENGTH = 60
HOP_S = 0.00001
IDLE_S = 0.002
COST_S = {Kind.TARGET: 0.01, Kind.DRAFT: 0.002}
ENGINE = EngineConfig(model="table")


class Worker:
    """One incarnation of a worker, with a clock of its own that moves while it computes."""

    def __init__(self, kind: Kind, number: int, model: TableModel, now_s: float) -> None:
        self.kind = kind
        self.number = number
        self.now_s = now_s
        self.sent: list[SessionMessage] = []
        self.arriving: list[tuple[float, SessionMessage]] = []
        self._slow_down(model)
        self.loop = self._create(model)

    def turn(self) -> list[SessionMessage]:
        """Receive what has arrived, run once; returns what was sent."""
        due = [message for at_s, message in self.arriving if at_s <= self.now_s]
        self.arriving = [(at_s, message) for at_s, message in self.arriving if at_s > self.now_s]
        for message in due:
            self.loop.receive(1, message)
        if self.loop.run_once() != 0.0:
            self.now_s += IDLE_S
        sent, self.sent = self.sent, []
        return sent

    def _create(self, model: TableModel) -> StepLoop:
        if self.kind is Kind.TARGET:
            return TargetLoop(model, TargetWorkerConfig(engine=ENGINE), self._send, clock=lambda: self.now_s)
        config = DraftWorkerConfig(engine=ENGINE, max_nodes=64)
        return DraftLoop(model, config, self._send, clock=lambda: self.now_s)

    def _send(self, _: int, message: SessionMessage) -> None:
        self.sent.append(message)

    def _slow_down(self, model: TableModel) -> None:
        forward = model.forward

        def slow(batch):
            self.now_s += COST_S[self.kind]
            return forward(batch)

        model.forward = slow  # type: ignore[method-assign]


@dataclass
class Service:
    """A coordinator with one request, at most one worker of each kind, and draft workers that it has left."""

    request: Request
    workers: dict[Kind, Worker] = field(default_factory=dict)
    events: list[AnswerEvent] = field(default_factory=list)
    left: list[Worker] = field(default_factory=list)
    mail: list[tuple[float, int, Kind, SessionMessage]] = field(default_factory=list)  # on its way here
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.target_model = TableModel(num_slots=400, seed=1)
        self.machine = RequestMachine(self.request, AnswerText(Detokenizer(str, SpacedDecoder()), ()))
        self.start(Kind.TARGET)
        self.start(Kind.DRAFT)
        self.do(Admitted())

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Chunk) for token in event.token_ids]

    @property
    def origins(self) -> list[Origin]:
        return [origin for event in self.events if isinstance(event, Chunk) for origin in event.origins]

    def start(self, kind: Kind) -> None:
        model = TableModel(num_slots=400, seed=1)
        if kind is Kind.DRAFT:
            model = TableModel.like(self.target_model, 0.8, num_slots=400)
        self.workers[kind] = Worker(kind, next(self.numbers), model, self.now_s)

    def kill(self, kind: Kind) -> None:
        self.mail = [entry for entry in self.mail if entry[2] is not kind]
        killed = self.workers.pop(kind)
        for placement in (self.machine.target, self.machine.draft, self.machine.latest_draft):
            if placement is not None and placement.worker == killed.number:
                self.do(Lost(kind, placement.session, "it was killed"))

    def move(self, cause: Cause) -> None:
        """Another draft worker joins, and drafting goes there."""
        self.left.append(self.workers[Kind.DRAFT])
        self.start(Kind.DRAFT)
        self.do(Moving(self.workers[Kind.DRAFT].number, next(self.numbers), cause))

    @property
    def all_workers(self) -> list[Worker]:
        return [*self.workers.values(), *self.left]

    def do(self, event: Event) -> None:
        for instruction in self.machine.handle(event, 1000 * self.now_s):
            match instruction:
                case Seek(kind=kind):
                    worker = self.workers.get(kind)
                    placed = None if worker is None else Placed(kind, worker.number, next(self.numbers))
                    self.do(placed or Unplaced(kind))
                case Send(worker=number, message=message):
                    for worker in self.all_workers:
                        if worker.number == number:
                            worker.arriving.append((self.now_s + HOP_S, message))
                case Emit(event=answer):
                    self.events.append(answer)
                case Fail(error=error):
                    raise error
        self.machine.check()

    def run(self, faults: dict[int, Kind | Cause]) -> Finished:
        """To the end of the answer. `faults`: once so many tokens are there, which worker dies and starts again, or
        why drafting moves."""
        faults = dict(faults)
        for _ in range(20_000):
            worker = min(self.all_workers, key=lambda worker: worker.now_s)
            while self.mail and self.mail[0][0] <= worker.now_s:
                self.now_s, _, kind, message = heapq.heappop(self.mail)
                self.do(Received(kind, message))
            if self.events and isinstance(self.events[-1], Finished):
                return self.events[-1]
            self.now_s = worker.now_s
            self.do(Tick())
            due = [num_tokens for num_tokens in faults if num_tokens <= len(self.tokens)]
            for num_tokens in due:
                fault = faults.pop(num_tokens)
                if isinstance(fault, Cause):
                    self.move(fault)
                else:
                    self.kill(fault)
                    self.start(fault)
            if not due:
                for message in worker.turn():
                    heapq.heappush(self.mail, (worker.now_s + HOP_S, next(self.numbers), worker.kind, message))
        raise AssertionError("the answer does not end")


def a_request(mode: Mode, temperature: float) -> Request:
    opened = open_message(1, PROMPT, mode=mode, temperature=temperature, max_length=len(PROMPT) + LENGTH)
    return Request(
        request_id="r",
        model="m",
        prompt=PROMPT,
        sampling=opened.sampling,
        stops=opened.stops,
        speculation=opened.speculation,
        vocab_size=32,
    )


KILLS: list[dict[int, Kind]] = [
    {},
    {20: Kind.DRAFT},
    {20: Kind.TARGET},
    {10: Kind.DRAFT, 20: Kind.TARGET, 30: Kind.DRAFT},
]


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_workers_that_die_change_no_token_and_what_they_drafted_still_counts(
    mode: Mode, temperature: float, kills: dict[int, Kind]
) -> None:
    service = Service(a_request(mode, temperature))
    report = service.run(kills).speculation
    opened = open_message(1, PROMPT, mode=mode, temperature=temperature, max_length=len(PROMPT) + LENGTH)
    assert service.tokens == continuation(service.target_model, opened, PROMPT, LENGTH)
    assert report.accepted_tokens == service.origins.count(Origin.ACCEPTED) > 10
    assert report.hidden_draft_ms + report.exposed_draft_ms == pytest.approx(
        max(report.draft_ms, report.exposed_draft_ms)
    )
    assert report.wasted_draft_ms < report.draft_ms, "some drafts were accepted"
    if mode is Mode.SYNC:  # each chain is verified but one that is under way when a worker dies
        assert report.wasted_draft_ms <= len(kills) * DEFAULT_CHAIN_LENGTH * 1000 * COST_S[Kind.DRAFT] + 1e-6


def num_misses(report: SpeculationStats) -> int:
    return 0 if report.hit_rate is None else round((1 - report.hit_rate) * (report.rounds - 1))


@functools.cache
def undisturbed(mode: Mode) -> Service:
    service = Service(a_request(mode, 1.0))
    service.run({})
    return service


MOVES: list[tuple[dict[int, Kind | Cause], int]] = [  # and how many rounds they cost in sync mode
    ({20: Cause.DRAINS}, 0),
    ({20: Cause.LOAD}, 0),
    ({10: Cause.LEAVES, 20: Cause.LEAVES, 30: Cause.LEAVES, 40: Cause.LEAVES}, 0),
    ({20: Cause.SILENT}, 1),
    ({15: Cause.DRAINS, 35: Cause.SILENT}, 1),
    ({10: Cause.DRAINS, 11: Kind.DRAFT, 30: Kind.TARGET}, 1),
]


@pytest.mark.parametrize(("moves", "num_rounds"), MOVES)
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
def test_drafting_that_moves_changes_no_token_and_costs_a_round_at_most_each_time(
    mode: Mode, moves: dict[int, Kind | Cause], num_rounds: int
) -> None:
    still, moved = undisturbed(mode), Service(a_request(mode, 1.0))
    finished = still.events[-1]
    assert isinstance(finished, Finished)
    report = moved.run(moves).speculation
    opened = open_message(1, PROMPT, temperature=1.0, max_length=len(PROMPT) + LENGTH)
    assert moved.tokens == still.tokens == continuation(still.target_model, opened, PROMPT, LENGTH)
    max_rounds = num_rounds if mode is Mode.SYNC else len(moves)
    assert num_misses(report) <= num_misses(finished.speculation) + max_rounds
    assert report.wasted_draft_ms < report.draft_ms
    assert report.accepted_tokens == moved.origins.count(Origin.ACCEPTED) <= report.verified_tokens
    if Kind.DRAFT not in moves.values():
        assert not any(worker.loop.heartbeat().num_sessions for worker in moved.left), "whom it left holds nothing"
