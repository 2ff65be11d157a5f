"""What a service's own metrics say about the last while, as the autoscaler wants to know it.

Owns: which metrics are read (docs/metrics.md), how they are fetched, added up and compared with those of before.
Must not know: what follows from them.
"""

from __future__ import annotations

import asyncio
import logging
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from specpipe.cluster.autoscale import Load

FETCH_TIMEOUT_S: Final = 3.0
MAX_PAGE_BYTES: Final = 4 * 1024 * 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of one process since its start, or of several between two moments. A worker has but `draft_step_s`."""

    exposed_draft_s: float = 0.0
    draft_s: float = 0.0
    hits: float = 0.0  # rounds that began with a drafted node of the session's drafter
    rounds: float = 0.0  # those that count
    queue_s: float = 0.0  # of all requests whose turn has come
    turns: float = 0.0  # those requests
    tokens: float = 0.0  # committed
    draft_step_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What one process says of itself: what has been so far, and what is now."""

    counts: Counts
    num_queued: int = 0
    num_undrafted: int = 0


COUNTERS: Final[Mapping[str, str]] = {
    "specpipe_exposed_draft_time_seconds_total": "exposed_draft_s",
    "specpipe_draft_time_seconds_total": "draft_s",
    "specpipe_queue_duration_seconds_sum": "queue_s",
    "specpipe_queue_duration_seconds_count": "turns",
    "specpipe_committed_tokens_total": "tokens",
}
ROUNDS: Final = "specpipe_rounds_total"
STEPS: Final = "specpipe_step_duration_seconds_sum"
QUEUED: Final = "specpipe_requests_queued"
UNDRAFTED: Final = "specpipe_requests_undrafted"


async def fetch_pages(addresses: Sequence[str]) -> dict[str, Page]:
    """Of the processes whose /metrics are at `addresses`; those that do not answer are left out."""
    pages = await asyncio.gather(*(asyncio.to_thread(_fetch, address) for address in addresses))
    return {address: page for address, page in zip(addresses, pages, strict=True) if page is not None}


def read_page(text: str) -> Page:
    """`text`: in Prometheus's format."""
    from prometheus_client.parser import text_string_to_metric_families

    sums = {field.name: 0.0 for field in fields(Counts)}
    gauges = {QUEUED: 0.0, UNDRAFTED: 0.0}
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        if sample.name in COUNTERS:
            sums[COUNTERS[sample.name]] += sample.value
        elif sample.name == ROUNDS and sample.labels.get("outcome") != "uncounted":
            sums["rounds"] += sample.value
            sums["hits"] += sample.value if sample.labels.get("outcome") == "hit" else 0.0
        elif sample.name == STEPS and sample.labels.get("kind") == "draft":
            sums["draft_step_s"] += sample.value
        elif sample.name in gauges:
            gauges[sample.name] += sample.value
    return Page(counts=Counts(**sums), num_queued=int(gauges[QUEUED]), num_undrafted=int(gauges[UNDRAFTED]))


def load_between(before: Mapping[str, Page], now: Mapping[str, Page], *, passed_s: float, num_drafts: int) -> Load:
    """`before` and `now`: pages of the same processes, by address, `passed_s` apart.

    What is there for the first time counts from the next time on: what it counted so far may be of long ago.
    """
    known = [(before[address].counts, page.counts) for address, page in now.items() if address in before]
    grown = Counts(
        **{f.name: sum(_growth(getattr(a, f.name), getattr(b, f.name)) for a, b in known) for f in fields(Counts)}
    )
    return Load(
        exposed_share=_quotient(grown.exposed_draft_s, grown.draft_s),
        hit_rate=_quotient(grown.hits, grown.rounds),
        draft_busy_share=min(1.0, grown.draft_step_s / (passed_s * num_drafts)) if num_drafts else 0.0,
        num_undrafted=sum(page.num_undrafted for page in now.values()),
        queue_s=_quotient(grown.queue_s, grown.turns),
        num_queued=sum(page.num_queued for page in now.values()),
        tokens_per_s=grown.tokens / passed_s,
    )


def _growth(before: float, now: float) -> float:
    """Of a counter, which begins at 0 again when its process does."""
    return now - before if now >= before else now


def _quotient(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _fetch(address: str) -> Page | None:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=FETCH_TIMEOUT_S) as answer:
            return read_page(answer.read(MAX_PAGE_BYTES).decode())
    except (OSError, ValueError) as error:
        logger.warning("the metrics at %s cannot be read: %s", address, error)
        return None
