"""What k8s/observability and docker-compose.yaml hold, read for the tests; nothing is started here."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
STACK = ROOT / "k8s/observability"
PROMETHEUS = STACK / "config/prometheus"
RULES = PROMETHEUS / "rules"
DASHBOARDS = sorted((STACK / "config/grafana/dashboards").glob("*.json"))
COMPOSE = ROOT / "docker-compose.yaml"

# What Grafana puts in for its variables, roughly.
GRAFANA = {"$__rate_interval": "5m", "$__range": "1h", "$kind": ".*", "$instance": ".*"}


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def dashboard(path: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(path.read_text())
    return parsed


def panels(path: Path) -> list[dict[str, Any]]:
    """Those that show something: without the rows."""
    return [panel for panel in dashboard(path)["panels"] if panel["type"] != "row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One expression, and where it stands."""

    where: str
    expr: str


def dashboard_queries() -> list[Query]:
    """Of all panels, with Grafana's variables filled in."""
    return [
        Query(where=f"{path.stem}: {panel['title']} ({target['refId']})", expr=fill_in(target["expr"]))
        for path in DASHBOARDS
        for panel in panels(path)
        for target in panel["targets"]
    ]


def rules(kind: str) -> list[dict[str, Any]]:
    """`kind`: alert or record."""
    groups = [group for path in sorted(RULES.glob("*.yaml")) for group in read_yaml(path)["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def rule_queries() -> list[Query]:
    return [Query(where=rule[kind], expr=rule["expr"]) for kind in ("alert", "record") for rule in rules(kind)]


def fill_in(expr: str) -> str:
    for name, value in GRAFANA.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, f"a variable that Grafana would not know, or the tests do not: {expr}"
    return expr


# What docs/metrics.md tells

_CODE = re.compile(r"`([^`]+)`")
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Documented:
    """One series name of docs/metrics.md."""

    name: str
    unit: str
    kind: str
    labels: frozenset[str]
    text: str


def documented_metrics() -> dict[str, Documented]:
    """By the name that a query uses: a histogram has three."""
    found: dict[str, Documented] = {}
    gen_ai: frozenset[str] = frozenset()
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("| `") else []
        if line.startswith("Those of OpenTelemetry's conventions for generative AI have the labels"):
            gen_ai = frozenset({*_CODE.findall(line), "gen_ai_request_model", "gen_ai_response_model"})
        if len(cells) != 6 or not _CODE.fullmatch(cells[1]):
            continue
        labels = frozenset(_CODE.findall(cells[4])) | (gen_ai if "those above" in cells[4] else frozenset())
        name, kind = cells[1].strip("`"), cells[3]
        for suffix in _SUFFIXES.get(kind, ("",)):
            series = name + suffix
            found[series] = Documented(name=series, unit=cells[2], kind=kind, labels=labels, text=cells[5])
    return found
