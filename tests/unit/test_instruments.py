"""Plain numbers: what is counted where, and what a reader sees."""

from __future__ import annotations

import pytest

from specpipe.errors import InvariantError
from specpipe.telemetry.instruments import Counter, Description, Histogram, Instruments


def about(name: str = "specpipe.x", *labels: str) -> Description:
    return Description(name=name, unit="1", text="x", labels=labels)


def test_a_counter_adds_by_labels_and_begins_at_zero_where_labels_are_known() -> None:
    counter = Instruments().counter(about("specpipe.x", "mode"), [("off",), ("sync",)])
    counter.add(2, "sync")
    counter.add(0.5, "sync")
    counter.add(1, "new")
    assert counter.read() == {("off",): 0, ("sync",): 2.5, ("new",): 1}


def test_a_counter_without_labels_begins_at_zero() -> None:
    assert Instruments().counter(about()).read() == {(): 0}


def test_what_was_read_does_not_change_any_more() -> None:
    counter, histogram = Counter(), Histogram([1.0])
    before, distributions = counter.read(), histogram.read()
    counter.add(1)
    histogram.record(1.0)
    assert (before, distributions) == ({(): 0}, {})


@pytest.mark.parametrize(
    ("value", "bucket"), [(0.0, 0), (0.999, 0), (1.0, 0), (1.001, 1), (2.0, 1), (2.1, 2), (1e9, 2)]
)
def test_a_bound_belongs_to_the_bucket_below_it(value: float, bucket: int) -> None:
    histogram = Histogram([1.0, 2.0])
    histogram.record(value, "a")
    found = histogram.read()[("a",)]
    assert found.counts == [int(i == bucket) for i in range(3)]
    assert found.total == value


def test_a_name_is_declared_once() -> None:
    instruments = Instruments()
    instruments.counter(about())
    with pytest.raises(InvariantError, match=r"specpipe\.x is declared twice"):
        instruments.gauge(about(), lambda: {(): 1})
