"""What metrics say about the last while: specpipe.cluster.load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specpipe.cluster.load import (
    COUNTERS,
    QUEUED,
    ROUNDS,
    STEPS,
    UNDRAFTED,
    Counts,
    Page,
    Reading,
    load_between,
    load_of,
    read_page,
)

COORDINATOR = """
# HELP specpipe_rounds_total rounds
# TYPE specpipe_rounds_total counter
specpipe_rounds_total{mode="pipelined",outcome="hit"} 60.0
specpipe_rounds_total{mode="sync",outcome="hit"} 10.0
specpipe_rounds_total{mode="pipelined",outcome="lookup"} 10.0
specpipe_rounds_total{mode="pipelined",outcome="miss"} 20.0
specpipe_rounds_total{mode="pipelined",outcome="uncounted"} 50.0
# TYPE specpipe_exposed_draft_time_seconds_total counter
specpipe_exposed_draft_time_seconds_total 0.5
# TYPE specpipe_hidden_draft_time_seconds_total counter
specpipe_hidden_draft_time_seconds_total 1.5
# TYPE specpipe_draft_time_seconds_total counter
specpipe_draft_time_seconds_total 1.75
# TYPE specpipe_queue_duration_seconds histogram
specpipe_queue_duration_seconds_bucket{le="+Inf"} 4.0
specpipe_queue_duration_seconds_sum 2.0
specpipe_queue_duration_seconds_count 4.0
# TYPE specpipe_committed_tokens_total counter
specpipe_committed_tokens_total{mode="pipelined",origin="accepted"} 30.0
specpipe_committed_tokens_total{mode="pipelined",origin="bonus"} 10.0
# TYPE specpipe_requests_queued gauge
specpipe_requests_queued 3.0
# TYPE specpipe_requests_undrafted gauge
specpipe_requests_undrafted 1.0
"""
DRAFT_WORKER = """
# TYPE specpipe_step_duration_seconds histogram
specpipe_step_duration_seconds_bucket{kind="draft",le="+Inf"} 9.0
specpipe_step_duration_seconds_sum{kind="draft"} 7.0
specpipe_step_duration_seconds_count{kind="draft"} 9.0
"""
TARGET_WORKER = DRAFT_WORKER.replace("draft", "target")


def test_a_page_is_read_as_docs_define_its_metrics() -> None:
    page = read_page(COORDINATOR)
    assert page.counts == Counts(
        exposed_draft_s=0.5, hidden_draft_s=1.5, hits=70, rounds=100, queue_s=2.0, turns=4, tokens=40
    )
    assert (page.num_queued, page.num_undrafted) == (3, 1)
    assert read_page(DRAFT_WORKER).counts == Counts(draft_step_s=7.0)
    assert read_page(TARGET_WORKER).counts == Counts()


@pytest.mark.parametrize("name", [*COUNTERS, ROUNDS, STEPS, QUEUED, UNDRAFTED])
def test_metrics_that_are_read_are_defined(name: str) -> None:
    defined = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert f"`{name.removesuffix('_sum').removesuffix('_count')}`" in defined


def test_a_load_is_what_all_processes_did_between_two_looks() -> None:
    before = {"c:1": Page(counts=Counts()), "d:1": Page(counts=Counts(draft_step_s=3.0))}
    now = {"c:1": read_page(COORDINATOR), "d:1": read_page(DRAFT_WORKER)}
    load = load_between(before, now, passed_s=4.0, num_drafts=2)
    assert (load.exposed_share, load.hit_rate, load.queue_s) == (0.25, 0.7, 0.5)
    assert (load.draft_busy_share, load.tokens_per_s) == (0.5, 10.0)
    assert (load.num_queued, load.num_undrafted) == (3, 1)


def test_a_target_that_waited_for_longer_than_anybody_drafted_waited_for_all_of_it() -> None:
    """As alerts, dashboards and Kubernetes' autoscaler have it: never more than 1."""
    waited = Page(counts=Counts(exposed_draft_s=2.3, hidden_draft_s=0.0))
    assert load_between({"c:1": Page(counts=Counts())}, {"c:1": waited}, passed_s=4.0, num_drafts=1).exposed_share == 1


