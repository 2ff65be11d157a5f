"""The real request machine between real loops of both workers, in virtual time; workers die, and drafting moves."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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
from draft_worker.worker import DraftLoop
from specpipe.answers import AnswerEvent, Chunk, Finished
from specpipe.config import DraftWorkerConfig, EngineConfig, TargetWorkerConfig
from specpipe.model_thread import StepLoop
from specpipe.testing import TableModel
from specpipe.types import Origin, SessionMessage
from target_worker.worker import TargetLoop

HOP_S = 0.00001
IDLE_S = 0.002
COST_S = {Kind.TARGET: 0.01, Kind.DRAFT: 0.002}
ENGINE = EngineConfig(model="table")


def create_model(kind: Kind, _: int) -> TableModel:
    target = TableModel(num_slots=400, seed=1)
    return target if kind is Kind.TARGET else TableModel.like(target, 0.8, num_slots=400)


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
    create_model: Callable[[Kind, int], TableModel] = create_model
    """Of a worker of this kind; the number says how many of them have been started before."""
    workers: dict[Kind, Worker] = field(default_factory=dict)
    events: list[AnswerEvent] = field(default_factory=list)
    left: list[Worker] = field(default_factory=list)
    mail: list[tuple[float, int, Kind, SessionMessage]] = field(default_factory=list)  # on its way here
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.target_model = self.create_model(Kind.TARGET, 0)
        self.num_started = Counter[Kind]()
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
        model = self.create_model(kind, self.num_started[kind])
        self.num_started[kind] += 1
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
            due = [num_tokens for num_tokens, fault in faults.items() if self._is_due(num_tokens, fault)]
            for num_tokens in due[:1]:
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

    def _is_due(self, num_tokens: int, fault: Kind | Cause) -> bool:
        may_happen = isinstance(fault, Kind) or self.machine.may_move_draft(fault, 1000 * self.now_s)
        return num_tokens <= len(self.tokens) and may_happen
