"""The rounds of one request as spans: verify and draft steps put where they belong, draft time hidden and exposed.

Owns: which round a draft step began in, which draft steps a round verified, when a round's span can be written. Must
not know: messages, clocks, who listens. Times are milliseconds of the coordinator's clock (`coordinator.trace_layout`).

A round begins where the one before ended, the first one after its session was opened with its verification or the
first draft step before it; it ends with its verification. So every moment of an answer lies in one round at most. Spans
of steps go out as soon as their round is known, that of a round some rounds later, or at the end. A draft step that is
told even later still finds its parent, and its draft time goes to the next round that is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from coordinator.trace_spans import (
    Attributes,
    SpanMaker,
    WorkerName,
    draft_attributes,
    round_attributes,
    verify_attributes,
)
from specpipe.reports import StepRecord
from specpipe.spans import Span, SpanEvent
from specpipe.types import Extension

MAX_NUMBERS = 2048
"""Numbers of draft steps that are remembered for links."""
MAX_UNTOLD = 512
"""Draft steps of a session that may wait for the extension that tells of them."""
MAX_REMEMBERED_ROUNDS = 64
"""Rounds that were written and may still get draft steps as children."""
MAX_LINKS = 256
"""Draft steps that a verification is linked to, as many as a tree has nodes. Beyond them a worker tells nonsense."""
MAX_EVENTS = 256
"""Events of a round; more are left out."""
NUM_OPEN_ROUNDS = 6
"""Newest rounds that are held back: a draft step may take as long as several of them."""


@dataclass(slots=True)
class _Draft:
    """A draft step that has been told."""

    span_id: int
    record: StepRecord
    worker: WorkerName
    start_ms: float
    end_ms: float
    draft_ms: float = 0.0  # that the request's statistics count, since nodes of it have come
    round: _Round | None = None


@dataclass(slots=True)
class _Round:
    span_id: int
    number: int
    start_ms: float
    end_ms: float
    record: StepRecord | None = None  # None: it was never verified
    draft_ms: float = 0.0
    events: list[SpanEvent] = field(default_factory=list)
    num_cut: int = 0  # of its tokens, those that are not part of the answer
    error: str = ""
    is_written: bool = False

    @property
    def is_cut(self) -> bool:
        """Nothing of it was delivered, so that the request's statistics leave it out."""
        return self.record is not None and self.num_cut > 0 and self.num_cut >= self.record.num_committed

    @property
    def end_base(self) -> int:
        return 0 if self.record is None else self.record.base + self.record.num_committed

    def add_events(self, *events: SpanEvent) -> None:
        """As far as there is room."""
        self.events += events[: MAX_EVENTS - len(self.events)]


