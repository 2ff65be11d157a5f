"""From milliseconds to places on a line, and how much of each place's time something took.

Must not know: what a place is, a column of characters or of pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from specpipe.timeline.model import WAIT_TONES, Lane, Tone


@dataclass(frozen=True, slots=True)
class Scale:
    start_ms: float
    end_ms: float
    num_columns: int

    def place(self, ms: float) -> float:
        """From 0 to `num_columns`; what lies outside is at the edge."""
        share = (ms - self.start_ms) / max(self.end_ms - self.start_ms, 1e-9)
        return min(max(share, 0.0), 1.0) * self.num_columns

    def column(self, ms: float) -> int:
        return round(self.place(ms))

    def shows(self, start_ms: float, end_ms: float) -> bool:
        return start_ms < self.end_ms and end_ms > self.start_ms

    @property
    def column_ms(self) -> float:
        return max(self.end_ms - self.start_ms, 1e-9) / self.num_columns


def shares_of(lane: Lane, scale: Scale, only: Set[Tone] = frozenset()) -> tuple[list[float], list[Tone]]:
    """Of each column: the share of its time that the lane's bars take (waits only if `only` names them), and the tone
    that prevails."""
    sums: list[dict[Tone, float]] = [{} for _ in range(scale.num_columns)]
    for bar in lane.bars:
        if bar.row == 0 and (bar.tone in only if only else bar.tone not in WAIT_TONES):
            for column, ms in _spread(bar.start_ms, bar.end_ms, scale):
                sums[column][bar.tone] = sums[column].get(bar.tone, 0.0) + ms
    shares = [min(sum(column.values()) / scale.column_ms, 1.0) for column in sums]
    return shares, [max(column, key=column.__getitem__, default=Tone.OTHER) for column in sums]


def _spread(start_ms: float, end_ms: float, scale: Scale) -> Iterator[tuple[int, float]]:
    first = int((start_ms - scale.start_ms) / scale.column_ms)
    last = int((end_ms - scale.start_ms) / scale.column_ms)
    for column in range(max(first, 0), min(last, scale.num_columns - 1) + 1):
        left = scale.start_ms + column * scale.column_ms
        yield column, max(min(end_ms, left + scale.column_ms) - max(start_ms, left), 0.0)
