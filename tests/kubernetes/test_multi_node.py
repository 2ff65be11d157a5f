"""Target workers of several pods: what the LeaderWorkerSet says of leaders and ranks fits together and to the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from jsonschema import Draft202012Validator
from manifests import ROOT, Object, built, labels_of, name_of, of_kind, selects, workloads

from specpipe.config import RANK_TOKEN_VARIABLE

NAME = "overlays/multi-node"
SCHEMA = ROOT.parent / "shared/k8s-schemas/leaderworkerset.x-k8s.io_v1_LeaderWorkerSet.json"
SET_BY_CONTROLLER = {
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "target-ranks-0.target-ranks",
}


def ranks() -> Object:
    (found,) = of_kind(built(NAME), "LeaderWorkerSet")
    return found


def template(part: str) -> Object:
    """`leader` or `worker`: of its pods."""
    found: Object = ranks()["spec"]["leaderWorkerTemplate"][f"{part}Template"]
    return found


def container(part: str) -> Object:
    (only,) = template(part)["spec"]["containers"]
    found: Object = only
    return found


def flags(part: str) -> dict[str, str]:
    """As a pod gets them."""
    arguments = [argument.partition("=") for argument in container(part)["args"][1:]]
    given = {name: value for name, _, value in arguments}
    assert len(given) == len(arguments)
    return {name: _filled(value) for name, value in given.items()}


def _filled(value: str) -> str:
    for name, there in SET_BY_CONTROLLER.items():
        value = value.replace(f"$({name})", there)
    assert "$(" not in value
    return value


def one(kind: str, name: str) -> Object:
    (found,) = (each for each in of_kind(built(NAME), kind) if name_of(each) == name)
    return found


def test_the_controllers_schema_takes_it() -> None:
    if not SCHEMA.is_file():
        pytest.skip("the schemas of custom resources are not here")
    Draft202012Validator(json.loads(SCHEMA.read_text())).validate(ranks())


@pytest.mark.parametrize("part", ["leader", "worker"])
def test_kubernetes_takes_the_pods(part: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    pod = template(part)
    validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": part, **pod["metadata"]}, "spec": pod["spec"]},
        "1.32",
        strict=True,
    )


@pytest.mark.parametrize("part", ["leader", "worker"])
def test_the_command_line_takes_what_pods_say_and_finds_a_rank_in_it(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specpipe.cli.app import app
    from specpipe.cli.services import TargetFlags, rendezvous_config

    given = flags(part)
    command: Any = typer.main.get_command(app)
    command.commands["target-worker"].make_context(
        "target-worker", [f"{name}={value}" for name, value in given.items()]
    )
    monkeypatch.setenv(RANK_TOKEN_VARIABLE, "a secret of this group")
    config = rendezvous_config(
        TargetFlags(
            tensor_parallel_size=int(given["--tensor-parallel-size"]),
            rank=int(given["--rank"]),
            rendezvous=given["--rendezvous"],
        )
    )
    assert config is not None
    assert config.rank == (0 if part == "leader" else 1)


def test_ranks_dial_the_leader_by_the_name_of_the_controllers_service() -> None:
    """The controller makes a Service of its own, called as the set, in which leaders are before they are ready. One of
    ours by that name would be taken for it."""
    port = next(port["containerPort"] for port in container("leader")["ports"] if port["name"] == "ranks")
    assert flags("leader")["--rendezvous"] == f"0.0.0.0:{port}"
    assert container("worker")["args"][-1] == f"--rendezvous=$(LWS_LEADER_ADDRESS):{port}"
    assert name_of(ranks()) not in {name_of(service) for service in of_kind(built(NAME), "Service")}


def test_a_group_ends_and_begins_as_one_and_ranks_outlast_the_drain_of_rank_0() -> None:
    assert ranks()["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert float(flags("worker")["--grace"]) > float(flags("leader")["--grace"])
    for part in ("leader", "worker"):
        assert template(part)["spec"]["terminationGracePeriodSeconds"] >= float(flags(part)["--grace"]) + 10


def test_leaders_alone_have_probes_and_are_found_by_coordinators() -> None:
    probes = {"startupProbe", "readinessProbe", "livenessProbe"}
    assert probes <= set(container("leader"))
    assert not probes & set(container("worker"))
    service = one("Service", "target-worker")
    assert selects({"matchLabels": service["spec"]["selector"]}, template("leader")["metadata"]["labels"])
    assert not selects({"matchLabels": service["spec"]["selector"]}, template("worker")["metadata"]["labels"])
    ports = {port["name"]: port["containerPort"] for port in container("leader")["ports"]}
    given = flags("leader")
    assert ports["grpc"] == service["spec"]["ports"][0]["port"] == int(given["--port"])
    assert (ports["health"], ports["metrics"]) == (int(given["--health-port"]), int(given["--metrics-port"]))
    assert {container("leader")[probe]["grpc"]["port"] for probe in probes} == {ports["health"]}
    assert container("leader")["livenessProbe"]["grpc"]["service"] == "liveness"


def test_there_is_no_other_target_worker_and_the_autoscaler_scales_groups() -> None:
    assert sorted(map(name_of, workloads(built(NAME)))) == ["coordinator", "draft-worker"]
    scaled = one("HorizontalPodAutoscaler", "target-worker")["spec"]["scaleTargetRef"]
    assert scaled == {"apiVersion": ranks()["apiVersion"], "kind": "LeaderWorkerSet", "name": name_of(ranks())}
    assert "replicas" not in ranks()["spec"], "the autoscaler decides on them"


def test_each_rank_has_a_gpu_the_models_and_the_secret_and_no_rights() -> None:
    for part in ("leader", "worker"):
        pod, only = template(part)["spec"], container(part)
        assert only["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert flags(part)["--device"] == "cuda"
        assert flags(part)["--model"] == "/models/target"
        (token,) = (variable for variable in only["env"] if variable["name"] == RANK_TOKEN_VARIABLE)
        assert token["valueFrom"] == {"secretKeyRef": {"name": "rank-token", "key": "token"}}
        mounted = {mount["name"] for mount in only["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert {"models", "shared-memory", "tmp"} <= mounted
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert only["securityContext"]["readOnlyRootFilesystem"] is True
        assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container("leader")["image"] == container("worker")["image"]
    gpu = one("Deployment", "coordinator")
    assert (
        container("leader")["image"].rpartition(":")[2]
        == gpu["spec"]["template"]["spec"]["containers"][0]["image"].rpartition(":")[2]
    )


def policies_of(labels: dict[str, str]) -> list[Object]:
    return [
        policy["spec"]
        for policy in of_kind(built(NAME), "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], labels)
    ]


def test_ranks_reach_one_another_on_every_port_and_nobody_else_does() -> None:
    """Whoever reaches the ports that sums and logits use could disturb them."""
    both = {"matchLabels": {"specpipe-ranks": "true"}}
    for part in ("leader", "worker"):
        rules = [rule for policy in policies_of(template(part)["metadata"]["labels"]) for rule in policy["ingress"]]
        assert {"from": [{"podSelector": both}]} in rules
        assert all("ports" in rule for rule in rules if rule != {"from": [{"podSelector": both}]})
        opened = {port["port"] for rule in rules for port in rule.get("ports", [])}
        assert opened == ({6001, 9464} if part == "leader" else {9464})
    for each in workloads(built(NAME)):
        assert not selects(both, labels_of(each))


def test_no_more_than_one_rank_is_evicted_at_a_time() -> None:
    for part, budget in (("leader", "target-worker"), ("worker", "target-rank")):
        spec = one("PodDisruptionBudget", budget)["spec"]
        assert selects(spec["selector"], template(part)["metadata"]["labels"])
        assert spec["maxUnavailable"] == 1
