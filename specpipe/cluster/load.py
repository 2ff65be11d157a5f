"""What a service's own metrics say about the last while, as the autoscaler wants to know it.

Owns: which metrics are read (docs/metrics.md), how they are fetched, added up and compared with those of before, and
when they are too few to tell anything. Must not know: what follows from them.
"""

from __future__ import annotations

import asyncio
import http.client
import math
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final

from specpipe.cluster.autoscale import Load
from specpipe.cluster.keeper import one_line

FETCH_TIMEOUT_S: Final = 3.0  # without a byte
PAGE_TIMEOUT_S: Final = 10.0  # for all of a page
MAX_PAGE_BYTES: Final = 4 * 1024 * 1024
PREFIX: Final = "specpipe_"  # of our metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of one process since its start, or of several between two moments. A worker has but `draft_step_s`."""

    exposed_draft_s: float = 0.0
    hidden_draft_s: float = 0.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What all the processes that ran at one moment have said, by address; a text is why one could not be read."""

    at_s: float = -math.inf  # of the caller's clock
    coordinators: Mapping[str, Page | str] = field(default_factory=dict)
    drafts: Mapping[str, Page | str] = field(default_factory=dict)

    @property
    def unread(self) -> dict[str, str]:
        """Why, by address."""
        everything = {**self.coordinators, **self.drafts}
        return {address: page for address, page in everything.items() if isinstance(page, str)}


COUNTERS: Final[Mapping[str, str]] = {
    "specpipe_exposed_draft_time_seconds_total": "exposed_draft_s",
    "specpipe_hidden_draft_time_seconds_total": "hidden_draft_s",
    "specpipe_queue_duration_seconds_sum": "queue_s",
    "specpipe_queue_duration_seconds_count": "turns",
    "specpipe_committed_tokens_total": "tokens",
}
ROUNDS: Final = "specpipe_rounds_total"
STEPS: Final = "specpipe_step_duration_seconds_sum"
QUEUED: Final = "specpipe_requests_queued"
UNDRAFTED: Final = "specpipe_requests_undrafted"


async def fetch_pages(addresses: Sequence[str]) -> dict[str, Page | str]:
    """Of the processes whose /metrics are at `addresses`; in place of one that cannot be read, a text that says why."""
    return dict(zip(addresses, await asyncio.gather(*map(_page_at, addresses)), strict=True))


def read_page(text: str) -> Page:
    """`text`: in Prometheus's format. Raises ValueError if it is not, or is not one of ours."""
    from prometheus_client.parser import text_string_to_metric_families

    sums = {f.name: 0.0 for f in fields(Counts)}
    gauges = {QUEUED: 0.0, UNDRAFTED: 0.0}
    is_ours = False
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        is_ours |= sample.name.startswith(PREFIX)
        if sample.name in COUNTERS:
            sums[COUNTERS[sample.name]] += sample.value
        elif sample.name == ROUNDS and sample.labels.get("outcome") != "uncounted":
            sums["rounds"] += sample.value
            sums["hits"] += sample.value if sample.labels.get("outcome") == "hit" else 0.0
        elif sample.name == STEPS and sample.labels.get("kind") == "draft":
            sums["draft_step_s"] += sample.value
        elif sample.name in gauges:
            gauges[sample.name] += sample.value
    if not is_ours:
        raise ValueError("no metric there is specpipe's")
    if not all(map(math.isfinite, (*sums.values(), *gauges.values()))):
        raise ValueError("a number there is none")
    return Page(counts=Counts(**sums), num_queued=int(gauges[QUEUED]), num_undrafted=int(gauges[UNDRAFTED]))


def load_of(before: Reading, now: Reading, *, num_drafts: int) -> Load | None:
    """What happened between two readings. None, that is not known, unless the same coordinators told both times, all
    that ran and one at least; how busy draft workers were, unless each that runs told both times.

    So what has begun in between, or has begun again elsewhere, is waited for until the next reading.
    """
    told_before, told = _pages(before.coordinators), _pages(now.coordinators)
    if not told or not before.coordinators.keys() == told_before.keys() == told.keys() == now.coordinators.keys():
        return None
    drafts_before, drafts = _pages(before.drafts), _pages(now.drafts)
    passed_s = now.at_s - before.at_s
    load = load_between(told_before | drafts_before, told | drafts, passed_s=passed_s, num_drafts=num_drafts)
    have_told = now.drafts.keys() <= drafts_before.keys() & drafts.keys()
    return load if have_told else replace(load, draft_busy_share=None)


def load_between(before: Mapping[str, Page], now: Mapping[str, Page], *, passed_s: float, num_drafts: int) -> Load:
    """`before` and `now`: pages of the same processes, by address, `passed_s` apart.

    What is there for the first time counts from the next time on: what it counted so far may be of long ago.
    """
    known = [(before[address].counts, page.counts) for address, page in now.items() if address in before]
    grown = Counts(
        **{f.name: sum(_growth(getattr(a, f.name), getattr(b, f.name)) for a, b in known) for f in fields(Counts)}
    )
    return Load(
        exposed_share=_quotient(grown.exposed_draft_s, grown.exposed_draft_s + grown.hidden_draft_s),
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


def _pages(told: Mapping[str, Page | str]) -> dict[str, Page]:
    """Those that could be read."""
    return {address: page for address, page in told.items() if isinstance(page, Page)}


async def _page_at(address: str) -> Page | str:
    try:
        async with asyncio.timeout(PAGE_TIMEOUT_S):
            return await asyncio.to_thread(_fetch, address)
    except (OSError, http.client.HTTPException, ValueError) as error:  # TimeoutError is an OSError
        return one_line(error)


def _fetch(address: str) -> Page:
    # Without proxies: their variables are for the web, not for calls between our processes (see `specpipe.server`).
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}/metrics", timeout=FETCH_TIMEOUT_S) as answer:
            page = answer.read(MAX_PAGE_BYTES + 1)
            missing = answer.length  # what the answer has said that there is more; `read` says nothing of its own
    except urllib.error.HTTPError as error:
        error.close()  # it is an answer too, with a connection
        raise
    if len(page) > MAX_PAGE_BYTES:
        raise ValueError(f"it has more than {MAX_PAGE_BYTES} bytes")
    if missing:
        raise http.client.IncompleteRead(page, missing)
    return read_page(page.decode())
