"""What waits between two threads or two hosts: messages kept by session, merged and bounded.

Owns: the order and the bounds of pending messages (Outbox) and the numbering of batches (Outbox, Inbox).
Must not know: gRPC, protobuf, asyncio, clocks. Nothing here raises because of what a peer said.

An Outbox is used in both directions: what a worker has to say to a stream, and what a stream has to say to the model
thread. What is pending is bounded by the number of sessions:

- commits of a session that touch or overlap become one; none is lost, and a finish reason stays last;
- extensions are hints: a session keeps its newest few, the oldest is dropped and counted;
- Close removes what is pending for its session: the receiver has no use for it;
- reports of a session become one, which keeps its newest records and counts those that it drops;
- a batch holds all that is pending of a session, in the order Open, report, extensions, commits, NeedTokens, Failed,
  Close, Closed; nothing joins a pending Closed.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from specpipe.reports import Report
from specpipe.types import (
    Batch,
    Close,
    Closed,
    Commit,
    Extension,
    Failed,
    Heartbeat,
    NeedTokens,
    Open,
    SessionMessage,
)

_Message = TypeVar("_Message")

MAX_PENDING_EXTENSIONS = 32
"""Extensions kept for one session; each stands alone, so losing the oldest loses nodes and nothing else."""
MAX_PENDING_COMMITS = 32
"""Commits of one session that do not touch one another (a peer left a hole). The receiver asks for what it misses."""
MAX_BATCH_COST = 262_144
"""Token ids and messages of one batch: it takes a few milliseconds to serialize and is far below the message limit."""
RECORD_COST = 32
"""Of one record of a report, in token ids: it has some twenty numbers."""
_BYTES_PER_TOKEN = 4
MAX_MISSING = 4096
"""Sequence numbers an Inbox remembers as missing."""


def union(first: Commit, second: Commit) -> Commit | None:
    """One commit that says what both say, or None if they leave a hole or contradict one another.

    Statistics are summed, so a commit that came twice must be recognised before (see Inbox).
    """
    low, high = (first, second) if first.base <= second.base else (second, first)
    overlap = low.base + len(low.tokens) - high.base
    shared = min(overlap, len(high.tokens))
    start = high.base - low.base
    if overlap < 0 or low.tokens[start : start + shared] != high.tokens[:shared]:
        return None
    ends = {commit.base + len(commit.tokens): commit.finish_reason for commit in (low, high)}
    if any(reason is not None for end, reason in ends.items() if end < max(ends)):
        return None
    newest = max(first, second, key=lambda commit: commit.round) if first.round != second.round else second
    return replace(
        newest,
        base=low.base,
        tokens=low.tokens + high.tokens[shared:],
        origins=low.origins + high.origins[shared:],
        finish_reason=first.finish_reason or second.finish_reason,
        verified_draft_steps=first.verified_draft_steps + second.verified_draft_steps,
        stats=first.stats + second.stats,
    )


@dataclass(slots=True)
class _Pending:
    """All that waits for one session."""

    opens: list[Open] = field(default_factory=list)
    report: Report | None = None
    extensions: deque[Extension] = field(default_factory=deque)
    commits: list[Commit] = field(default_factory=list)
    need_tokens: NeedTokens | None = None
    failed: Failed | None = None
    close: Close | None = None
    closed: Closed | None = None

    def messages(self) -> Iterator[SessionMessage]:
        yield from self.opens
        if self.report is not None:
            yield self.report
        yield from self.extensions
        yield from self.commits
        for message in (self.need_tokens, self.failed, self.close, self.closed):
            if message is not None:
                yield message

    def cost(self) -> int:
        return sum(map(_cost, self.messages()))


def _cost(message: SessionMessage) -> int:
    """In token ids: what else is large counts as so many of them as take its room on the wire."""
    if isinstance(message, Report):
        return 1 + RECORD_COST * (len(message.steps) + len(message.events))
    if isinstance(message, Extension):
        num_proposed = sum(len(proposal.tokens) for proposal in message.proposals)
        return 1 + len(message.tokens) + 2 * num_proposed + getattr(message, "num_bytes", 0) // _BYTES_PER_TOKEN
    return 1 + len(getattr(message, "tokens", ()))


class Outbox:
    """Pending messages for one receiver. `put` and `take` may be called from different threads; neither blocks.

    `put` returns True when the receiver must be woken: it is not, while an earlier wake has not led to a `take` that
    found nothing. So a producer wakes at most once for any number of messages.
    """

    def __init__(self) -> None:
        self.num_dropped_extensions = 0
        self.num_dropped_messages = 0  # commits beyond the bound, duplicates of Open, anything after Close or Closed
        self._lock = threading.Lock()
        self._sessions: dict[int, _Pending] = {}
        self._heartbeat: Heartbeat | None = None
        self._sequence = 0
        self._is_awake = False

    @property
    def num_sessions(self) -> int:
        """Sessions with something pending."""
        return len(self._sessions)

    @property
    def num_dropped(self) -> int:
        """All that was dropped."""
        return self.num_dropped_extensions + self.num_dropped_messages

    def put(self, message: SessionMessage) -> bool:
        with self._lock:
            pending = self._sessions.setdefault(message.session, _Pending())
            if pending.closed is not None or (pending.close is not None and not isinstance(message, Closed)):
                self.num_dropped_messages += 1
            else:
                self._add(pending, message)
            return self._wake()

    def put_heartbeat(self, heartbeat: Heartbeat) -> bool:
        """Only the newest is kept: it goes with the next batch."""
        with self._lock:
            self._heartbeat = heartbeat
            return self._wake()

    def take(self) -> Batch | None:
        """What is pending, at most MAX_BATCH_COST of it unless one session alone has more; None: nothing is."""
        with self._lock:
            if not self._sessions and self._heartbeat is None:
                self._is_awake = False
                return None
            self._sequence += 1
            batch = batch_of(self._take_messages(), sequence=self._sequence, heartbeat=self._heartbeat)
            self._heartbeat = None
            return batch

    def _wake(self) -> bool:
        was_awake, self._is_awake = self._is_awake, True
        return not was_awake

    def _add(self, pending: _Pending, message: SessionMessage) -> None:
        match message:
            case Open():
                self._add_open(pending, message)
            case Extension():
                self._add_extension(pending, message)
            case Commit():
                self._add_commit(pending, message)
            case NeedTokens():
                pending.need_tokens = message
            case Failed():
                pending.failed = pending.failed or message
            case Close():
                self._sessions[message.session] = _Pending(close=message)
            case Closed():
                pending.closed = message
            case Report():
                pending.report = message if pending.report is None else pending.report.merged_with(message)

    def _add_open(self, pending: _Pending, message: Open) -> None:
        if len(pending.opens) < 2:  # the second tells the receiver that there was a duplicate
            pending.opens.append(message)
        else:
            self.num_dropped_messages += 1

    def _add_extension(self, pending: _Pending, message: Extension) -> None:
        pending.extensions.append(message)
        if len(pending.extensions) > MAX_PENDING_EXTENSIONS:
            pending.extensions.popleft()
            self.num_dropped_extensions += 1

    def _add_commit(self, pending: _Pending, message: Commit) -> None:
        merged = union(pending.commits[-1], message) if pending.commits else None
        if merged is not None:
            pending.commits[-1] = merged
            return
        pending.commits.append(message)
        if len(pending.commits) > MAX_PENDING_COMMITS:
            pending.commits.pop(0)
            self.num_dropped_messages += 1

    def _take_messages(self) -> list[SessionMessage]:
        messages: list[SessionMessage] = []
        cost = 0
        while self._sessions:
            session, pending = next(iter(self._sessions.items()))
            cost += pending.cost()
            if messages and cost > MAX_BATCH_COST:
                break
            messages.extend(pending.messages())
            del self._sessions[session]
        return messages


def batch_of(messages: list[SessionMessage], *, sequence: int, heartbeat: Heartbeat | None = None) -> Batch:
    """A batch of these messages; the order within a kind stays."""

    def only(kind: type[_Message]) -> tuple[_Message, ...]:
        return tuple(message for message in messages if isinstance(message, kind))

    return Batch(
        sequence=sequence,
        opens=only(Open),
        reports=only(Report),
        extensions=only(Extension),
        commits=only(Commit),
        need_tokens=only(NeedTokens),
        failures=only(Failed),
        closes=only(Close),
        closed=only(Closed),
        heartbeat=heartbeat,
    )


def messages_of(batch: Batch) -> Iterator[SessionMessage]:
    """The messages of a batch in the order in which they are to be applied; of a session's NeedTokens only the last."""
    yield from batch.opens
    yield from batch.reports
    yield from batch.extensions
    yield from batch.commits
    yield from {need.session: need for need in batch.need_tokens}.values()  # each is answered with a text
    yield from batch.failures
    yield from batch.closes
    yield from batch.closed


