"""Prometheus' own tool on our configuration, rules and their unit tests; each alert is explained and shown to work."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml
from debian_tools import promtool
from stack import PROMETHEUS, ROOT, RULES, dashboard_queries, read_yaml, rules

ALERT_TESTS = [Path(__file__).with_name(name) for name in ("alerts_test.yaml", "budgets_test.yaml")]
SEVERITIES = {"page", "ticket", "info"}


def test_alerts_and_recording_rules_are_rules() -> None:
    promtool("check", "rules", *map(str, sorted(RULES.glob("*.yaml"))))


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml"])
def test_prometheus_takes_its_configuration_and_finds_the_rules(name: str, tmp_path: Path) -> None:
    """Debian builds Prometheus without Kubernetes: how pods are found is left out, what follows is checked."""
    shutil.copytree(PROMETHEUS, tmp_path / "prometheus")
    path = tmp_path / "prometheus" / name
    config = read_yaml(path)
    found_in_kubernetes = [job.pop("kubernetes_sd_configs", None) for job in config["scrape_configs"]]
    assert any(found_in_kubernetes) == (name == "kubernetes.yaml")
    path.write_text(yaml.safe_dump(config))
    assert promtool("check", "config", str(path)).count("rules found") == 2


def test_alerts_fire_when_they_should_and_only_then() -> None:
    said = promtool("test", "rules", *map(str, ALERT_TESTS))
    assert "SUCCESS" in said


def test_every_panel_asks_in_promql(tmp_path: Path) -> None:
    """promtool reads rules, so each query is dressed up as one."""
    queries = [{"record": f"panel:{number}", "expr": query.expr} for number, query in enumerate(dashboard_queries())]
    dressed_up = tmp_path / "panels.yaml"
    dressed_up.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": queries}]}))
    promtool("check", "rules", str(dressed_up))


def test_each_alert_is_shown_to_fire_and_to_be_quiet() -> None:
    tests = [test for path in ALERT_TESTS for test in read_yaml(path)["tests"]]
    shown = [case for test in tests for case in test.get("alert_rule_test", [])]
    names = {rule["alert"] for rule in rules("alert")}
    assert {case["alertname"] for case in shown if case["exp_alerts"]} == names
    assert {case["alertname"] for case in shown if not case["exp_alerts"]} == names


def test_each_alert_says_how_bad_it_is_and_is_explained() -> None:
    explained = (ROOT / "docs/observability.md").read_text()
    for rule in rules("alert"):
        assert rule["labels"]["severity"] in SEVERITIES, rule["alert"]
        assert {"summary", "description"} <= set(rule["annotations"]), rule["alert"]
        assert f"`{rule['alert']}`" in explained, f"docs/observability.md does not say what to do about {rule['alert']}"


def test_no_alert_is_explained_that_does_not_exist() -> None:
    explained = set(re.findall(r"`(Specpipe\w+)`", (ROOT / "docs/observability.md").read_text()))
    assert explained == {rule["alert"] for rule in rules("alert")}
