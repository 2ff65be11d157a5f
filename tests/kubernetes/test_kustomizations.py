"""Every kustomization of k8s/: it renders, Kubernetes knows what is in it, and its parts fit together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from jsonschema import Draft202012Validator
from manifests import (
    ALL,
    K8S,
    ROLES,
    ROOT,
    SERVICES,
    Object,
    all_containers,
    built,
    container_of,
    flags,
    labels_of,
    name_of,
    of_kind,
    pod_of,
    ports_of,
    probes_of,
    with_components,
    workload,
    workloads,
)

KUBERNETES = "1.32"
SCHEMAS = ROOT.parent / "shared/k8s-schemas"
NOT_OF_KUBERNETES = ("cert-manager.io", "ray.io", "leaderworkerset.x-k8s.io")
WITHOUT_SCHEMA = ("cert-manager.io",)
WITHOUT_NAMESPACE = ("Namespace", "ClusterRole", "ClusterRoleBinding", "APIService")
DNS_KEEPS_S = 30.0  # how long an answer may be kept, by what Kubernetes itself and kubeadm write into CoreDNS's file
CONNECT_S = 4.0  # from knowing a worker to having it
COMPONENTS = sorted(path.name for path in (K8S / "components").iterdir())

each_kustomization = pytest.mark.parametrize("name", ALL)
each_service = pytest.mark.parametrize("name", SERVICES)


def check(objects: tuple[Object, ...]) -> None:
    """Skips, once all the others have been found right, if there are kinds whose schemas should be here and are not."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    unchecked = set()
    for each in objects:
        group = each["apiVersion"].partition("/")[0]
        schema = SCHEMAS / f"{each['apiVersion'].replace('/', '_')}_{each['kind']}.json"
        if group not in NOT_OF_KUBERNETES:
            validate.validate(each, KUBERNETES, strict=True)
        elif schema.is_file():
            Draft202012Validator(json.loads(schema.read_text())).validate(each)
        elif group not in WITHOUT_SCHEMA:
            unchecked.add(each["kind"])
    if unchecked:
        pytest.skip(f"the schemas of custom resources are not here: nothing checks {', '.join(sorted(unchecked))}")


def test_a_kind_whose_schema_is_not_here_is_skipped_once_the_others_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SCHEMAS", tmp_path)
    ray: Object = {"apiVersion": "ray.io/v1", "kind": "RayCluster"}
    wrong: Object = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"prots": []}}
    with pytest.raises(pytest.skip.Exception, match="nothing checks RayCluster"):
        check((ray,))
    with pytest.raises(Exception, match="prots"):
        check((ray, wrong))
    check(({"apiVersion": "cert-manager.io/v1", "kind": "Issuer"},))


@each_kustomization
def test_it_renders_and_kubernetes_knows_what_is_in_it(name: str) -> None:
    objects = built(name)
    assert objects
    check(objects)


@pytest.mark.parametrize("component", COMPONENTS)
def test_each_component_fits_the_base_alone(component: str, tmp_path: Path) -> None:
    objects = with_components(tmp_path, component)
    assert objects != built("base")
    assert {each["metadata"].get("namespace") for each in objects if each["kind"] != "Namespace"} == {"specpipe"}
    check(objects)


@each_kustomization
def test_every_object_says_in_which_namespace_it_lives_and_stands_there_once(name: str) -> None:
    objects = [each for each in built(name) if each["kind"] not in WITHOUT_NAMESPACE]
    assert all(each["metadata"].get("namespace") for each in objects)
    places = [(each["kind"], each["metadata"]["namespace"], name_of(each)) for each in built(name) if each in objects]
    assert len(set(places)) == len(places)


@each_service
def test_all_of_a_service_is_in_one_namespace(name: str) -> None:
    assert {each["metadata"].get("namespace") for each in built(name) if each["kind"] != "Namespace"} == {"specpipe"}
    assert [name_of(each) for each in of_kind(built(name), "Namespace")] == ["specpipe"]


@each_service
def test_selectors_select_pods_of_one_role(name: str) -> None:
    objects = built(name)
    assert sorted(map(name_of, workloads(objects))) == sorted(ROLES)
    for each in workloads(objects):
        wanted = {"app.kubernetes.io/part-of": "specpipe", "app.kubernetes.io/component": name_of(each)}
        assert each["spec"]["selector"]["matchLabels"] == wanted
        assert labels_of(each) == wanted
        for spread in pod_of(each)["topologySpreadConstraints"]:
            assert spread["labelSelector"]["matchLabels"] == wanted
    for each in of_kind(objects, "Service"):
        assert each["spec"]["selector"] == labels_of(workload(objects, name_of(each)))
    for each in of_kind(objects, "PodDisruptionBudget"):
        assert each["spec"]["selector"]["matchLabels"] == labels_of(workload(objects, name_of(each)))
    for kind in ("Service", "PodDisruptionBudget"):
        assert sorted(map(name_of, of_kind(objects, kind))) == sorted(ROLES)


