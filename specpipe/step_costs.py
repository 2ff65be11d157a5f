"""What a worker's step costs: a staircase over rows plus a price per attended token, learned while serving.

Owns: `StepCosts`, the estimate that schedulers divide by, and its first measurement. Must not know: sessions or trees.
Pure: durations come in as numbers; `measure` is given the clock.

Each row bucket follows the median of its steps by small steps towards each, relative to a common scale that follows the
machine's pace faster. So a busy hour moves all buckets together, one slow step moves nothing much, and a bucket that is
seldom used keeps its place among the others.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence

from specpipe.engine.interface import SessionRows, StepBatch, StepModel

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_MEASURED = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
_MAX_PASSES = 12
_ENOUGH_S = 0.7  # small models are measured over and over for so long
MAX_MEASURING_S = 3.0  # a worker measures no longer before it serves
_PACE = 0.25  # how fast the common scale follows one step
_STEP = 0.03  # by how much, at most, one step moves its bucket
_MIN_SPREAD = 96  # attended tokens by which two steps must differ to say something about the price of one
_NUM_GAPS = 15


class StepCosts:
    """Estimated milliseconds of a step with so many rows that attend to so many tokens in all."""

    def __init__(self, max_rows: int) -> None:
        self._buckets = [bucket for bucket in BUCKETS if bucket < max_rows] + [max_rows]
        self._known: list[float | None] = [None] * len(self._buckets)  # relative ms of a step without attended tokens
        self._table = [0.0] * len(self._buckets)  # the same with the holes filled, never falling
        self._scale = 1.0
        self._token_ms = 0.0
        self._samples: deque[tuple[int, int, float]] = deque(maxlen=48)  # bucket, attended, ms
        self._num_observed = 0
        self._gaps: deque[float] = deque([0.0], maxlen=_NUM_GAPS)

    @property
    def gap_ms(self) -> float:
        """What lies between two steps: walking, choosing, building."""
        return statistics.median(self._gaps)

    def estimate(self, rows: int, attended: int = 0) -> float:
        """Milliseconds; never falls as rows or attended tokens grow."""
        if rows <= 0:
            return 0.0
        bucket = min(bisect.bisect_left(self._buckets, rows), len(self._buckets) - 1)
        return self._table[bucket] * self._scale + self._token_ms * attended

    def observe(self, rows: int, attended: int, step_ms: float) -> None:
        """A step took `step_ms`."""
        bucket = min(bisect.bisect_left(self._buckets, rows), len(self._buckets) - 1)
        if self._num_observed % 8 == 0:
            self._samples.append((bucket, attended, step_ms))
            self._learn_token_price()
        self._num_observed += 1
        self._learn_bucket(bucket, max(1e-6, step_ms - self._token_ms * attended))
        self._fill_table()

    def observe_gap(self, gap_ms: float) -> None:
        self._gaps.append(gap_ms)

    def _learn_bucket(self, bucket: int, bare_ms: float) -> None:
        known = self._known[bucket]
        if known is None:
            self._known[bucket] = bare_ms / self._scale
            return
        self._scale *= min(2.0, max(0.5, bare_ms / (known * self._scale))) ** _PACE
        ratio = bare_ms / (known * self._scale)
        self._known[bucket] = known * min(1 + _STEP, max(1 / (1 + _STEP), ratio))

    def _learn_token_price(self) -> None:
        """Theil-Sen over pairs of steps of one bucket: the median slope, so that no single slow step matters."""
        slopes = [
            (late[2] - early[2]) / (late[1] - early[1])
            for i, late in enumerate(self._samples)
            for early in list(self._samples)[:i]
            if early[0] == late[0] and abs(late[1] - early[1]) >= _MIN_SPREAD
        ]
        if len(slopes) >= 3:
            self._token_ms = max(0.0, statistics.median(slopes))

    def _fill_table(self) -> None:
        """What is known, made to rise; a straight line between; proportional to rows beyond the last."""
        known: list[tuple[int, float]] = []
        for i, value in enumerate(self._known):
            if value is not None:
                known.append((i, max(value, known[-1][1] if known else 0.0)))
        first, last = known[0], known[-1]
        for i, rows in enumerate(self._buckets):
            if i <= first[0]:
                self._table[i] = first[1]
            elif i >= last[0]:
                self._table[i] = last[1] * rows / self._buckets[last[0]]
            else:
                self._table[i] = self._between(known, i)

    def _between(self, known: Sequence[tuple[int, float]], i: int) -> float:
        right = bisect.bisect_left([index for index, _ in known], i)
        (low, low_ms), (high, high_ms) = known[right - 1], known[right]
        share = (self._buckets[i] - self._buckets[low]) / (self._buckets[high] - self._buckets[low])
        return low_ms + share * (high_ms - low_ms)


def measure(model: StepModel, costs: StepCosts, *, max_rows: int, max_s: float, clock: Callable[[], float]) -> None:
    """Run one session's worth of rows for every bucket, in turn and several times, and observe the fastest of each.

    Two passes at least, unless `max_s` is over; more while they take little time, since a bucket that seems dear is not
    used, and so never measured again. Uses slots 1 .. max_rows, which nobody may hold yet; what they held afterwards
    is scratch.
    """
    start = clock()
    limit = min(max_rows, model.num_slots - 1, model.info.max_context)
    batches = {rows: _scratch_batch(rows) for rows in _MEASURED if rows <= limit}
    fastest: dict[int, float] = {}
    for number in range(_MAX_PASSES):
        for rows, batch in batches.items():
            began = clock()
            model.forward(batch)
            fastest[rows] = min((clock() - began) * 1e3, fastest.get(rows, math.inf))
            if clock() - start > max_s and (number > 0 or rows >= 16):
                break
        if number >= 1 and clock() - start > min(max_s, _ENOUGH_S):
            break
    for rows, step_ms in fastest.items():
        costs.observe(rows, rows * (rows + 1) // 2, step_ms)


def _scratch_batch(rows: int) -> StepBatch:
    """One committed token and a drafted chain below it, or a prompt where a chain would be too long to be drafted."""
    num_tree = rows - 1 if rows <= 64 else 0
    num_committed = rows - num_tree
    session = SessionRows(
        session=0,
        context_slots=list(range(1, num_committed + 1)),
        num_computed=0,
        tokens=[0] * rows,
        num_committed_rows=num_committed,
        tree_slots=list(range(num_committed + 1, rows + 1)),
        tree_rows=list(range(num_tree)),
        tree_positions=list(range(num_committed, rows)) if num_tree else [],
        tree_visible=[(2 << row) - 1 for row in range(num_tree)],
        wants_logits=[True] * rows if num_tree or rows == 1 else [False] * (rows - 1) + [True],
    )
    return StepBatch(sessions=[session])
