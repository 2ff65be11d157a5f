"""The dashboards: every panel says what it answers, in which unit, of metrics that exist."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from promql import grouping_labels, selectors
from stack import DASHBOARDS, Query, dashboard, dashboard_queries, documented_metrics, panels, rule_queries, rules

# Of Prometheus itself, of each scrape, of OpenTelemetry, of the collector.
FOREIGN = {"up", "ALERTS", "target_info", ""}
LABELS_OF_ALL = {"job", "instance", "le", "__name__"}
LABELS_OF_FOREIGN = {"alertstate", "alertname", "service_version", *LABELS_OF_ALL}

each_dashboard = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)


def test_the_four_dashboards_are_there() -> None:
    assert [path.stem for path in DASHBOARDS] == ["overview", "rounds", "slo", "workers"]


@each_dashboard
def test_a_dashboard_can_be_provisioned_and_found_from_the_others(path: Path) -> None:
    board = dashboard(path)
    assert board["uid"] == f"specpipe-{path.stem}"
    assert board["description"]
    assert board["tags"] == ["specpipe"]
    assert board["links"][0]["tags"] == ["specpipe"]
    assert "id" not in board


@each_dashboard
def test_panels_have_numbers_of_their_own_and_do_not_overlap(path: Path) -> None:
    all_panels = dashboard(path)["panels"]
    assert len({panel["id"] for panel in all_panels}) == len(all_panels)
    for one, other in combinations(all_panels, 2):
        assert not _overlap(one["gridPos"], other["gridPos"]), f"{one['title']} and {other['title']}"
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in all_panels)


@each_dashboard
def test_each_panel_says_what_it_answers_and_in_which_unit(path: Path) -> None:
    for panel in panels(path):
        assert panel["title"]
        assert len(panel["description"]) > 10, panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        if panel["type"] not in ("state-timeline", "heatmap"):
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


@each_dashboard
def test_seconds_are_shown_as_seconds_and_quotients_as_shares(path: Path) -> None:
    """A unit follows from what is asked for, so that none can be wrong by a thousand."""
    for panel in panels(path):
        unit = panel["fieldConfig"]["defaults"].get("unit", "")
        for target in panel["targets"]:
            expr = target["expr"]
            if expr.startswith("histogram_quantile") and "_seconds_bucket" in expr:
                assert unit == "s", panel["title"]
            if "_ratio:rate" in expr and "/ 0.0" not in expr:
                assert unit == "percentunit", panel["title"]


@pytest.mark.parametrize("query", dashboard_queries() + rule_queries(), ids=lambda query: query.where)
def test_a_query_names_documented_metrics_and_their_labels_only(query: Query) -> None:
    documented, recorded = documented_metrics(), {rule["record"] for rule in rules("record")}
    known: set[str] = set()
    for name, labels in selectors(query.expr):
        if name in FOREIGN:
            allowed = LABELS_OF_FOREIGN
        elif name in recorded:
            allowed = {"kind", *LABELS_OF_ALL}
        else:
            assert name in documented, f"{name} is not in docs/metrics.md"
            allowed = {*documented[name].labels, *LABELS_OF_ALL}
        assert set(labels) <= allowed, f"{name} has no label {set(labels) - allowed}"
        known |= allowed
    assert grouping_labels(query.expr) <= known


def test_names_and_labels_are_found_in_expressions() -> None:
    found = list(
        selectors('sum by (a) (rate(x_total{b="{,}", c=~"d|e"}[5m])) / on (f) scalar(y:z:w) > 1e-9 or vector(0)')
    )
    assert found == [("x_total", ["b", "c"]), ("y:z:w", [])]
    assert list(selectors('rate({__name__=~"a|b"}[1m])')) == [("", ["__name__"])]
    assert grouping_labels("sum by (a, b) (x) / on (c) y") == {"a", "b", "c"}


def test_every_documented_metric_of_rounds_and_workers_is_looked_at_somewhere() -> None:
    """What nobody would ever see need not be counted."""
    looked_at = {name for query in dashboard_queries() + rule_queries() for name, _ in selectors(query.expr)}
    stems = {_stem(name) for name in looked_at}
    unseen = {_stem(name) for name in documented_metrics()} - stems
    assert unseen <= {
        "specpipe_prompt_tokens_total",  # the prefix cache of each worker is shown
        "specpipe_completion_tokens_total",  # by finish reason: for bills, not for operators
        "specpipe_draft_time_seconds_total",  # hidden and exposed are shown
        "specpipe_session_moves_total",  # fallbacks by cause are shown
        "specpipe_extension_nodes_total",
        "specpipe_step_tokens",  # rows by type are shown
        "specpipe_prefix_cache_lookups_total",
    }


def test_no_gauge_has_the_unit_one() -> None:
    """The collector's exporter would name it ..._ratio, this process's own page would not."""
    assert not [one.name for one in documented_metrics().values() if one.unit == "1"]


def _stem(name: str) -> str:
    return name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")


def _overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (
        one["x"] < other["x"] + other["w"]
        and other["x"] < one["x"] + one["w"]
        and one["y"] < other["y"] + other["h"]
        and other["y"] < one["y"] + one["h"]
    )