@each_service
def test_commands_are_what_the_command_line_takes(name: str) -> None:
    """Read by the real parser: an unknown flag, or one without its value, is refused."""
    from specpipe.cli.app import app

    command: Any = typer.main.get_command(app)
    for each in workloads(built(name)):
        arguments = list(container_of(each)["args"])
        assert arguments[0] == name_of(each)
        command.commands[arguments[0]].make_context(arguments[0], arguments[1:])


@each_service
def test_ports_are_one_thing_wherever_they_are_named(name: str) -> None:
    objects = built(name)
    for each in workloads(objects):
        given, ports = flags(each), ports_of(each)
        assert given["--host"] == "0.0.0.0"
        by_flag = {"grpc": "--port", "health": "--health-port", "metrics": "--metrics-port", "http": "--http-port"}
        assert ports == {port: int(given[flag]) for port, flag in by_flag.items() if flag in given}
        assert {probe["grpc"]["port"] for _, probe in probes_of(each)} == {ports["health"]}
        annotations = each["spec"]["template"]["metadata"]["annotations"]
        assert annotations == {"prometheus.io/scrape": "true", "prometheus.io/port": str(ports["metrics"])}
        (service,) = (service for service in of_kind(objects, "Service") if name_of(service) == name_of(each))
        (port,) = service["spec"]["ports"]
        assert (port["targetPort"], port["port"]) == ("grpc", ports["grpc"])


@each_service
def test_coordinators_look_for_workers_behind_headless_services(name: str) -> None:
    from coordinator.discovery import is_name
    from specpipe.cli.flags import checked_worker

    objects = built(name)
    given = flags(workload(objects, "coordinator"))
    for flag, role in (("--target", "target-worker"), ("--draft", "draft-worker")):
        assert given[flag] == f"dns:{role}:{ports_of(workload(objects, role))['grpc']}"
        assert is_name(checked_worker(flag, given[flag]))
        (service,) = (each for each in of_kind(objects, "Service") if name_of(each) == role)
        assert service["spec"]["clusterIP"] == "None"
    assert workload(objects, "target-worker")["spec"]["serviceName"] == "target-worker"


@each_service
def test_probes_tell_a_process_that_is_not_ready_from_one_that_hangs(name: str) -> None:
    from specpipe.server import LIVENESS

    for each in workloads(built(name)):
        probes = {kind: probe["grpc"].get("service", "") for kind, probe in probes_of(each)}
        assert probes["livenessProbe"] == LIVENESS
        assert probes["readinessProbe"] == ""
        # A coordinator has started when it waits for workers; a worker, when its model is loaded.
        assert probes["startupProbe"] == (LIVENESS if name_of(each) == "coordinator" else "")


@each_service
def test_pods_get_the_time_that_their_processes_take_to_end(name: str) -> None:
    for each in workloads(built(name)):
        pre_stop = container_of(each).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert pod_of(each)["terminationGracePeriodSeconds"] >= pre_stop + float(flags(each)["--grace"]) + 10


@each_service
def test_the_next_worker_is_replaced_when_coordinators_have_found_the_last_one(name: str) -> None:
    from coordinator.settings import DriverSettings

    for role in ("target-worker", "draft-worker"):
        found_s = DriverSettings().resolve_every_s + DNS_KEEPS_S + CONNECT_S
        assert workload(built(name), role)["spec"]["minReadySeconds"] >= found_s


@pytest.mark.parametrize("name", [*SERVICES, "metrics-adapter"])
def test_pods_have_no_rights_they_do_not_need_and_say_what_they_use(name: str) -> None:
    for each in workloads(built(name)):
        security = pod_of(each)["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod_of(each).get("automountServiceAccountToken", "serviceAccountName" in pod_of(each)) == (
            "serviceAccountName" in pod_of(each)
        )
        for container in all_containers(each):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("name", [*SERVICES, "metrics-adapter"])
def test_images_have_a_version(name: str) -> None:
    for each in workloads(built(name)):
        for container in all_containers(each):
            tag = container["image"].rpartition("/")[2].partition(":")[2].lstrip("v")
            assert tag.count(".") == 2, container["image"]
            assert all(part.isdecimal() for part in tag.split(".")), container["image"]


def test_images_are_of_this_version_and_each_service_has_its_own() -> None:
    from specpipe import __version__

    for name in SERVICES:
        images = {name_of(each): container_of(each)["image"] for each in workloads(built(name))}
        assert {role: image.rpartition("/")[2] for role, image in images.items()} == {
            role: f"{role}:{__version__}" for role in ROLES
        }


