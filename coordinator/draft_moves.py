"""Which requests' drafting goes to another worker while their answers stream.

Owns: when that is asked, and which of a worker's sessions moves for balance. Must not know: links, messages, why one
worker is better than another (`coordinator.pools`, `coordinator.placing`), how a session moves (`coordinator.state`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from coordinator.answer_stream import AnswerStream
from coordinator.events import Cause
from coordinator.pools import Connection, Pool

Move = tuple[AnswerStream, Connection, Cause]
"""Whose drafting moves, where to, and why."""


class DraftMoves:
    """Of the sessions in the pool of draft workers. Times are given, in milliseconds."""

    def __init__(
        self, pool: Pool, place: Callable[[AnswerStream], Connection | None], *, level_every_ms: float
    ) -> None:
        """`place` chooses a worker for a session of this request."""
        self._pool = pool
        self._place = place
        self._level_every_ms = level_every_ms
        self._level_at_ms = 0.0
        self._newest = 0

    def has_joined(self) -> bool:
        """A worker was connected since this was asked last."""
        before, self._newest = self._newest, max((connection.number for connection in self._pool), default=self._newest)
        return self._newest > before

    def due(self, streams: Sequence[AnswerStream], now_ms: float) -> Iterator[Move]:
        """Each move is to be made before the next one is asked for."""
        yield from self._leaving(streams, now_ms)
        if len(self._pool) > 1 and now_ms >= self._level_at_ms:
            self._level_at_ms = now_ms + self._level_every_ms
            yield from self._level(streams, now_ms)

    def _leaving(self, streams: Sequence[AnswerStream], now_ms: float) -> Iterator[Move]:
        """All whose draft worker is to be left, while there is another one that has room."""
        causes = {connection.number: connection.cause_to_leave for connection in self._pool}
        if not any(causes.values()):
            return
        for stream in streams:
            draft = stream.machine.draft
            cause = None if draft is None else causes.get(draft.worker)
            if cause is not None and stream.machine.may_move_draft(cause, now_ms):
                taker = self._place(stream) if self._pool.can_place(now_ms) else None
                if taker is not None:
                    yield stream, taker, cause

    def _level(self, streams: Sequence[AnswerStream], now_ms: float) -> Iterator[Move]:
        """One at most, for balance."""
        drafts = [stream.machine.latest_draft for stream in streams]
        pair = self._pool.level(now_ms, Counter(draft.worker for draft in drafts if draft is not None))
        if pair is None:
            return
        giver, taker = pair
        given = [stream for stream, on in zip(streams, drafts, strict=True) if on and on.worker == giver.number]
        stream = _cheapest(given, now_ms)
        if stream is not None and len(stream.machine.tokens) <= taker.candidate.num_free_slots:
            yield stream, taker, Cause.LOAD


def _cheapest(streams: Sequence[AnswerStream], now_ms: float) -> AnswerStream | None:
    """Of those that may move, the one with the shortest text: it is computed anew."""
    may_move = [stream for stream in streams if stream.machine.may_move_draft(Cause.LOAD, now_ms)]
    return min(may_move, key=lambda stream: len(stream.machine.tokens), default=None)