class Rounds:
    """Fed with steps in the order in which they were told. `emit` gets every span once."""

    def __init__(self, maker: SpanMaker, emit: Callable[[Span], None], *, has_ranks: bool) -> None:
        self._maker = maker
        self._emit = emit
        self._has_ranks = has_ranks
        self._open: deque[_Round] = deque()
        self._written: deque[_Round] = deque(maxlen=MAX_REMEMBERED_ROUNDS)
        self._untold: dict[int, deque[_Draft]] = {}  # by draft session: of no extension yet
        self._by_number: dict[int, tuple[_Draft, ...]] = {}  # by the request's number: the steps of an extension
        self._waiting: list[_Draft] = []  # for their round
        self._events: list[tuple[float, SpanEvent]] = []  # for theirs
        self._last_end_ms: float | None = None  # of the last round, while its session lives
        self._last_number = 0
        self._carried_ms = 0.0  # draft time of rounds that were written before it was told
        self._draft_ms = self._exposed_ms = self._hidden_ms = 0.0  # of the rounds written so far

    @property
    def num_held(self) -> int:
        """What waits for something that is still to be told."""
        return len(self._open) + len(self._waiting) + len(self._events)

    # Told by workers

    def end_of_drafts(self, numbers: tuple[int, ...]) -> float:
        """When the last of these draft steps, as far as they are known, had ended."""
        return max((draft.end_ms for draft in self._drafts_of(numbers)), default=0.0)

    def add_verify(self, record: StepRecord, number: int, worker: WorkerName, times_ms: tuple[float, float]) -> None:
        """The verification of the request's round `number`."""
        start_ms, end_ms = times_ms
        a_round = self._begin(number, start_ms, end_ms)
        a_round.record = record
        self._note_outcome(a_round, record, start_ms)
        span = self._maker.span(
            "verify",
            start_ms,
            end_ms,
            parent_id=a_round.span_id,
            process=worker.process,
            attributes=verify_attributes(worker.attributes, record, number),
            links=tuple(draft.span_id for draft in self._drafts_of(record.draft_steps)),
        )
        self._emit(span)
        self._emit_ranks(span, record, worker.attributes, start_ms)

    def add_draft(self, session: int, record: StepRecord, worker: WorkerName, times_ms: tuple[float, float]) -> None:
        draft = _Draft(self._maker.new_id(), record, worker, *times_ms)
        self._untold.setdefault(session, deque(maxlen=MAX_UNTOLD)).append(draft)
        a_round = self._round_at(draft.start_ms)
        if a_round is None:
            self._waiting.append(draft)
        else:
            self._put(draft, a_round)

    def add_event(self, event: SpanEvent, at_ms: float) -> None:
        """Something that happened on a worker: it is told with the round in which it did."""
        a_round = self._round_at(at_ms)
        if a_round is None or a_round.is_written:
            self._events.append((at_ms, event))
        else:
            a_round.add_events(event)

    # Told by the request's life

    def count_drafts(self, extension: Extension, number: int) -> None:
        """Nodes of a draft step came for the first time: the statistics know it by this number, and count the time of
        all steps since the last extension as its."""
        drafts = self._take_told(extension)
        rest_ms = extension.draft_share_ms
        for draft in drafts:
            draft_ms = min(draft.record.share_ms, rest_ms)
            rest_ms -= draft_ms
            self._count(draft, draft_ms)
        if drafts:
            self._count(drafts[-1], rest_ms)  # of steps that only computed text
        else:
            self._carried_ms += rest_ms
        self._by_number[number] = drafts
        if len(self._by_number) > MAX_NUMBERS:
            del self._by_number[next(iter(self._by_number))]

    def _take_told(self, extension: Extension) -> tuple[_Draft, ...]:
        """The steps whose time an extension tells, in order: the newest ones, as many as make it up.

        What is older was not told: in sync mode a chain that a commit cut short.
        """
        untold = self._untold.get(extension.session, deque())
        drafts: deque[_Draft] = deque()
        rest_ms = extension.draft_share_ms
        while untold and rest_ms > 1e-6:
            draft = untold.pop()
            rest_ms -= draft.record.share_ms
            drafts.appendleft(draft)
        untold.clear()
        return tuple(drafts)

    def _count(self, draft: _Draft, draft_ms: float) -> None:
        if draft.round is None:
            draft.draft_ms += draft_ms
        else:
            self._add_draft_ms(draft.round, draft_ms)

    def _drafts_of(self, numbers: tuple[int, ...]) -> Iterator[_Draft]:
        """Each once, and no more than a round can have verified nodes of."""
        drafts = chain.from_iterable(self._by_number.get(number, ()) for number in dict.fromkeys(numbers))
        return islice(drafts, MAX_LINKS)

    def settle(self, length: int) -> None:
        """So many tokens are part of the answer. Rounds that can be written are."""
        while len(self._open) > NUM_OPEN_ROUNDS and self._open[0].end_base <= length:
            self._write(self._open.popleft())

    def lose_target(self, now_ms: float, length: int, error: str) -> None:
        """Its session is gone with what it had not committed; the round that ran then is ended."""
        self._cut(length)
        if self._last_end_ms is not None:
            self._begin(self._last_number + 1, now_ms, now_ms).error = error
        self._last_end_ms = None

    def finish(self, length: int, *, over_ms: float, error: str) -> list[SpanEvent]:
        """Write all that is left of an answer that has ended so. Returns the events that belong to no round."""
        self._cut(length)
        if error and self._last_end_ms is not None and self._last_end_ms < over_ms:
            self._begin(self._last_number + 1, over_ms, over_ms).error = error
        for draft in self._waiting:
            self._carried_ms += draft.draft_ms
            self._send(draft, self._maker.identity.span_id)
        self._waiting.clear()
        self._move_draft_time_of_cut_rounds()
        while self._open:
            self._write(self._open.popleft())
        rest = [event for _, event in self._events]
        self._events.clear()
        return rest

    # Rounds

    def _begin(self, number: int, start_ms: float, end_ms: float) -> _Round:
        """The next round, with all that waited for it."""
        if self._last_end_ms is not None:
            start_ms = self._last_end_ms
        a_round = _Round(self._maker.new_id(), number, start_ms, max(start_ms, end_ms))
        self._open.append(a_round)
        self._last_end_ms, self._last_number = a_round.end_ms, number
        own = [draft for draft in self._waiting if draft.start_ms < a_round.end_ms]
        self._waiting = [draft for draft in self._waiting if draft.start_ms >= a_round.end_ms]
        for draft in own:
            self._put(draft, a_round)
        a_round.add_events(*(event for at_ms, event in self._events if at_ms < a_round.end_ms))
        self._events = [(at_ms, event) for at_ms, event in self._events if at_ms >= a_round.end_ms]
        return a_round

    def _cut(self, length: int) -> None:
        for a_round in self._open:
            if a_round.record is not None and a_round.end_base > length:
                a_round.num_cut = min(a_round.record.num_committed, a_round.end_base - length)

    def _move_draft_time_of_cut_rounds(self) -> None:
        """The statistics count it although they leave the rounds out."""
        for a_round in self._open:
            if a_round.is_cut:
                self._carried_ms, a_round.draft_ms = self._carried_ms + a_round.draft_ms, 0.0
        delivered = [a_round for a_round in self._open if not a_round.is_cut]
        if delivered:
            delivered[-1].draft_ms += self._carried_ms
            self._carried_ms = 0.0

    def _note_outcome(self, a_round: _Round, record: StepRecord, at_ms: float) -> None:
        if record.outcome.value != "none":
            a_round.events.append(self._maker.event(record.outcome.value, at_ms))
        for name, count in (("late", record.num_late), ("stale", record.num_stale)):
            if count:
                a_round.events.append(self._maker.event(name, at_ms, num_extensions=count))

    def _write(self, a_round: _Round) -> None:
        a_round.is_written = True
        self._written.append(a_round)
        self._emit(
            self._maker.span(
                "round",
                a_round.start_ms,
                a_round.end_ms,
                span_id=a_round.span_id,
                attributes=self._attributes(a_round),
                events=tuple(sorted(a_round.events, key=lambda event: event.unix_nanos)),
                error=a_round.error,
            )
        )

    def _attributes(self, a_round: _Round) -> Attributes:
        record = a_round.record
        exposed_ms = 0.0 if record is None or a_round.is_cut else record.exposed_ms
        draft_ms, self._carried_ms = a_round.draft_ms + self._carried_ms, 0.0
        self._draft_ms += draft_ms
        self._exposed_ms += exposed_ms
        hidden_ms, self._hidden_ms = self._hidden_ms, max(0.0, self._draft_ms - self._exposed_ms)
        attributes: Attributes = {
            "specpipe.round": a_round.number,
            "specpipe.draft_ms": draft_ms,
            "specpipe.exposed_ms": exposed_ms,
            "specpipe.hidden_ms": self._hidden_ms - hidden_ms,
        }
        if record is not None:
            attributes |= round_attributes(record)
        if a_round.num_cut:
            attributes["specpipe.num_cut"] = a_round.num_cut
        return attributes

    # Draft steps

    def _round_at(self, at_ms: float) -> _Round | None:
        """The first round that ends later; None: it is not known yet."""
        found = None
        for a_round in (*reversed(self._open), *reversed(self._written)):
            if a_round.end_ms <= at_ms:
                break
            found = a_round
        return found

    def _put(self, draft: _Draft, a_round: _Round) -> None:
        draft.round = a_round
        if not a_round.is_written:
            a_round.start_ms = min(a_round.start_ms, draft.start_ms)  # earlier only if it is a session's first
        self._add_draft_ms(a_round, draft.draft_ms)
        self._send(draft, a_round.span_id)

    def _add_draft_ms(self, a_round: _Round, draft_ms: float) -> None:
        if a_round.is_written:
            self._carried_ms += draft_ms
        else:
            a_round.draft_ms += draft_ms

    def _send(self, draft: _Draft, parent_id: int) -> None:
        """Once a draft: when its parent is known."""
        self._emit(
            self._maker.span(
                "draft",
                draft.start_ms,
                draft.end_ms,
                span_id=draft.span_id,
                parent_id=parent_id,
                process=draft.worker.process,
                attributes=draft_attributes(draft.worker.attributes, draft.record),
            )
        )

    def _emit_ranks(self, verify: Span, record: StepRecord, worker: Attributes, start_ms: float) -> None:
        if not self._has_ranks:
            return
        for rank, forward_ms in enumerate(record.rank_ms):
            attributes: Attributes = {**worker, "specpipe.rank": rank, "specpipe.forward_ms": forward_ms}
            self._emit(
                self._maker.span(
                    "rank",
                    start_ms,
                    start_ms + forward_ms,
                    parent_id=verify.span_id,
                    process=verify.process,
                    attributes=attributes,
                )
            )