@pytest.mark.parametrize("name", [*SERVICES, "metrics-adapter"])
def test_what_is_mounted_exists_and_what_exists_is_mounted(name: str) -> None:
    for each in workloads(built(name)):
        volumes = [volume["name"] for volume in pod_of(each)["volumes"]]
        mounted = [mount["name"] for container in all_containers(each) for mount in container["volumeMounts"]]
        assert set(volumes) == set(mounted)
        assert len(set(volumes)) == len(volumes)
        claims = {name_of(claim) for claim in of_kind(built(name), "PersistentVolumeClaim")}
        used = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in pod_of(each)["volumes"]
            if "persistentVolumeClaim" in volume
        }
        assert used <= claims


def test_the_api_server_finds_the_metrics_adapter_and_it_finds_prometheus() -> None:
    objects = built("metrics-adapter")
    (adapter,) = workloads(objects)
    (service,) = of_kind(objects, "Service")
    assert service["spec"]["selector"] == labels_of(adapter)
    assert service["spec"]["ports"][0]["targetPort"] in ports_of(adapter)
    for each in of_kind(objects, "APIService"):
        found = each["spec"]["service"]
        assert (found["namespace"], found["name"]) == (service["metadata"]["namespace"], name_of(service))
        assert name_of(each) == f"{each['spec']['version']}.{each['spec']['group']}"
    arguments = dict(argument.split("=", 1) for argument in container_of(adapter)["args"])
    assert int(arguments["--secure-port"]) == ports_of(adapter)["https"]
    (prometheus,) = (each for each in of_kind(built("observability"), "Service") if name_of(each) == "prometheus")
    port = prometheus["spec"]["ports"][0]["port"]
    assert arguments["--prometheus-url"] == f"http://prometheus.{prometheus['metadata']['namespace']}:{port}/"
    account = {"kind": "ServiceAccount", "name": pod_of(adapter)["serviceAccountName"], "namespace": "observability"}
    assert all(
        account in binding["subjects"] or name_of(binding) == "specpipe-scaling-metrics"
        for binding in of_kind(objects, "ClusterRoleBinding", "RoleBinding")
    )


def test_the_gpu_overlay_gives_each_rank_a_gpu() -> None:
    target = workload(built("overlays/gpu"), "target-worker")
    resources = container_of(target)["resources"]
    size = int(flags(target)["--tensor-parallel-size"])
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == size
    for role in ("target-worker", "draft-worker"):
        each = workload(built("overlays/gpu"), role)
        assert flags(each)["--device"] == "cuda"
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod_of(each)["tolerations"]


def test_models_and_tokenizer_are_read_from_the_mounted_folder(tmp_path: Path) -> None:
    for component in ("model-pvc", "model-image"):
        objects = with_components(tmp_path, component)
        for role, flag in (("target-worker", "--model"), ("draft-worker", "--model"), ("coordinator", "--tokenizer")):
            each = workload(objects, role)
            (path,) = (m["mountPath"] for m in container_of(each)["volumeMounts"] if m["name"] == "models")
            assert flags(each)[flag].startswith(f"{path}/")
        assert (
            flags(workload(objects, "coordinator"))["--tokenizer"]
            == flags(workload(objects, "target-worker"))["--model"]
        )


def test_certificates_are_those_that_pods_mount_and_name_who_is_called(tmp_path: Path) -> None:
    objects = with_components(tmp_path, "tls")
    certificates = {each["spec"]["secretName"]: each["spec"] for each in of_kind(objects, "Certificate")}
    issuers = {name_of(each) for each in of_kind(objects, "Issuer")}
    for each in workloads(objects):
        role, given = name_of(each), flags(each)
        (volume,) = (volume for volume in pod_of(each)["volumes"] if volume["name"] == "tls")
        certificate = certificates[volume["secret"]["secretName"]]
        assert {role, f"{role}.specpipe", f"{role}.specpipe.svc"} <= set(certificate["dnsNames"])
        assert "server auth" in certificate["usages"]
        assert ("client auth" in certificate["usages"]) == (role == "coordinator")
        (mount,) = (m["mountPath"] for m in container_of(each)["volumeMounts"] if m["name"] == "tls")
        files = {flag: given[flag] for flag in ("--tls-cert", "--tls-key", "--tls-ca")}
        assert files == {
            "--tls-cert": f"{mount}/tls.crt",
            "--tls-key": f"{mount}/tls.key",
            "--tls-ca": f"{mount}/ca.crt",
        }
    assert {spec["issuerRef"]["name"] for spec in certificates.values()} <= issuers
    assert certificates["client-tls"]["usages"] == ["client auth"]


def test_the_base_names_every_service_once_and_the_documentation_names_every_folder() -> None:
    text = (K8S / "README.md").read_text()
    folders = {path.parent for path in K8S.rglob("kustomization.yaml")} | {K8S / "docker"}
    for folder in folders:
        assert f"`{folder.relative_to(K8S).as_posix()}`" in text, folder
