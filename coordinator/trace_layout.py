"""Where what a worker tells lies on the coordinator's clock.

Owns: the origin of a session (when its Open reached the worker) as far as the coordinator can know it, and the order
of a worker's steps. Must not know: spans, messages, what time it is: times are given, in milliseconds.

No clock readings of two hosts are compared. A worker counts from the origin; the coordinator knows what it saw itself:
Open was sent before the origin, what a worker told had happened before it was heard, what a worker knew had been sent
before that. Each of these bounds the origin from one side, and the middle between the bounds is taken. So steps that
depend on one another lie in their true order, whatever the clocks say. See docs/decisions/0012.
"""

from __future__ import annotations


class SessionClock:
    """Lays out the steps of one session on one worker. `since_open_ms` is always the worker's, from the origin."""

    def __init__(self, sent_ms: float) -> None:
        """Open was sent at `sent_ms`."""
        self._earliest_ms = sent_ms
        self._latest_ms: float | None = None
        self._last_step = 0
        self._last_ms = (sent_ms, sent_ms)

    @property
    def origin_ms(self) -> float:
        """The best guess now: more is known with everything that is heard."""
        return self._earliest_ms if self._latest_ms is None else (self._earliest_ms + self._latest_ms) / 2

    def after(self, known_ms: float, since_open_ms: float) -> None:
        """What we did at `known_ms` came before what the worker did then."""
        self._earliest_ms = max(self._earliest_ms, known_ms - since_open_ms)
        if self._latest_ms is not None:
            self._latest_ms = max(self._latest_ms, self._earliest_ms)  # clocks drift: the newest bound is right

    def before(self, known_ms: float, since_open_ms: float) -> None:
        """What we saw at `known_ms` came after what the worker did then."""
        latest_ms = known_ms - since_open_ms
        self._latest_ms = latest_ms if self._latest_ms is None else min(self._latest_ms, latest_ms)
        self._earliest_ms = min(self._earliest_ms, self._latest_ms)

    def at(self, since_open_ms: float) -> float:
        """That moment of the worker on our clock."""
        return self.origin_ms + since_open_ms

    def place(
        self, step: int, since_open_ms: float, forward_ms: float, not_before_ms: float = 0.0
    ) -> tuple[float, float]:
        """Start and end of a step, told in the order in which they ran.

        Steps of a session follow one another however the origin moves, and a step that is told twice (as prefill and
        as a round) lies where it lay.
        """
        if step != self._last_step:
            start_ms = max(self.at(since_open_ms), self._last_ms[1], not_before_ms)
            self._last_step, self._last_ms = step, (start_ms, start_ms + forward_ms)
        return self._last_ms
