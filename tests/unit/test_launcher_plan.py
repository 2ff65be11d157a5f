"""Which processes a service is made of, and which core each gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import make_pair

from specpipe.cli.flags import EngineFlags
from specpipe.cli.services import engine_config
from specpipe.config import TelemetryConfig
from specpipe.errors import ConfigError
from specpipe.launcher.plan import ProcessSpec, ServiceConfig, metrics_ports, plan_coordinator, plan_workers
from specpipe.launcher.service import process_names
from specpipe.types import Mode


def cores_of(specs: list[ProcessSpec]) -> list[str | None]:
    return [value_of(spec, "--core") for spec in specs]


def value_of(spec: ProcessSpec, flag: str) -> str | None:
    arguments = spec.arguments
    return arguments[arguments.index(flag) + 1] if flag in arguments else None


def test_targets_come_first_and_get_the_first_cores() -> None:
    config = ServiceConfig(target="t", draft="d", target_workers=2, draft_workers=2)
    specs = plan_workers(config, [0, 1, 2])
    assert [spec.role for spec in specs] == ["target-worker", "target-worker", "draft-worker", "draft-worker"]
    assert [value_of(spec, "--model") for spec in specs] == ["t", "t", "d", "d"]
    assert cores_of(specs) == ["0", "1", "2", None]
    assert process_names(specs) == ["target-worker 1", "target-worker 2", "draft-worker 1", "draft-worker 2"]


@pytest.mark.parametrize(("first", "ports"), [(9464, ["9464", "9465", "9466"]), (0, ["0"] * 3), (None, [None] * 3)])
def test_each_process_has_a_metrics_port_of_its_own(first: int | None, ports: list[str | None]) -> None:
    config = ServiceConfig(target="t", draft="d", host="::1", telemetry=TelemetryConfig(metrics_port=first))
    specs = [plan_coordinator(config, ["a:1"], ["b:2"]), *plan_workers(config, [])]
    assert [value_of(spec, "--metrics-port") for spec in specs] == ports
    expected = [("::1", 9464), ("127.0.0.1", 9465), ("127.0.0.1", 9466)] if first else []
    assert metrics_ports(config) == expected


def test_what_is_traced_is_told_to_the_coordinator_alone() -> None:
    telemetry = TelemetryConfig(otlp_endpoint="h:1", trace_level="debug", trace_sample=0.5, has_content=True)
    config = ServiceConfig(target="t", draft="d", telemetry=telemetry)
    coordinator, *workers = [plan_coordinator(config, ["a:1"], ["b:2"]), *plan_workers(config, [])]
    assert [value_of(spec, "--otlp-endpoint") for spec in (coordinator, *workers)] == ["h:1"] * 3
    assert [value_of(coordinator, flag) for flag in ("--trace-level", "--trace-sample")] == ["debug", "0.5"]
    assert "--trace-content" in coordinator.arguments
    assert not [part for spec in workers for part in spec.arguments if part.startswith("--trace")]


def test_each_rank_has_a_core_of_its_own() -> None:
    config = ServiceConfig(target="t", draft="d", tensor_parallel_size=2)
    specs = plan_workers(config, [4, 5, 6])
    assert cores_of(specs) == ["4", "6"]
    assert [value_of(spec, "--rank-core") for spec in specs] == ["5", None]
    assert value_of(plan_workers(config, [4, 5])[1], "--core") is None


@pytest.mark.parametrize(("is_pinned", "cores"), [(False, [0, 1]), (True, [0])])
def test_nothing_is_pinned_when_asked_so_or_with_one_core(is_pinned: bool, cores: list[int]) -> None:
    config = ServiceConfig(target="t", draft="d", is_pinned=is_pinned)
    assert cores_of(plan_workers(config, cores)) == [None, None]


def test_without_a_prefix_cache_no_worker_has_one() -> None:
    for has_one in (True, False):
        specs = plan_workers(ServiceConfig(target="t", draft="d", has_prefix_cache=has_one), [0, 1])
        assert ["--no-prefix-cache" not in spec.arguments for spec in specs] == [has_one] * 2


@pytest.mark.parametrize("arguments", [{}, {"no_prefix_cache": True}])
def test_a_worker_shares_prefixes_unless_told_not_to(tmp_path: Path, arguments: dict[str, bool]) -> None:
    make_pair(tmp_path)
    config = engine_config(str(tmp_path / "draft"), EngineFlags(**arguments))
    assert config.has_prefix_cache is not bool(arguments)


@pytest.mark.parametrize(
    ("draft", "mode", "drafter"),
    [
        ("d", Mode.OFF, "none"),
        ("ngram", Mode.PIPELINED, "ngram"),
        ("ngram", Mode.OFF, "none"),
        ("none", Mode.SYNC, "none"),
    ],
)
def test_no_draft_worker_starts_where_none_can_draft(draft: str, mode: Mode, drafter: str) -> None:
    config = ServiceConfig(target="t", draft=draft, mode=mode, draft_workers=3)
    assert [spec.role for spec in plan_workers(config, [0, 1])] == ["target-worker"]
    assert value_of(plan_coordinator(config, ["a:1"], []), "--drafter") == drafter


def test_the_coordinator_knows_every_worker_and_the_defaults_of_requests() -> None:
    config = ServiceConfig(target="t", draft="d", mode=Mode.SYNC, num_speculative_tokens=3, port=7, grace_s=2.5)
    spec = plan_coordinator(config, ["a:1", "a:2"], ["b:1"])
    assert spec.arguments.count("--target") == 2
    assert [value_of(spec, f) for f in ("--mode", "--num-speculative-tokens", "--port", "--grace", "--draft")] == [
        "sync", "3", "7", "2.5", "b:1",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["tensor_parallel_size", "draft_workers", "target_workers", "max_sessions"])
def test_counts_are_at_least_one(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ServiceConfig(target="t", **{name: 0})  # type: ignore[arg-type]