def test_what_is_seen_first_counts_from_then_on() -> None:
    load = load_between({}, {"c:1": read_page(COORDINATOR)}, passed_s=4.0, num_drafts=0)
    assert (load.tokens_per_s, load.hit_rate, load.queue_s) == (0.0, None, None)
    assert load.num_queued == 3, "what is now is known at once"


@pytest.mark.parametrize("tokens", [0.0, 5.0])
def test_a_process_that_began_again_counts_from_zero(tokens: float) -> None:
    before, now = Page(counts=Counts(tokens=1000.0)), Page(counts=Counts(tokens=tokens))
    assert load_between({"c:1": before}, {"c:1": now}, passed_s=5.0, num_drafts=1).tokens_per_s == tokens / 5


@pytest.mark.parametrize(
    "text", ["", "# TYPE python_info gauge\npython_info 1\n", f"{QUEUED} NaN\n", f"{QUEUED} +Inf\n"]
)
def test_a_page_that_tells_nothing_is_not_taken_for_one_of_an_idle_process(text: str) -> None:
    with pytest.raises(ValueError, match="there"):
        read_page(text)


COUNTED, COUNTED_ON = Page(counts=Counts(tokens=100.0)), Page(counts=Counts(tokens=300.0), num_queued=2)
DRAFTED, DRAFTED_ON = Page(counts=Counts(draft_step_s=1.0)), Page(counts=Counts(draft_step_s=3.0))
BEFORE = Reading(at_s=10.0, coordinators={"c:1": COUNTED}, drafts={"d:1": DRAFTED})
NOW = Reading(at_s=14.0, coordinators={"c:1": COUNTED_ON}, drafts={"d:1": DRAFTED_ON})


def test_what_all_have_told_twice_is_known() -> None:
    load = load_of(BEFORE, NOW, num_drafts=1)
    assert load is not None
    assert (load.tokens_per_s, load.num_queued, load.draft_busy_share) == (50.0, 2, 0.5)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (Reading(), NOW),  # the first look
        (BEFORE, Reading(at_s=14.0)),  # no coordinator runs
        (Reading(), Reading(at_s=14.0)),
        (BEFORE, replace(NOW, coordinators={"c:1": "refused"})),
        (replace(BEFORE, coordinators={"c:1": "refused"}), NOW),
        (BEFORE, replace(NOW, coordinators={"c:1": COUNTED_ON, "c:2": "refused"})),
        (BEFORE, replace(NOW, coordinators={"c:1": COUNTED_ON, "c:2": COUNTED_ON})),  # one has come
        (replace(BEFORE, coordinators={"c:1": COUNTED, "c:2": COUNTED}), NOW),  # one has gone
        (BEFORE, replace(NOW, coordinators={"c:3": COUNTED_ON})),  # it began again, with another free port
    ],
)
def test_what_some_coordinator_did_not_tell_twice_is_not_known(before: Reading, now: Reading) -> None:
    assert load_of(before, now, num_drafts=1) is None


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (BEFORE, replace(NOW, drafts={"d:1": "refused"})),
        (replace(BEFORE, drafts={"d:1": "refused"}), NOW),
        (BEFORE, replace(NOW, drafts={"d:1": DRAFTED_ON, "d:2": DRAFTED_ON})),  # it has just begun
    ],
)
def test_how_busy_draft_workers_are_is_known_of_all_or_not_at_all(before: Reading, now: Reading) -> None:
    load = load_of(before, now, num_drafts=2)
    assert load is not None
    assert load.draft_busy_share is None
    assert load.tokens_per_s == 50.0, "coordinators have told"


def test_a_draft_worker_that_begins_is_waited_for_once_and_one_that_left_not_at_all() -> None:
    both = replace(NOW, drafts={"d:1": DRAFTED_ON, "d:2": DRAFTED})
    then = replace(both, at_s=18.0, drafts={"d:1": DRAFTED_ON, "d:2": DRAFTED_ON})
    begun = load_of(both, then, num_drafts=2)
    left = load_of(both, replace(then, drafts={"d:2": DRAFTED_ON}), num_drafts=1)
    assert begun is not None
    assert left is not None
    assert (begun.draft_busy_share, left.draft_busy_share) == (0.25, 0.5)
