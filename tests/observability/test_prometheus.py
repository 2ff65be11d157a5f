"""Debian's Prometheus scrapes a real service, evaluates our rules, and answers what the dashboards ask."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from debian_tools import program
from observed import Observed
from prometheus_server import Prometheus, running_prometheus
from promql import selectors
from stack import PROMETHEUS, Query, dashboard_queries, read_yaml, rule_queries, rules

# What a service that is well and has been asked a few short questions has nothing to say about.
QUIET_WHEN_WELL = {
    "overview: Errors by status (A)",
    "slo: Faults by status (A)",
    "slo: Alerts firing (A)",
}


@pytest.fixture(scope="module")
def prometheus(observed: Observed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Every process was read before and after answers, and every rule was evaluated on what was read."""
    program("prometheus", "prometheus")
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), jobs_of(observed)) as server:
        server.wait_for("first scrape", lambda: len(server.query("up == 1")) == 3)
        observed.ask(8)
        answered_s = time.time()
        server.wait_for("scrape of all that was answered", lambda: server.has_read(3, since_s=answered_s))
        # A rule may build on another, which is evaluated after it.
        for _ in range(2):
            read_s = time.time()
            server.wait_for("evaluation of all rules", functools.partial(server.has_evaluated, since_s=read_s))
        yield server


def jobs_of(observed: Observed) -> list[dict[str, Any]]:
    """Named as on every road: specpipe-ROLE."""
    return [
        {"job_name": f"specpipe-{process['role']}", "static_configs": [{"targets": [process["metrics"]]}]}
        for process in observed.service.processes
    ]


def test_every_process_is_scraped(prometheus: Prometheus) -> None:
    up = {found["metric"]["job"]: found["value"][1] for found in prometheus.query("up")}
    assert up == {"specpipe-coordinator": "1", "specpipe-target-worker": "1", "specpipe-draft-worker": "1"}


@pytest.mark.parametrize("query", dashboard_queries(), ids=lambda query: query.where)
def test_a_panel_is_answered(prometheus: Prometheus, query: Query) -> None:
    numbers = [found["value"][1] for found in prometheus.query(query.expr)]
    has_number = any(number != "NaN" for number in numbers)
    assert has_number or query.where in QUIET_WHEN_WELL, f"nothing to see: {query.expr}"


def test_every_name_in_a_panel_or_rule_was_scraped(prometheus: Prometheus) -> None:
    """Counters that begin to exist with the first event of their kind aside."""
    names = set(prometheus.get("label/__name__/values"))
    asked = {name for query in dashboard_queries() + rule_queries() for name, _ in selectors(query.expr)} - {""}
    missing = {name for name in asked - names if not name.startswith("otelcol_")}
    assert missing <= {"ALERTS", "specpipe_spans_dropped_total", "specpipe_fallbacks_total"}


def test_rules_are_healthy_and_no_alert_fires(prometheus: Prometheus) -> None:
    loaded = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in loaded} == {
        r.get("alert") or r["record"] for r in rules("alert") + rules("record")
    }
    assert [rule["name"] for rule in loaded if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in loaded if rule.get("state") == "firing"] == []


def test_what_was_scraped_agrees_with_what_clients_were_told(observed: Observed, prometheus: Prometheus) -> None:
    """Exactly, as long as nobody asks."""
    finished = prometheus.query('sum(specpipe_requests_total{outcome="finished"})')
    assert float(finished[0]["value"][1]) == len(observed.answers) + 8
    left = prometheus.query('sum(specpipe_requests_total{outcome="cancelled"})')
    assert float(left[0]["value"][1]) == 1


def test_objective_bounds_exist_in_the_histogram(prometheus: Prometheus) -> None:
    """The rules ask for the bucket of one second by its label."""
    bounds = {found["metric"]["le"] for found in prometheus.query("gen_ai_server_time_to_first_token_seconds_bucket")}
    (asked,) = {bound for query in rule_queries() for bound in re.findall(r'le=~"([^"]+)"', query.expr)}
    assert bounds & set(asked.split("|"))


def test_the_log_of_prometheus_has_no_complaint(prometheus: Prometheus) -> None:
    complaints = [
        line for line in Path(prometheus.log).read_text().splitlines() if "level=error" in line or "level=warn" in line
    ]
    assert not complaints


# In a cluster


def test_pods_that_ask_for_it_are_scraped_once_and_named_like_processes_that_push(
    observed: Observed, tmp_path: Path
) -> None:
    """The job of kubernetes.yaml on what Kubernetes would tell of pods: Debian's build leaves out who asks it."""
    (job,) = [
        one for one in read_yaml(PROMETHEUS / "kubernetes.yaml")["scrape_configs"] if one["job_name"] == "specpipe"
    ]
    assert [found["role"] for found in job.pop("kubernetes_sd_configs")] == ["pod"]
    pods = [pod(process["role"], process["metrics"]) for process in observed.service.processes]
    pods += [{**pods[0], "targets": ["a-second-port-of-the-same-pod:1"]}]
    pods += [
        pod("not-asked", "127.0.0.1:1", prometheus_io_scrape="false"),
        pod("ended", "127.0.0.1:1", phase="Succeeded"),
    ]
    with running_prometheus(tmp_path, [{**job, "static_configs": pods}]) as server:
        server.wait_for("scrape of all pods", lambda: len(server.query("up == 1")) == 3)
        labels = [found["metric"] for found in server.query("specpipe_serving")]
        assert len(server.get("targets", state="active")["activeTargets"]) == 3
    assert sorted((each["job"], each["instance"], each["namespace"]) for each in labels) == [
        (f"specpipe-{role}", f"{role}-0", "models") for role in ("coordinator", "draft-worker", "target-worker")
    ]


def pod(component: str, metrics: str, *, phase: str = "Running", prometheus_io_scrape: str = "true") -> dict[str, Any]:
    ip, _, port = metrics.partition(":")
    told = {
        "annotation_prometheus_io_scrape": prometheus_io_scrape,
        "annotation_prometheus_io_port": port,
        "label_app_kubernetes_io_component": component,
        "ip": ip,
        "name": f"{component}-0",
        "node_name": "node",
        "phase": phase,
    }
    labels = {f"__meta_kubernetes_pod_{name}": value for name, value in told.items()}
    return {"targets": [f"{ip}:8080"], "labels": {**labels, "__meta_kubernetes_namespace": "models"}}
