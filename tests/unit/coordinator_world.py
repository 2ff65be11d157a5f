"""A request whose workers and client are what a test says: events in, and everything that anybody heard."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from coordinator.detokenizer import AnswerText, Detokenizer, SpacedDecoder
from coordinator.events import (
    Admitted,
    Cause,
    Emit,
    Event,
    Fail,
    Instruction,
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
from specpipe.answers import AnswerEvent, Chunk, Finished
from specpipe.errors import (
    SpecpipeError,
)
from specpipe.types import (
    Close,
    Commit,
    Extension,
    Open,
    Origin,
    RoundStats,
    SamplingParams,
    SpeculationParams,
    StopRules,
)

PROMPT = (7, 8, 9)
EOS = 99


def plain_run(num_tokens: int) -> list[int]:
    return [10 + i for i in range(num_tokens)]


def a_request(num_tokens: int = 12, **changes: Any) -> Request:
    values: dict[str, Any] = {
        "request_id": "r",
        "model": "m",
        "prompt": PROMPT,
        "sampling": SamplingParams(seed=3),
        "stops": StopRules(eos_token_ids=(EOS,), max_length=len(PROMPT) + num_tokens),
        "speculation": SpeculationParams(drafter="model"),
    }
    return Request(**values | changes)


def a_machine(request: Request | None = None, stops: tuple[str, ...] = (), **settings: Any) -> RequestMachine:
    answer = AnswerText(Detokenizer(str, SpacedDecoder()), stops)
    return RequestMachine(request or a_request(), answer, **settings)


def a_commit(
    base: int, tokens: list[int], *, session: int, round_: int = 1, finish: Any = None, **stats: Any
) -> Commit:
    origins = (*(Origin.ACCEPTED,) * (len(tokens) - 1), Origin.BONUS)
    num = len(tokens)
    sums = RoundStats(num_rounds=1, num_drafted=num, num_verified=num, num_accepted=num - 1, num_judged=num)
    return Commit(
        session=session,
        round=round_,
        base=base,
        tokens=tuple(tokens),
        origins=origins,
        finish_reason=finish,
        stats=sums,
    )


@dataclass
class World:
    """Carries out what a machine says, and keeps what everybody heard."""

    machine: RequestMachine
    has: dict[Kind, bool] = field(default_factory=lambda: {Kind.TARGET: True, Kind.DRAFT: True})
    is_full: bool = False  # why there is no target worker
    now_ms: float = 0.0
    sessions: dict[int, Kind] = field(default_factory=dict)  # open on some worker
    known: dict[int, list[int]] = field(default_factory=dict)  # tokens that a session's worker was told
    sent: list[Any] = field(default_factory=list)
    client: list[AnswerEvent] = field(default_factory=list)
    error: SpecpipeError | None = None
    num_sessions: int = 0

    def do(self, event: Event) -> None:
        for instruction in self.machine.handle(event, self.now_ms):
            self._carry_out(instruction)
        self.machine.check()

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Seek(kind=kind):
                if not self.has[kind]:
                    self.do(Unplaced(kind, self.is_full and kind is Kind.TARGET))
                    return
                self.num_sessions += 1
                self.sessions[self.num_sessions] = kind
                self.do(Placed(kind, 1, self.num_sessions))
            case Send(message=message):
                self.sent.append(message)
                self._deliver(message)
            case Emit(event=event):
                assert self.error is None
                assert not any(isinstance(e, Finished) for e in self.client), "nothing follows Finished"
                self.client.append(event)
            case Fail(error=error):
                assert self.error is None
                assert not any(isinstance(e, Finished) for e in self.client)
                self.error = error

    def _deliver(self, message: Any) -> None:
        assert message.session in self.sessions, f"{message} for a session that is closed or was never opened"
        match message:
            case Open(tokens=tokens, session=session):
                assert session not in self.known, "a session is opened once"
                self.known[session] = list(tokens)
            case Close(session=session):
                del self.sessions[session]
            case Commit(session=session, base=base, tokens=tokens):
                held = self.known[session]
                assert base <= len(held), "a worker must not be left with a hole"
                assert held[base:] == list(tokens[: len(held) - base])
                held += tokens[len(held) - base :]

    def session(self, kind: Kind) -> int | None:
        return next((session for session, of in self.sessions.items() if of is kind), None)

    @property
    def successor(self) -> int | None:
        """The draft session that was opened beside the first."""
        drafts = [session for session, of in self.sessions.items() if of is Kind.DRAFT]
        return drafts[1] if len(drafts) > 1 else None

    def move(self, cause: Cause = Cause.DRAINS) -> None:
        """What the driver does where it finds another draft worker."""
        if self.machine.may_move_draft(cause, self.now_ms):
            self.num_sessions += 1
            self.sessions[self.num_sessions] = Kind.DRAFT
            self.do(Moving(2, self.num_sessions, cause))

    def extend(self, session: int, tokens: tuple[int, ...] = (10,), **values: Any) -> None:
        """A draft worker says something at all that it was told."""
        parents = tuple(range(len(tokens)))
        extension = Extension(
            session=session,
            base=len(self.known[session]),
            parents=parents,
            tokens=tokens,
            confidences=(0.5,) * len(tokens),
            is_exhausted=not tokens,
            **values,
        )
        self.hear(Kind.DRAFT, extension)

    def hear(self, kind: Kind, message: Any) -> None:
        self.do(Received(kind, message))

    def lose(self, kind: Kind, stalled_ms: float = 0.0, *, was_draining: bool = False) -> None:
        session = self.session(kind)
        if session is not None:
            self.lose_session(session, stalled_ms, was_draining=was_draining)

    def lose_session(self, session: int, stalled_ms: float = 0.0, *, was_draining: bool = False) -> None:
        self.do(Lost(self.sessions.pop(session), session, "it died", stalled_ms, was_draining))

    def tick(self, ms: float = 300.0, *, unready_ms: float | None = None) -> None:
        self.now_ms += ms
        self.do(Tick(unready_ms))

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.client if isinstance(event, Chunk) for token in event.token_ids]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.client if isinstance(event, Chunk))

    @property
    def finished(self) -> Finished:
        last = self.client[-1]
        assert isinstance(last, Finished)
        return last

    def all(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def started(request: Request | None = None, **options: Any) -> World:
    has = options.pop("has", None)
    world = World(a_machine(request, **options))
    if has is not None:
        world.has = has
    world.do(Admitted())
    return world