class Arrival(enum.Enum):
    IN_ORDER = "in order"
    AFTER_HOLE = "after a hole"
    LATE = "late"
    DUPLICATE = "duplicate"


class Inbox:
    """Watches the numbers of the batches that come in. A batch that came before is to be ignored."""

    def __init__(self) -> None:
        self.last = 0
        self.num_holes = 0
        self.num_duplicates = 0
        self._missing: set[int] = set()

    def arrival(self, sequence: int) -> Arrival:
        if sequence <= self.last:
            if sequence in self._missing:
                self._missing.discard(sequence)
                return Arrival.LATE
            self.num_duplicates += 1
            return Arrival.DUPLICATE
        skipped = range(max(self.last + 1, sequence - MAX_MISSING), sequence)
        self.last = sequence
        if not skipped:
            return Arrival.IN_ORDER
        self.num_holes += 1
        self._missing.update(skipped)
        if len(self._missing) > MAX_MISSING:
            self._missing = {number for number in self._missing if number >= sequence - MAX_MISSING}
        return Arrival.AFTER_HOLE

    def accept(self, batch: Batch) -> bool:
        """True if batches before this one are missing: the receiver asks NeedTokens for all its sessions."""
        return self.arrival(batch.sequence) is Arrival.AFTER_HOLE
