"""What Prometheus would see."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Series = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True)
class Scrape:
    """All samples of one page."""

    values: Mapping[Series, float]
    kinds: Mapping[str, str]  # by name of the family

    def sum(self, name: str, **labels: str) -> float:
        """Over all series with this name and these labels, whatever others they have."""
        return sum(value for key, value in self.values.items() if _fits(key, name, labels))

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Summed by the values of one label."""
        found: dict[str, float] = {}
        for key, value in self.values.items():
            if _fits(key, name, labels):
                which = dict(key[1]).get(label, "")
                found[which] = found.get(which, 0) + value
        return found

    def since(self, before: Scrape) -> Scrape:
        """What was added; series that are gone count as never having been."""
        return Scrape({key: value - before.values.get(key, 0) for key, value in self.values.items()}, self.kinds)

    @property
    def counters(self) -> dict[Series, float]:
        """Everything that may only grow."""
        growing = {f"{name}_total" for name, kind in self.kinds.items() if kind == "counter"}
        growing |= {f"{name}{end}" for name, kind in self.kinds.items() if kind == "histogram" for end in _ENDS}
        return {key: value for key, value in self.values.items() if key[0] in growing}


_ENDS = ("_bucket", "_count", "_sum")


def scrape(address: str) -> Scrape:
    """GET http://ADDRESS/metrics."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        return read_page(page.read().decode())


def read_page(text: str) -> Scrape:
    families = list(text_string_to_metric_families(text))
    values = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
    return Scrape(values, {family.name: family.type for family in families})


def _fits(key: Series, name: str, labels: Mapping[str, str]) -> bool:
    return key[0] == name and key[1] >= set(labels.items())
