"""The numbers that a process counts, by name and labels: plain Python, so that counting costs next to nothing.

Owns: counters, gauges and histograms, and the set of those that a process has. Must not know: OpenTelemetry, clocks,
what is counted. docs/metrics.md defines each name.

A number is written by one thread; others may read it at any moment. Counters are read in the order in which they were
declared: what may not exceed something else is declared before it, and counted after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from specpipe.errors import InvariantError

Labels = tuple[str, ...]
"""Values, in the order of the description's label names."""
Readings = Mapping[Labels, float]
Read = Callable[[], Readings]

NO_LABELS: Labels = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    name: str  # OpenTelemetry's: dotted
    unit: str  # UCUM: s, By, {token}
    text: str
    labels: tuple[str, ...] = ()  # names


class Counter:
    """Grows. Labels that are known before anything was counted begin at 0."""

    def __init__(self, known: Iterable[Labels] = (NO_LABELS,)) -> None:
        self._values: dict[Labels, float] = dict.fromkeys(known, 0)

    def add(self, amount: float, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0) + amount

    def read(self) -> Readings:
        return self._values.copy()


@dataclass(slots=True)
class Distribution:
    """Of one set of labels."""

    counts: list[int]  # one per bucket: up to and with each bound, and beyond the last
    total: float = 0.0


class Histogram:
    """Counts values by size. `bounds` ascend; a value that equals one is below it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._by_labels: dict[Labels, Distribution] = {}

    def record(self, value: float, *labels: str) -> None:
        found = self._by_labels.get(labels)
        if found is None:
            found = self._by_labels[labels] = Distribution([0] * (len(self.bounds) + 1))
        found.counts[bisect_left(self.bounds, value)] += 1
        found.total += value

    def read(self) -> Mapping[Labels, Distribution]:
        return {
            labels: Distribution(found.counts.copy(), found.total) for labels, found in self._by_labels.copy().items()
        }


@dataclass(frozen=True, slots=True)
class Observed:
    """A counter or a gauge as whoever exports it sees it."""

    description: Description
    read: Read
    is_gauge: bool


class Instruments:
    """All that one process counts. Each name is declared once."""

    def __init__(self) -> None:
        self.observed: list[Observed] = []
        self.histograms: list[tuple[Description, Histogram]] = []

    def counter(self, description: Description, known: Iterable[Labels] = ()) -> Counter:
        """Without labels it begins at 0; with labels, for each of those that are `known`."""
        counter = Counter(known if description.labels else (NO_LABELS,))
        self.observe(description, counter.read)
        return counter

    def histogram(self, description: Description, bounds: Sequence[float]) -> Histogram:
        self._check(description)
        histogram = Histogram(bounds)
        self.histograms.append((description, histogram))
        return histogram

    def observe(self, description: Description, read: Read) -> None:
        """A counter that somebody else keeps. `read` may be called on any thread."""
        self._check(description)
        self.observed.append(Observed(description, read, is_gauge=False))

    def gauge(self, description: Description, read: Read) -> None:
        """`read` may be called on any thread."""
        self._check(description)
        self.observed.append(Observed(description, read, is_gauge=True))

    @property
    def descriptions(self) -> list[Description]:
        return [one.description for one in self.observed] + [description for description, _ in self.histograms]

    def _check(self, description: Description) -> None:
        if any(known.name == description.name for known in self.descriptions):
            raise InvariantError(f"metric {description.name} is declared twice")
