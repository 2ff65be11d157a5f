"""Who may reach whom, port by port: every open port is open to those who need it and to nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from manifests import ROLES, SERVICES, Object, built, labels_of, of_kind, ports_of, selects, workload, workloads

PROMETHEUS = "observability: app.kubernetes.io/name=prometheus"
CLIENTS = {"specpipe-client=true", "specpipe-client=true: specpipe-client=true"}
NODE_LOCAL_DNS = "169.254.20.10/32"  # of the node, whichever it is: no pod, so no label selects it
COORDINATOR = "app.kubernetes.io/component=coordinator, app.kubernetes.io/part-of=specpipe"

ON_RAY = ("overlays/kuberay", "overlays/kuberay-service")
OPERATOR = ": app.kubernetes.io/component=kuberay-operator"  # of any namespace
BY_KUBERAY = {
    "app.kubernetes.io/name": "kuberay",
    "app.kubernetes.io/created-by": "kuberay-operator",
    "ray.io/cluster": "another",
    "ray.io/is-ray-node": "yes",
}
"""Labels that the operator puts on the pods of every Ray, whosever it is."""
OPERATORS = (
    {"app.kubernetes.io/name": "kuberay-operator", "app.kubernetes.io/component": "kuberay-operator"},
    {"app.kubernetes.io/name": "kuberay", "app.kubernetes.io/component": "kuberay-operator"},
)
"""Labels of the operator's own pod, as its Helm chart and its manifests install it."""

each_service = pytest.mark.parametrize("name", SERVICES)
each_on_ray = pytest.mark.parametrize("name", ON_RAY)


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
    if "ipBlock" in peer:
        assert set(peer["ipBlock"]) == {"cidr"}
        return str(peer["ipBlock"]["cidr"])
    assert set(peer) <= {"podSelector", "namespaceSelector"}
    parts = [peer[key].get("matchLabels", {}) for key in ("namespaceSelector", "podSelector") if key in peer]
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

    servers = ("kube-system: k8s-app=kube-dns", "kube-system: k8s-app=node-local-dns", NODE_LOCAL_DNS)
    names = {server: {53} for server in servers}
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


def ray_pods(objects: tuple[Object, ...]) -> dict[str, dict[str, str]]:
    """Labels of the pods, by what runs there."""
    (owner,) = of_kind(objects, "RayCluster", "RayService")
    spec = owner["spec"].get("rayClusterConfig", owner["spec"])
    groups = {"head": spec["headGroupSpec"]} | {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    return {role: BY_KUBERAY | group["template"]["metadata"]["labels"] for role, group in groups.items()}


def rules_for(objects: tuple[Object, ...], labels: dict[str, str]) -> list[Object]:
    """Who may reach pods with these labels."""
    policies = [each["spec"] for each in of_kind(objects, "NetworkPolicy")]
    return [rule for each in policies if selects(each["podSelector"], labels) for rule in each["ingress"]]


@each_on_ray
def test_ray_is_reached_by_its_own_pods_and_the_operator_and_by_nobody_else(name: str) -> None:
    for role, labels in ray_pods(built(name)).items():
        rules = rules_for(built(name), labels)
        everywhere = {peer for rule in rules if "ports" not in rule for peer in peers(rule)}
        assert everywhere == {"app.kubernetes.io/part-of=specpipe", OPERATOR}
        opened = {port["port"]: peers(rule) for rule in rules for port in rule.get("ports", [])}
        assert opened == ({50051: CLIENTS, 9464: {PROMETHEUS}} if role == "coordinator" else {})


@each_on_ray
def test_the_operator_is_let_in_however_it_was_installed_and_rays_of_others_are_not(name: str) -> None:
    rules = [rule for labels in ray_pods(built(name)).values() for rule in rules_for(built(name), labels)]
    anywhere = [peer["podSelector"] for rule in rules for peer in rule["from"] if peer.get("namespaceSelector") == {}]
    assert anywhere
    assert all(selects(selector, labels) for selector in anywhere for labels in OPERATORS)
    assert not any(selects(selector, BY_KUBERAY) for selector in anywhere)
