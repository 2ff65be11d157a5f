"""Where an axis of time has its ticks, and what stands at them."""

from __future__ import annotations

import math
from collections.abc import Iterator


def ticks(start_ms: float, end_ms: float, max_ticks: int) -> Iterator[tuple[float, str]]:
    """Round numbers of milliseconds, or seconds on a long way: (when, what is written there). At most `max_ticks`."""
    length = end_ms - start_ms
    if length <= 0 or max_ticks < 1:
        return
    step = _round_step(length / max_ticks)
    for index in range(math.ceil(start_ms / step), math.floor(end_ms / step) + 1):
        yield index * step, _written(index * step, step)


def _round_step(least_ms: float) -> float:
    """The first of 1, 2, 5, 10, 20, 50 ... that is no smaller."""
    power = 10.0 ** math.floor(math.log10(least_ms))
    return next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= least_ms * (1 - 1e-9))


def _written(ms: float, step_ms: float) -> str:
    if step_ms >= 1000:
        return f"{ms / 1000:g} s"
    digits = max(0, -math.floor(math.log10(step_ms)))
    return f"{ms:.{digits}f} ms"
