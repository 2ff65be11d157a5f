"""The service on KubeRay: what the RayCluster offers is what CLUSTER.yaml asks for; coordinators are found."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import typer
import yaml
from manifests import ROOT, Object, built, name_of, of_kind

from specpipe.cluster.config import ClusterConfig
from specpipe.cluster.plan import plan_group
from specpipe.cluster.reading import fill_cluster
from specpipe.launcher.plan import COORDINATOR, DRAFT_WORKER, TARGET_WORKER

NAME, SERVICE = "overlays/kuberay", "overlays/kuberay-service"
DOCKERFILE = (ROOT / "k8s/docker/Dockerfile").read_text()


def one(kind: str, name: str = NAME) -> Object:
    (found,) = of_kind(built(name), kind)
    return found


def cluster_config(name: str = NAME) -> ClusterConfig:
    return fill_cluster(yaml.safe_load(one("ConfigMap", name)["data"]["cluster.yaml"]), "cluster.yaml")


def groups() -> dict[str, Object]:
    return {group["groupName"]: group for group in one("RayCluster")["spec"]["workerGroupSpecs"]}


def resources_of(group: Object) -> dict[str, float]:
    """Of one of its pods, as Ray counts them."""
    parameters = group["rayStartParams"]
    (container,) = group["template"]["spec"]["containers"]
    others = json.loads(parameters["resources"].strip("'\"").replace('\\"', '"')) if "resources" in parameters else {}
    gpus = container["resources"]["limits"].get("nvidia.com/gpu", 0)
    return {"CPU": float(parameters["num-cpus"]), "GPU": float(gpus), **others}


def test_the_file_is_one_that_up_takes_and_points_at_the_head() -> None:
    config = cluster_config()
    assert config.ray.address == f"ray://{name_of(one('RayCluster'))}-head-svc:10001"
    (head,) = one("RayCluster")["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert {"name": "client", "containerPort": 10001} in head["ports"]


def test_a_pod_of_each_group_holds_a_whole_group_of_the_service() -> None:
    for role in (TARGET_WORKER, DRAFT_WORKER, COORDINATOR):
        offered = resources_of(groups()[role])
        bundles = plan_group(cluster_config(), role).bundles
        asked = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in bundles[0]}
        assert all(offered.get(name, 0) >= amount for name, amount in asked.items()), (role, offered, asked)


def test_pods_at_the_start_hold_all_that_is_asked_for_at_the_start() -> None:
    config = cluster_config()
    counts = {
        TARGET_WORKER: config.target_workers.count,
        DRAFT_WORKER: config.draft_workers.count,
        COORDINATOR: config.coordinators.count,
    }
    for role, count in counts.items():
        group, plan = groups()[role], plan_group(config, role)
        for name in plan.bundles[0]:
            asked = count * sum(bundle[name] for bundle in plan.bundles)
            assert group["replicas"] * resources_of(group)[name] >= asked, (role, name)


def test_pods_at_most_hold_what_autoscaling_may_ask_for() -> None:
    config = cluster_config()
    assert config.autoscale.draft_workers is not None
    assert config.autoscale.target_workers is not None
    most = {TARGET_WORKER: config.autoscale.target_workers.max, DRAFT_WORKER: config.autoscale.draft_workers.max}
    for role, count in most.items():
        plan = plan_group(config, role)
        asked = count * sum(bundle["GPU"] for bundle in plan.bundles)
        assert groups()[role]["maxReplicas"] * resources_of(groups()[role])["GPU"] >= asked


def test_no_two_coordinators_share_a_pod_and_so_a_port() -> None:
    config = cluster_config()
    assert config.coordinators.port == one("Service")["spec"]["ports"][0]["targetPort"]
    assert resources_of(groups()[COORDINATOR])["coordinator"] == config.coordinators.resources["coordinator"] == 1
    for role, group in groups().items():
        selected = one("Service")["spec"]["selector"].items() <= group["template"]["metadata"]["labels"].items()
        assert selected == (role == COORDINATOR)
    assert all("coordinator" not in resources_of(groups()[role]) for role in (TARGET_WORKER, DRAFT_WORKER))


def test_the_job_says_up_with_the_token_that_ray_asks_for() -> None:
    from specpipe.cli.app import app

    (container,) = one("Job")["spec"]["template"]["spec"]["containers"]
    command: Any = typer.main.get_command(app)
    assert container["args"][:2] == ["specpipe", "up"]
    command.commands["up"].make_context("up", list(container["args"][2:]))
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "cluster")
    assert container["args"][2] == f"{mount['mountPath']}/cluster.yaml"
    environment = {variable["name"]: variable for variable in container["env"]}
    assert environment["RAY_AUTH_MODE"]["value"] == one("RayCluster")["spec"]["authOptions"]["mode"] == "token"
    secret = environment["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": name_of(one("RayCluster")), "key": "auth_token"}


def test_a_ray_service_is_the_same_cluster_and_begins_the_service_itself() -> None:
    served = one("RayService", SERVICE)["spec"]
    assert served["rayClusterConfig"] == one("RayCluster")["spec"]
    assert of_kind(built(SERVICE), "RayCluster", "Job") == []
    (application,) = yaml.safe_load(served["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    assert f"def {name}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text()
    (head,) = served["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    (mount,) = (m for m in head["volumeMounts"] if m["name"] == "cluster")
    assert application["args"] == {"file": f"{mount['mountPath']}/cluster.yaml"}
    ours = cluster_config(SERVICE)
    assert (ours.ray.address, ours.ray.namespace) == ("auto", "serve")
    assert replace(ours, ray=cluster_config().ray) == cluster_config()


def all_pods() -> list[Object]:
    spec = one("RayCluster")["spec"]
    templates = [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]
    return [*(template["spec"] for template in templates), one("Job")["spec"]["template"]["spec"]]


def test_pods_have_no_rights_they_do_not_need_and_one_image() -> None:
    from specpipe import __version__

    for pod in all_pods():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = pod["containers"]
        assert container["image"].rpartition("/")[2] == f"ray:{__version__}"
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_processes_of_the_service_give_way_to_none_on_their_node() -> None:
    for group in groups().values():
        (container,) = group["template"]["spec"]["containers"]
        assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"]


def test_the_image_has_ray_as_the_extra_wants_it_and_serves_kuberays_probes() -> None:
    assert 'ARG RAY="ray[default,serve]>=2.60,<3"' in DOCKERFILE
    stage = DOCKERFILE.partition("AS ray\n")[2].partition("FROM ")[0]
    assert "COPY --from=with-ray" in stage
    assert "wget" in stage
    assert "USER 10001" in stage
    assert str(one("RayCluster")["spec"]["rayVersion"]).startswith("2.60.")
