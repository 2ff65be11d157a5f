"""k8s/observability and docker-compose.yaml: valid, safe by default, and one and the same thing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from debian_tools import program, run
from stack import COMPOSE, ROOT, STACK, read_yaml

KUBERNETES = "1.32"
WITHOUT_NAMESPACE = ("Namespace", "ClusterRole", "ClusterRoleBinding")
BACKENDS = ["grafana", "jaeger", "otel-collector", "prometheus"]
each_backend = pytest.mark.parametrize("name", BACKENDS)


@cache
def built() -> list[dict[str, Any]]:
    """What kubectl would apply. Skips where there is no kubectl."""
    return list(yaml.safe_load_all(run(program("kubectl", "kubernetes-client"), "kustomize", str(STACK))))


@cache
def written() -> list[dict[str, Any]]:
    """The manifests as they lie there; needs no kubectl."""
    files = read_yaml(STACK / "kustomization.yaml")["resources"]
    return [document for file in files for document in yaml.safe_load_all((STACK / file).read_text())]


def compose() -> dict[str, Any]:
    parsed: dict[str, Any] = read_yaml(COMPOSE)
    return parsed


def one(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    return next(each for each in documents if each["kind"] == kind and each["metadata"]["name"] == name)


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = one(written(), "Deployment", name)["spec"]["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    (only,) = pod(name)["containers"]
    assert isinstance(only, dict)
    return only


def test_every_manifest_is_what_kubernetes_knows() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in written():
        validate.validate(document, KUBERNETES, strict=True)


def test_what_kustomize_builds_is_what_kubernetes_knows() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in built():
        validate.validate(document, KUBERNETES, strict=True)


def test_kustomize_builds_every_resource_in_one_namespace() -> None:
    namespaces = {d["metadata"].get("namespace") for d in built() if d["kind"] not in WITHOUT_NAMESPACE}
    assert namespaces == {"observability"}
    assert [d["metadata"]["name"] for d in built() if d["kind"] == "Deployment"] == BACKENDS


def test_config_maps_are_the_files_that_compose_mounts() -> None:
    """One source: whoever changes a file changes both."""
    in_maps = {text for d in built() if d["kind"] == "ConfigMap" for text in d["data"].values()}
    for path in (path for path in (STACK / "config").rglob("*") if path.is_file()):
        assert (path.read_text() in in_maps) == (path.name != "compose.yaml"), path
        assert is_mounted_by_compose(path), path


def is_mounted_by_compose(path: Path) -> bool:
    return any(path == source or source in path.parents for source, _ in mounts())


def mounts() -> Iterator[tuple[Path, str]]:
    """Of compose: files and folders of this repository, and the whole entry."""
    for service in compose()["services"].values():
        for volume in service.get("volumes", []):
            if volume.startswith("./"):
                yield (ROOT / volume.split(":")[0]).resolve(), volume


def test_pods_find_their_configuration_where_compose_puts_it() -> None:
    """Path by path inside the container."""
    for name in BACKENDS:
        in_compose = {
            volume.split(":")[1] for volume in compose()["services"][name]["volumes"] if volume.startswith(".")
        }
        in_pod = {mount["mountPath"] for mount in container(name)["volumeMounts"]}
        for path in in_compose:
            assert path in in_pod or str(Path(path).parent) in in_pod, f"{name}: {path}"


@each_backend
def test_images_are_pinned_and_the_same_in_both(name: str) -> None:
    image = container(name)["image"]
    assert image == compose()["services"][name]["image"]
    tag = image.rpartition(":")[2].lstrip("v")
    assert all(part.isdecimal() for part in tag.split(".")), image
    assert tag.count(".") == 2, image


@each_backend
def test_pods_have_no_rights_they_do_not_need(name: str) -> None:
    spec, only = pod(name), container(name)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert only["securityContext"]["allowPrivilegeEscalation"] is False
    assert only["securityContext"]["readOnlyRootFilesystem"] is True
    assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert spec.get("automountServiceAccountToken", name == "prometheus") == (name == "prometheus")


@each_backend
def test_pods_say_what_they_need_and_when_they_are_well(name: str) -> None:
    only = container(name)
    assert {"cpu", "memory"} <= set(only["resources"]["requests"])
    assert "memory" in only["resources"]["limits"]
    ports = {port["name"] for port in only["ports"]}
    assert {only[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")} <= ports
    service = one(written(), "Service", name)
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert service["spec"]["selector"] == one(written(), "Deployment", name)["spec"]["selector"]["matchLabels"]


@pytest.mark.parametrize("name", ["otel-collector", "jaeger", "prometheus", "grafana"])
def test_addresses_in_configurations_are_ports_of_services(name: str) -> None:
    """HOST:PORT of another backend, wherever it stands: one name on the compose network and in the namespace."""
    offered = {port["port"] for port in one(written(), "Service", name)["spec"]["ports"]}
    for path in (STACK / "config").rglob("*.yaml"):
        for word in path.read_text().replace("/", " ").replace("[", " ").replace("]", " ").split():
            host, _, port = word.partition(":")
            if host == name and port.isdecimal():
                assert int(port) in offered, f"{path.name}: {word}"


def test_compose_starts_what_looks_and_the_service_only_if_asked() -> None:
    """So that a service on the machine itself finds its port free, and nothing is built for it."""
    services = compose()["services"]
    assert sorted(name for name, service in services.items() if "profiles" not in service) == BACKENDS
    assert all(service["profiles"] == ["service"] for service in services.values() if "build" in service)


def test_compose_opens_ports_on_loopback_only() -> None:
    published = [port for service in compose()["services"].values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_compose_containers_have_no_rights_they_do_not_need() -> None:
    for name, service in compose()["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_compose_mounts_what_is_there_and_to_read_only() -> None:
    assert list(mounts())
    for source, volume in mounts():
        assert source.exists(), volume
        assert volume.endswith(":ro"), volume


def test_compose_starts_processes_with_flags_that_they_have() -> None:
    """Typed as docker would hand them to the image's `specpipe`."""
    from typer.testing import CliRunner

    from specpipe.cli.app import app

    for name in ("coordinator", "target-worker", "draft-worker"):
        command = compose()["services"][name]["command"]
        assert command[0] == name
        help_text = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, [name, "--help"]).output
        for flag in command[1:]:
            assert flag.partition("=")[0] in help_text, flag


