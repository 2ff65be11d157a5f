"""Whether a session that has nothing drafted waits a moment for an extension, and for how long.

Owns: what the target knows of how fast drafts come. Must not know: sessions' tokens, sockets, clocks: times come in as
seconds of one clock. Why it waits at all, and how a wait competes with going on: docs/decisions/0001 and 0011.
"""

from __future__ import annotations

import math
from collections import deque

from specpipe.tree import GraftOutcome
from specpipe.types import Extension, Mode

SYNC_WAIT_MS = 1000.0
SYNC_WAIT_DRAFT_STEPS = 20
MAX_SYNC_WAIT_MS = 10_000.0
_SILENT_AFTER = 4  # commits without any extension
_EXPLORE_EVERY = 16  # misses between two waits that only serve to learn
_FORGET = 0.1


class ExtensionTimes:
    """How long after a round was due that had no draft one was there, waited for or not: the last few times."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=16)  # milliseconds
        self._num_refused = 0

    def observe(self, time_ms: float) -> None:
        self._times.append(time_ms)

    def limit_ms(self, worth_ms: float) -> float:
        """How long to wait at most, if a draft at hand is worth `worth_ms` of waiting. 0: not at all.

        The limit with the largest expected gain over the recorded times: worth - t for each that came after t, minus
        the limit for each that did not come within it.
        """
        if worth_ms <= 0:
            return 0.0
        if len(self._times) < 3:
            return worth_ms
        best, best_gain = 0.0, 0.0
        for limit in sorted(time for time in self._times if time < worth_ms):
            gain = sum(worth_ms - time if time <= limit else -limit for time in self._times)
            if gain > best_gain:
                best, best_gain = limit, gain
        if best > 0.0:
            return min(worth_ms, 1.25 * best)
        self._num_refused += 1
        return worth_ms if self._num_refused % _EXPLORE_EVERY == 0 else 0.0


class Pace:
    """What speculation has been giving lately: tokens per millisecond, and how often the first guess is right."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._ms = 0.0
        self._first_ranked = 0.7
        self._num_rounds = 0

    def observe(self, num_tokens: int, round_ms: float) -> None:
        """A round of the only session, from the end of the step before it."""
        weight = max(_FORGET, 1.0 / (self._num_rounds + 1))
        self._tokens += weight * (num_tokens - self._tokens)
        self._ms += weight * (round_ms - self._ms)
        self._num_rounds += 1

    def observe_guesses(self, num_judged: int, num_first_ranked: int) -> None:
        for i in range(num_judged):
            self._first_ranked += _FORGET / 2 * ((i < num_first_ranked) - self._first_ranked)

    def worth_ms(self, plain_ms: float, num_tokens: float = 1.0) -> float:
        """The longest wait for a draft that beats going on at once, which takes `plain_ms` and gives `num_tokens`.

        With r tokens per millisecond in the long run and acceptance a, going on gives num_tokens - r x plain tokens
        more than its time is worth and leaves the next round without a draft with probability 1 - a, which costs
        r x wait again. So waiting wins while wait < (plain - num_tokens / r) / a.
        """
        if self._num_rounds < 4 or self._tokens <= 0:
            return max(0.0, plain_ms * (1.5 - num_tokens))
        gained_ms = plain_ms - num_tokens * self._ms / self._tokens
        return min(plain_ms, gained_ms / max(self._first_ranked, 0.05))


class DraftWatch:
    """How one session's drafter answers: the state behind one decision to wait."""

    def __init__(self, mode: Mode) -> None:
        self.is_exhausted = False  # nothing more will come below the current base
        self.wait_until: float | None = None
        self._mode = mode
        self._has_waited = False  # for the current base, in vain
        self._is_silent = mode is not Mode.SYNC  # has never said anything, or nothing for long
        self._num_unanswered = 0  # commits since the last extension
        self._draft_step_ms = 0.0
        self._missed_at: float | None = None  # since when a draft that was expected has not come

    def on_miss(self, now: float) -> None:
        """The next round is about to be planned, and there is nothing of the drafter's to verify."""
        self._missed_at = now

    def take_miss_ms(self, came_at: float) -> float | None:
        """How long the last miss lasted until a draft `came_at` that time, commits between them or not; told once."""
        missed_at, self._missed_at = self._missed_at, None
        return None if missed_at is None else max(0.0, came_at - missed_at) * 1e3

    def on_commit(self) -> None:
        self.is_exhausted = False
        self.wait_until = None
        self._has_waited = False
        self._num_unanswered += 1
        if self._mode is not Mode.SYNC and self._num_unanswered >= _SILENT_AFTER:
            self._is_silent = True

    def on_extension(self, extension: Extension, outcome: GraftOutcome) -> None:
        self._num_unanswered = 0
        self._is_silent = False
        if math.isfinite(extension.draft_step_ms) and extension.draft_step_ms > 0:
            self._draft_step_ms = extension.draft_step_ms
        if extension.is_exhausted and outcome is GraftOutcome.GRAFTED:
            self.is_exhausted = True

    def sync_limit_ms(self) -> float:
        """At most a second, or 20 draft steps where these take longer."""
        return min(MAX_SYNC_WAIT_MS, max(SYNC_WAIT_MS, SYNC_WAIT_DRAFT_STEPS * self._draft_step_ms))

    def may_wait(self) -> bool:
        """Whether a wait for the current base may begin or go on."""
        return not (self.is_exhausted or self._has_waited or self._is_silent)

    def begin(self, now: float, limit_ms: float) -> None:
        self.wait_until = now + limit_ms / 1e3

    def end(self, *, has_come: bool) -> None:
        """The wait is over. One in vain is not repeated for this base."""
        self.wait_until = None
        self._has_waited = not has_come
        if not has_come and self._mode is Mode.SYNC:
            self._is_silent = True
