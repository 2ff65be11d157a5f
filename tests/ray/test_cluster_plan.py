"""What a cluster comes to: bundles and command lines. specpipe.cluster.plan."""

from __future__ import annotations

from typing import Any

import pytest

from specpipe.cluster.config import ClusterConfig
from specpipe.cluster.connection import local_options
from specpipe.cluster.plan import GroupPlan, counts_at_start, plan_group, rank_process
from specpipe.cluster.reading import fill_cluster
from specpipe.config import RANK_TOKEN_VARIABLE
from specpipe.launcher.plan import COORDINATOR, DRAFT_WORKER, TARGET_WORKER


def config(**content: Any) -> ClusterConfig:
    return fill_cluster(content, "cluster.yaml")


def flag(plan: GroupPlan, name: str) -> str:
    arguments = plan.process.arguments
    return arguments[arguments.index(name) + 1]


def test_a_target_worker_is_a_bundle_for_each_rank_in_one_place() -> None:
    plan = plan_group(config(target_workers={"tensor_parallel_size": 4, "cpus": 2, "gpus": 1}), TARGET_WORKER)
    assert plan.bundles == ({"CPU": 2.0, "GPU": 1.0},) * 4
    assert plan.placement == "STRICT_PACK"
    assert (flag(plan, "--tensor-parallel-size"), flag(plan, "--device")) == ("4", "cuda")


@pytest.mark.parametrize(
    ("placement", "size", "is_distant"),
    [
        ("STRICT_PACK", 4, False),
        ("PACK", 4, True),
        ("SPREAD", 2, True),
        ("STRICT_SPREAD", 2, True),
        ("SPREAD", 1, False),
    ],
)
def test_ranks_that_may_be_on_several_nodes_are_a_process_each(placement: str, size: int, is_distant: bool) -> None:
    plan = plan_group(config(target_workers={"tensor_parallel_size": size, "placement": placement}), TARGET_WORKER)
    assert plan.has_distant_ranks == is_distant
    assert len(plan.bundles) == size


def test_ranks_are_one_command_line_but_for_their_number_and_the_secret_is_on_none() -> None:
    plan = plan_group(config(target_workers={"tensor_parallel_size": 2, "placement": "SPREAD"}), TARGET_WORKER)
    first, second = (rank_process(plan.process, rank, "10.0.0.1:6003", "a secret of them") for rank in range(2))
    assert first.arguments[:-4] == second.arguments[:-4] == plan.process.arguments
    assert second.arguments[-4:] == ("--rank", "1", "--rendezvous", "10.0.0.1:6003")
    assert first.environment == second.environment == ((RANK_TOKEN_VARIABLE, "a secret of them"),)


def test_draft_workers_may_share_a_gpu() -> None:
    plan = plan_group(config(draft_workers={"gpus": 0.25, "cpus": 0.5, "resources": {"fast": 1}}), DRAFT_WORKER)
    assert plan.bundles == ({"CPU": 0.5, "GPU": 0.25, "fast": 1.0},)
    assert flag(plan, "--device") == "cuda"


def test_a_draft_may_have_a_dtype_of_its_own() -> None:
    models = {"dtype": "bfloat16", "draft_dtype": "int8"}
    assert flag(plan_group(config(models=models), DRAFT_WORKER), "--dtype") == "int8"
    assert flag(plan_group(config(models=models), TARGET_WORKER), "--dtype") == "bfloat16"
    assert flag(plan_group(config(models={"dtype": "float32"}), DRAFT_WORKER), "--dtype") == "float32"


def test_cpus_of_a_rank_are_its_compute_threads() -> None:
    plan = plan_group(config(target_workers={"cpus": 8}), TARGET_WORKER)
    assert (flag(plan, "--num-threads"), flag(plan, "--device")) == ("8", "cpu")


@pytest.mark.parametrize("role", [TARGET_WORKER, DRAFT_WORKER, COORDINATOR])
def test_processes_listen_where_their_node_is_reached_and_serve_metrics(role: str) -> None:
    plan = plan_group(config(), role)
    assert flag(plan, "--host") == "{host}"
    assert flag(plan, "--metrics-port") == "0"


def test_a_coordinator_reads_its_workers_from_files() -> None:
    plan = plan_group(config(), COORDINATOR)
    assert flag(plan, "--target") == "file:{workers}/target"
    assert flag(plan, "--draft") == "file:{workers}/draft"
    assert flag(plan, "--tokenizer") == "{demo_target}"
    without = plan_group(config(models={"draft": "ngram"}), COORDINATOR)
    assert "--draft" not in without.process.arguments
    assert flag(without, "--drafter") == "ngram"


def test_every_process_has_the_certificates() -> None:
    tls = {"cert": "/tls/tls.crt", "key": "/tls/tls.key", "ca": "/tls/ca.crt"}
    for role in (TARGET_WORKER, DRAFT_WORKER, COORDINATOR):
        plan = plan_group(config(tls=tls), role)
        assert [flag(plan, f"--tls-{name}") for name in tls] == list(tls.values())


@pytest.mark.parametrize(
    ("content", "num_drafts"),
    [
        ({"draft_workers": {"count": 3}}, 3),
        ({"draft_workers": {"count": 3}, "requests": {"mode": False}}, 0),
        ({"draft_workers": {"count": 3}, "models": {"draft": "none"}}, 0),
        ({"draft_workers": {"count": 3}, "models": {"target": "/models/a"}}, 0),  # it drafts by its own lookup
    ],
)
def test_draft_workers_are_there_only_if_a_model_drafts(content: dict[str, Any], num_drafts: int) -> None:
    assert counts_at_start(config(**content))[DRAFT_WORKER] == num_drafts


def test_a_local_ray_has_all_that_is_asked_for_and_that_scaling_may_ask_for() -> None:
    options = local_options(
        config(
            target_workers={"cpus": 100, "resources": {"big": 1}},
            draft_workers={"count": 2, "cpus": 10},
            autoscale={"draft_workers": {"max": 5}},
        )
    )
    assert options["num_cpus"] == 151  # 100 + 5 * 10 + 0.25
    assert options["resources"] == {"big": 1.0}
    assert options["_node_ip_address"] == "127.0.0.1"
