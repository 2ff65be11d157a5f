"""Autoscalers ask for metrics that the adapter offers, the adapter for series that specpipe has, and nobody for NaN."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from debian_tools import promtool
from manifests import K8S, Object, built, flags, name_of, of_kind, workload
from promql import grouping_labels, selectors
from stack import documented_metrics, read_yaml

OF_THE_SCRAPE = {"job", "instance", "namespace", "node"}
"""Labels that config/prometheus/kubernetes.yaml gives every series of a pod."""


def rules() -> Iterator[tuple[str, Object]]:
    """("Pods" or "External", rule)."""
    config = read_yaml(K8S / "metrics-adapter/config.yaml")
    yield from (("Pods", rule) for rule in config["rules"])
    yield from (("External", rule) for rule in config["externalRules"])


def query_of(rule: Object) -> str:
    """As the adapter would ask."""
    series = rule["seriesQuery"].partition("{")[0]
    text = str(rule["metricsQuery"]).replace("<<.Series>>", series).replace("<<.GroupBy>>", "instance")
    return text.replace("<<.LabelMatchers>>", 'namespace="specpipe"')


def autoscalers() -> list[Object]:
    return of_kind(built("overlays/gpu"), "HorizontalPodAutoscaler")


def test_each_pool_has_one_and_it_names_its_workload() -> None:
    objects = built("overlays/gpu")
    assert sorted(map(name_of, autoscalers())) == ["coordinator", "draft-worker", "target-worker"]
    for each in autoscalers():
        target = each["spec"]["scaleTargetRef"]
        found = workload(objects, target["name"])
        assert (found["apiVersion"], found["kind"]) == (target["apiVersion"], target["kind"])
        assert "replicas" not in found["spec"], "kubectl apply would undo what the autoscaler did"
        assert 2 <= each["spec"]["minReplicas"] < each["spec"]["maxReplicas"]


def test_autoscalers_ask_for_what_the_adapter_offers() -> None:
    offered = {(kind, rule["name"]["as"]) for kind, rule in rules()}
    asked = set()
    for each in autoscalers():
        for metric in each["spec"]["metrics"]:
            if metric["type"] in ("Pods", "External"):
                asked.add((metric["type"], metric[metric["type"].lower()]["metric"]["name"]))
            else:
                container = metric["containerResource"]["container"]
                assert container == each["spec"]["scaleTargetRef"]["name"]
    assert asked == offered


def test_half_of_what_a_coordinator_may_run_is_when_another_starts() -> None:
    from specpipe.config import CoordinatorConfig

    (each,) = (each for each in autoscalers() if name_of(each) == "coordinator")
    (metric,) = (metric["pods"] for metric in each["spec"]["metrics"] if metric["type"] == "Pods")
    assert "--max-sessions" not in flags(workload(built("overlays/gpu"), "coordinator"))
    assert int(metric["target"]["averageValue"]) == CoordinatorConfig(targets=("a:1",)).max_sessions // 2


@pytest.mark.parametrize(("kind", "rule"), [pytest.param(*each, id=each[1]["name"]["as"]) for each in rules()])
def test_queries_name_series_and_labels_that_exist(kind: str, rule: Object) -> None:
    documented = documented_metrics()
    used = list(selectors(query_of(rule)))
    assert used
    for name, labels in used:
        assert name in documented, name
        assert set(labels) <= documented[name].labels | OF_THE_SCRAPE, (name, labels)
    assert grouping_labels(query_of(rule)) <= OF_THE_SCRAPE
    assert rule["seriesQuery"].partition("{")[0] in documented
    assert set(rule["resources"]["overrides"]) == ({"namespace", "instance"} if kind == "Pods" else {"namespace"})


SERIES = {
    "specpipe_requests_running": "4",
    "specpipe_requests_undrafted": "1",
    "specpipe_committed_tokens_total": "0+150x60",
    "specpipe_queue_duration_seconds_sum": "0+6x60",
    "specpipe_queue_duration_seconds_count": "0+3x60",
    "specpipe_exposed_draft_time_seconds_total": "0+1x60",
    "specpipe_hidden_draft_time_seconds_total": "0+3x60",
    'specpipe_rounds_total{outcome="hit"}': "0+6x60",
    'specpipe_rounds_total{outcome="miss"}': "0+2x60",
    'specpipe_rounds_total{outcome="uncounted"}': "0+9x60",
    'specpipe_step_duration_seconds_sum{kind="draft"}': "0+12x60",
}
"""Two samples of 15 s later a rate is a fifteenth of the step; the draft workers are busy for 12 s of 15."""
EXPECTED = {
    "specpipe_requests_running": 4.0,
    "specpipe_undrafted_share": 0.25,
    "specpipe_tokens_per_second": 10.0,
    "specpipe_queue_seconds": 2.0,
    "specpipe_exposed_draft_share": 0.25 * 0.8,
    "specpipe_miss_share": 0.25 * 0.8,
}


def ask(folder: Path, series: dict[str, str], expected: dict[str, float]) -> None:
    """promtool evaluates each query over `series`, 15 minutes in."""
    tests: list[dict[str, Any]] = []
    for kind, rule in rules():
        name = rule["name"]["as"]
        labels = '{instance="a"}' if kind == "Pods" else "{}"
        samples = [{"labels": labels, "value": expected[name]}]
        tests.append({"expr": query_of(rule), "eval_time": "14m", "exp_samples": samples})
    written = [{"series": _labelled(name), "values": values} for name, values in series.items()]
    case = {"interval": "15s", "input_series": written, "promql_expr_test": tests}
    path = folder / "queries.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}))
    assert "SUCCESS" in promtool("test", "rules", str(path))


def _labelled(name: str) -> str:
    bare, _, labels = name.partition("{")
    return f'{bare}{{namespace="specpipe",instance="a"' + (f",{labels}" if labels else "}")


def test_queries_say_what_they_are_called(tmp_path: Path) -> None:
    series = {name: value if "x" in value else f"{value}x60" for name, value in SERIES.items()}
    ask(tmp_path, series, EXPECTED)


def test_without_traffic_every_query_says_0(tmp_path: Path) -> None:
    ask(tmp_path, dict.fromkeys(SERIES, "0x60"), dict.fromkeys(EXPECTED, 0.0))
