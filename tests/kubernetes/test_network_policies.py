"""Who may reach whom, port by port: every open port is open to those who need it and to nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from manifests import ROLES, SERVICES, Object, built, labels_of, of_kind, ports_of, selects, workload, workloads

PROMETHEUS = "observability: app.kubernetes.io/name=prometheus"
CLIENTS = {"specpipe-client=true", "specpipe-client=true: specpipe-client=true"}
COORDINATOR = "app.kubernetes.io/component=coordinator, app.kubernetes.io/part-of=specpipe"

each_service = pytest.mark.parametrize("name", SERVICES)


def policies_of(objects: tuple[Object, ...], role: str, direction: str) -> Iterator[Object]:
    """Rules of all policies that select the pods of a role."""
    labels = labels_of(workload(objects, role))
    for policy in of_kind(objects, "NetworkPolicy"):
        if selects(policy["spec"]["podSelector"], labels):
            assert direction.capitalize() in policy["spec"]["policyTypes"] or direction not in policy["spec"]
            yield from policy["spec"].get(direction, [])


def peers(rule: Object) -> set[str]:
    """`[namespace's labels: ]pod's labels`, sorted."""
    return {_told(peer) for key in ("from", "to") for peer in rule.get(key, [])}


def _told(peer: Object) -> str:
    assert set(peer) <= {"podSelector", "namespaceSelector"}
    parts = [peer[key]["matchLabels"] for key in ("namespaceSelector", "podSelector") if key in peer]
    texts = [", ".join(f"{name}={value}" for name, value in sorted(labels.items())) for labels in parts]
    return ": ".join(texts).replace("kubernetes.io/metadata.name=", "")


def who_reaches(objects: tuple[Object, ...], role: str, port: int) -> set[str]:
    rules = policies_of(objects, role, "ingress")
    return {peer for rule in rules if port in {p["port"] for p in rule["ports"]} for peer in peers(rule)}


@each_service
def test_every_pod_is_closed_in_both_directions_but_for_what_rules_open(name: str) -> None:
    objects = built(name)
    for each in workloads(objects):
        directions = {
            direction
            for policy in of_kind(objects, "NetworkPolicy")
            if selects(policy["spec"]["podSelector"], labels_of(each))
            for direction in policy["spec"]["policyTypes"]
        }
        assert directions == {"Ingress", "Egress"}


@each_service
def test_every_port_is_open_to_those_who_need_it(name: str) -> None:
    objects = built(name)
    for role in ROLES:
        reached = {
            port: who_reaches(objects, role, number) for port, number in ports_of(workload(objects, role)).items()
        }
        assert reached.pop("metrics") == {PROMETHEUS}
        assert reached.pop("health") == set()  # the kubelet needs no rule
        assert reached.pop("http", set()) == set()  # by port-forward only
        assert reached.pop("grpc") == (CLIENTS if role == "coordinator" else {COORDINATOR})
        assert not reached


@each_service
def test_no_rule_opens_a_port_that_nothing_listens_on(name: str) -> None:
    objects = built(name)
    for role in ROLES:
        opened = {port["port"] for rule in policies_of(objects, role, "ingress") for port in rule["ports"]}
        assert opened <= set(ports_of(workload(objects, role)).values())


@each_service
def test_ways_out_lead_to_workers_names_and_the_collector_only(name: str) -> None:
    objects = built(name)

    def ways(role: str) -> dict[str, set[int]]:
        return {
            peer: {port["port"] for port in rule["ports"]}
            for rule in policies_of(objects, role, "egress")
            for peer in peers(rule)
        }

    names = {"kube-system: k8s-app=kube-dns": {53}}
    workers = {
        f"app.kubernetes.io/component={role}, app.kubernetes.io/part-of=specpipe": {
            ports_of(workload(objects, role))["grpc"]
        }
        for role in ("target-worker", "draft-worker")
    }
    collector = {"observability: app.kubernetes.io/name=otel-collector": {4317}}
    assert ways("coordinator") == names | workers | collector
    assert ways("target-worker") == ways("draft-worker") == names


def test_peers_of_other_namespaces_are_called_what_they_are_called_there() -> None:
    for role in ("prometheus", "otel-collector"):
        labels = labels_of(workload(built("observability"), role))
        assert labels["app.kubernetes.io/name"] == role
    (namespace,) = of_kind(built("observability"), "Namespace")
    assert namespace["metadata"]["name"] == "observability"
