"""Pods of the service on KubeRay: when they are ready, how they end, how many may go, where their metrics are read.

What KubeRay itself puts into pods is not in the manifests; what of it matters here is said where it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
import yaml
from manifests import K8S, Object, built, flags, name_of, of_kind, selects, workload

from specpipe.cluster.config import ClusterConfig
from specpipe.cluster.leaving import RAY_PATIENCE_S
from specpipe.cluster.plan import plan_group
from specpipe.cluster.reading import fill_cluster
from specpipe.launcher.plan import COORDINATOR, DRAFT_WORKER, TARGET_WORKER

OVERLAYS = ("overlays/kuberay", "overlays/kuberay-service")
RAY_DRAIN_S = 30.0  # `ray start` waits so long for what runs, once it is told to end
RAYLET = "http://localhost:52365/api/local_raylet_healthz"  # where KubeRay has every raylet say whether it is well

each_overlay = pytest.mark.parametrize("name", OVERLAYS)


def one(name: str, kind: str) -> Object:
    (found,) = of_kind(built(name), kind)
    return found


def config_of(name: str) -> ClusterConfig:
    return fill_cluster(yaml.safe_load(one(name, "ConfigMap")["data"]["cluster.yaml"]), "cluster.yaml")


def cluster_of(name: str) -> Object:
    spec = one(name, "RayService" if "service" in name else "RayCluster")["spec"]
    found: Object = spec.get("rayClusterConfig", spec)
    return found


def groups_of(name: str) -> dict[str, Object]:
    """Of workers."""
    return {group["groupName"]: group for group in cluster_of(name)["workerGroupSpecs"]}


def labels_of(group: Object) -> dict[str, str]:
    """Of its pods; those that KubeRay adds, too."""
    added = {"ray.io/group": group["groupName"], "ray.io/node-type": "worker", "app.kubernetes.io/name": "kuberay"}
    labels: dict[str, str] = added | group["template"]["metadata"]["labels"]
    return labels


def container_of(group: Object) -> Object:
    (found,) = group["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def flags_of(group: Object) -> dict[str, float]:
    """Of the command that a pod runs before it ends."""
    command = container_of(group)["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["specpipe", "leave"]
    pairs = [flag.partition("=") for flag in command[2:]]
    return {flag: float(value) for flag, _, value in pairs}


@each_overlay
def test_a_pod_behind_a_service_is_ready_when_what_the_service_leads_to_answers(name: str) -> None:
    """KubeRay would call it ready when Ray runs, in a RayService with a proxy of Ray Serve: most pods have none."""
    service = one(name, "Service")
    selector = {"matchLabels": service["spec"]["selector"]}
    (group,) = (each for each in groups_of(name).values() if selects(selector, labels_of(each)))
    (port,) = service["spec"]["ports"]
    probe = container_of(group)["readinessProbe"]
    assert probe["grpc"] == {"port": port["targetPort"]}
    assert probe["grpc"]["port"] == config_of(name).coordinators.port
    assert not config_of(name).tls.cert, "the kubelet asks without TLS"
    assert config_of(name).coordinators.host == "0.0.0.0"
    assert "publishNotReadyAddresses" not in service["spec"]


@each_overlay
def test_pods_that_no_service_leads_to_are_ready_when_ray_runs_in_them(name: str) -> None:
    for role in (TARGET_WORKER, DRAFT_WORKER):
        command = container_of(groups_of(name)[role])["readinessProbe"]["exec"]["command"]
        assert command[:2] == ["bash", "-c"]
        assert RAYLET in command[2]
        assert ":8000" not in command[2]


@each_overlay
def test_liveness_is_left_to_kuberay_which_asks_whether_ray_runs(name: str) -> None:
    """A probe of ours would replace its own; that a process hangs is seen by the actor beside it."""
    for group in groups_of(name).values():
        assert not {"livenessProbe", "startupProbe"} & set(container_of(group))


@each_overlay
def test_the_head_has_the_port_without_which_a_ray_service_never_becomes_ready(name: str) -> None:
    """Its proxy of Ray Serve is the one that always runs."""
    (head,) = cluster_of(name)["headGroupSpec"]["template"]["spec"]["containers"]
    assert {"name": "serve", "containerPort": 8000} in head["ports"]
    assert {"readinessProbe", "livenessProbe"}.isdisjoint(head)


@each_overlay
def test_what_runs_in_a_pod_ends_in_order_before_ray_does(name: str) -> None:
    from specpipe.cli.app import app

    command: Any = typer.main.get_command(app)
    for role, group in groups_of(name).items():
        words = container_of(group)["lifecycle"]["preStop"]["exec"]["command"]
        command.commands["leave"].make_context("leave", words[2:])
        given, config = flags_of(group), config_of(name)
        arguments = plan_group(config, role).process.arguments
        assert float(arguments[arguments.index("--grace") + 1]) == config.grace_s
        assert given["--timeout"] >= config.grace_s + 10
        taken_s = given.get("--after", 0) + RAY_PATIENCE_S + given["--timeout"] + RAY_DRAIN_S
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= taken_s + 10, role
    assert flags_of(groups_of(name)[COORDINATOR])["--after"] == 5, "the Service forgets it first"


@each_overlay
def test_budgets_are_whole_numbers_and_let_a_node_be_drained(name: str) -> None:
    """RayClusters have no scale that Kubernetes could ask for: it then evicts nothing for any other kind of budget."""
    budgets = {name_of(budget): budget["spec"] for budget in of_kind(built(name), "PodDisruptionBudget")}
    for role, group in groups_of(name).items():
        held = [spec for spec in budgets.values() if selects(spec["selector"], labels_of(group))]
        if group["minReplicas"] == 1:
            assert held == [], f"{role}: a node with the only pod could not be drained"
            continue
        (spec,) = held
        assert spec["selector"]["matchLabels"]["ray.io/group"] == role
        assert set(spec) == {"minAvailable", "selector", "unhealthyPodEvictionPolicy"}
        assert 0 < spec["minAvailable"] < group["minReplicas"]
    assert sorted(budgets) == [COORDINATOR, TARGET_WORKER]


@each_overlay
def test_a_target_worker_goes_on_while_another_is_replaced(name: str) -> None:
    config = config_of(name)
    assert config.autoscale.target_workers is not None
    assert min(config.target_workers.count, config.autoscale.target_workers.min) >= 2
    assert groups_of(name)[TARGET_WORKER]["minReplicas"] >= 2


@each_overlay
def test_prometheus_finds_coordinators_and_their_port(name: str) -> None:
    for role, group in groups_of(name).items():
        wanted = {"prometheus.io/scrape": "true", "prometheus.io/port": str(config_of(name).coordinators.metrics_port)}
        assert group["template"]["metadata"].get("annotations", {}) == (wanted if role == COORDINATOR else {})
    ports = {port["name"]: port["containerPort"] for port in container_of(groups_of(name)[COORDINATOR])["ports"]}
    assert ports["metrics"] == config_of(name).coordinators.metrics_port


@each_overlay
def test_all_push_to_the_collector_that_other_overlays_push_to(name: str) -> None:
    coordinator = workload(built("overlays/gpu"), "coordinator")
    assert config_of(name).telemetry.otlp_endpoint == flags(coordinator)["--otlp-endpoint"]


def test_what_workers_push_is_fetched_and_what_coordinators_push_is_not() -> None:
    """Under Ray workers have free ports, so nobody scrapes them; coordinators are read where they stand."""
    path = K8S / "observability/config/prometheus/kubernetes.yaml"
    jobs = {job["job_name"]: job for job in yaml.safe_load(path.read_text())["scrape_configs"]}
    assert jobs["pushed"]["honor_labels"] is True
    assert jobs["pushed"]["static_configs"] == [{"targets": ["otel-collector:8889"]}]
    (kept,) = jobs["pushed"]["metric_relabel_configs"]
    assert (kept["source_labels"], kept["action"]) == (["job"], "keep")
    assert kept["regex"] == "specpipe-(target|draft)-worker"


def templates_of(name: str) -> Iterator[tuple[str, Object]]:
    yield "head", cluster_of(name)["headGroupSpec"]["template"]
    for role, group in groups_of(name).items():
        yield role, group["template"]


@each_overlay
def test_kubernetes_takes_the_pods(name: str) -> None:
    """Here without the schemas of KubeRay's objects, too."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for part, template in templates_of(name):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": part, **template["metadata"]}}
        validate.validate({**pod, "spec": template["spec"]}, "1.32", strict=True)
