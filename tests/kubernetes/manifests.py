"""What kustomize makes of k8s/: the objects that kubectl would apply, and questions about them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from debian_tools import program, run

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"

Object = dict[str, Any]

ROLES = ("coordinator", "target-worker", "draft-worker")
SERVICES = ("overlays/demo", "overlays/gpu")
"""Kustomizations that people apply to have specpipe run."""
ALL = tuple(
    sorted(
        path.parent.relative_to(K8S).as_posix()
        for path in K8S.rglob("kustomization.yaml")
        if yaml.safe_load(path.read_text())["kind"] == "Kustomization"
    )
)


@cache
def built(name: str) -> tuple[Object, ...]:
    """Skips where there is no kubectl."""
    return build(K8S / name)


def build(folder: Path) -> tuple[Object, ...]:
    text = run(program("kubectl", "kubernetes-client"), "kustomize", str(folder))
    return tuple(document for document in yaml.safe_load_all(text) if document)


def with_components(folder: Path, *components: str) -> tuple[Object, ...]:
    """The base with these, as an overlay of one's own would have them."""
    paths = {name: os.path.relpath(K8S / name, folder.resolve()) for name in ("base", "components")}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "specpipe",
        "resources": [paths["base"]],
        "components": [f"{paths['components']}/{name}" for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return build(folder)


def of_kind(objects: tuple[Object, ...], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def workloads(objects: tuple[Object, ...]) -> list[Object]:
    return of_kind(objects, "Deployment", "StatefulSet")


def workload(objects: tuple[Object, ...], name: str) -> Object:
    (found,) = (each for each in workloads(objects) if name_of(each) == name)
    return found


def name_of(thing: Object) -> str:
    return str(thing["metadata"]["name"])


def pod_of(thing: Object) -> Object:
    spec: Object = thing["spec"]["template"]["spec"]
    return spec


def labels_of(thing: Object) -> dict[str, str]:
    """Of a workload's pods."""
    labels: dict[str, str] = thing["spec"]["template"]["metadata"]["labels"]
    return labels


def container_of(thing: Object) -> Object:
    (only,) = pod_of(thing)["containers"]
    assert isinstance(only, dict)
    return only


def all_containers(thing: Object) -> list[Object]:
    pod = pod_of(thing)
    return [*pod.get("initContainers", []), *pod["containers"]]


def flags(thing: Object) -> dict[str, str]:
    """Of a workload's container: those given once, without the role in front."""
    arguments = container_of(thing)["args"]
    assert all(argument.startswith("--") for argument in arguments[1:])
    pairs = [argument.partition("=") for argument in arguments[1:]]
    assert len({name for name, _, _ in pairs}) == len(pairs), f"a flag is given twice: {arguments}"
    return {name: value for name, _, value in pairs}


def ports_of(thing: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container_of(thing)["ports"]}


def probes_of(thing: Object) -> Iterator[tuple[str, Object]]:
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        yield name, container_of(thing)[name]


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """A label selector of matchLabels, and of labels that must be there."""
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    assert all(wish["operator"] == "Exists" for wish in selector.get("matchExpressions", []))
    there = all(wish["key"] in labels for wish in selector.get("matchExpressions", []))
    return there and all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())
