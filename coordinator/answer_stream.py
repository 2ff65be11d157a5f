"""One request as the driver holds it: its machine, and what waits for its client.

Owns: the pending events of an answer, and whether its reader moves. Must not know: workers, protobuf.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from coordinator.events import Event, Instruction
from coordinator.metrics import RequestCount
from coordinator.request_trace import RequestTrace
from coordinator.state import RequestMachine
from specpipe.answers import AnswerEvent, Chunk, Finished
from specpipe.errors import SpecpipeError


class AnswerStream:
    """`async for event in stream`: Started, Chunks, Finished. Raises the error that ended the request instead.

    What the client does not take in time waits here, merged into one chunk. `close` tells that the reader is gone; it
    is to be called once at least, and does no harm after the end.
    """

    def __init__(
        self,
        machine: RequestMachine,
        on_close: Callable[[AnswerStream], None],
        trace: RequestTrace | None = None,
        count: RequestCount | None = None,
    ) -> None:
        self.machine = machine
        self.trace = trace  # None: the request is not traced
        self.count = count  # None: nor counted
        self.give_up: Callable[[], object] = lambda: None  # called by the driver when the reader has stalled
        self.over = asyncio.Event()
        """The machine has ended; what is pending may still be taken."""
        self._on_close = on_close
        self._pending: deque[AnswerEvent] = deque()
        self._error: SpecpipeError | None = None
        self._is_over = False
        self._wake = asyncio.Event()
        self._is_asking = False  # the reader waits for us, not we for it
        self._num_taken = 0
        self._num_taken_seen = -1
        self._stalled_since_ms = 0.0

    @property
    def request_id(self) -> str:
        return self.machine.request.request_id

    def put(self, event: AnswerEvent) -> None:
        last = self._pending[-1] if self._pending else None
        if isinstance(event, Chunk) and isinstance(last, Chunk):
            self._pending[-1] = last.merged_with(event)
        else:
            self._pending.append(event)
        self._is_over = isinstance(event, Finished)
        self._wake.set()

    def fail(self, error: SpecpipeError) -> None:
        """The error is raised once everything before it was taken."""
        self._error = error
        self._wake.set()

    def close(self) -> None:
        self._on_close(self)

    def observe(self, event: Event, instructions: Sequence[Instruction], now_ms: float) -> None:
        """What the machine has heard and said, for the trace and the count."""
        if self.trace is not None:
            self.trace.observe(event, instructions, now_ms)
        if self.count is not None:
            self.count.observe(event, instructions, now_ms)

    def session_over(self, session: int, now_ms: float) -> None:
        """Nothing more comes of a session."""
        if self.trace is not None:
            self.trace.session_over(session, now_ms)

    def stalled_ms(self, now_ms: float) -> float:
        """How long the reader has taken nothing although it could. To be asked regularly."""
        if self._is_asking or self._num_taken != self._num_taken_seen:
            self._num_taken_seen = self._num_taken
            self._stalled_since_ms = now_ms
        return now_ms - self._stalled_since_ms

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> AnswerEvent:
        self._is_asking = True
        try:
            while not self._pending:
                if self._error is not None:
                    raise self._error
                if self._is_over:
                    raise StopAsyncIteration
                self._wake.clear()
                await self._wake.wait()
        finally:
            self._is_asking = False
        self._num_taken += 1
        return self._pending.popleft()