def test_every_model_that_compose_names_is_in_the_image() -> None:
    dockerfile = (ROOT / compose()["services"]["coordinator"]["build"]["dockerfile"]).read_text()
    commands = [compose()["services"][name]["command"] for name in ("coordinator", "target-worker", "draft-worker")]
    named = {flag.partition("=")[2] for command in commands for flag in command if "/models/" in flag}
    assert named == {"/models/demo-target", "/models/demo-draft"}
    assert all(f'" {model}' in dockerfile for model in named)
    assert "--tokenizer=/models/demo-target" in commands[0]  # the name that a worker tells is not enough


def test_the_image_holds_every_package_and_runs_as_nobody_in_particular() -> None:
    dockerfile = (ROOT / compose()["services"]["coordinator"]["build"]["dockerfile"]).read_text()
    for folder in ("coordinator", "draft_worker", "specpipe", "target_worker"):
        assert f"COPY {folder} {folder}" in dockerfile
        assert f"!{folder}" in (ROOT / ".dockerignore").read_text().splitlines()
    assert "USER 10001" in dockerfile


def test_spans_keep_their_place_in_jaeger() -> None:
    """The coordinator lays all spans out on one clock; adjusting for skew would take the overlap out of the picture."""
    assert read_yaml(STACK / "config/jaeger.yaml")["extensions"]["jaeger_query"]["max_clock_skew_adjust"] == "0s"


def test_the_collector_passes_on_what_it_receives() -> None:
    config = read_yaml(STACK / "config/otel-collector.yaml")
    pipelines = config["service"]["pipelines"]
    for pipeline in pipelines.values():
        assert pipeline["receivers"] == ["otlp"]
        assert pipeline["processors"] == ["memory_limiter", "batch"]
    assert pipelines["traces"]["exporters"] == ["otlp/jaeger"]
    assert pipelines["metrics"]["exporters"] == ["prometheus"]
    for part in ("receivers", "processors", "exporters"):
        assert {name for pipeline in pipelines.values() for name in pipeline[part]} == set(config[part])
    assert set(config["service"]["extensions"]) == set(config["extensions"])
