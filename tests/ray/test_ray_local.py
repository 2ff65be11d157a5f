"""`specpipe up | status | down` on a local Ray: real processes in a network namespace with loopback alone.

One cluster for the whole file; its tests build on one another.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from local_ray import COMMAND_TIMEOUT_S, NEEDS_RAY, NUM_TOKENS, LocalCluster, local_cluster, short_folder
from running import descendants

pytestmark = [pytest.mark.timeout(1200), *NEEDS_RAY]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[LocalCluster]:
    text = "name: test\ngrace_s: 2\ntarget_workers: {tensor_parallel_size: 2, placement: SPREAD}\n"
    with local_cluster(folder, text) as service:
        yield service


def test_up_ends_in_a_service_that_answers_as_plain_decoding_does(cluster: LocalCluster, folder: Path) -> None:
    assert [replica["state"] for replica in cluster.ready["replicas"]] == ["ready"] * 3
    assert cluster.answer() == cluster.answer("--mode", "off")
    target, draft, coordinator = cluster.pages()
    assert coordinator["counts"]["tokens"] >= 2 * NUM_TOKENS
    assert draft["counts"]["draft_step_s"] > 0 == target["counts"]["draft_step_s"]
    assert (folder / ".ray" / "auth_token").is_file(), "Ray asks for a token"
    assert all(replica["address"].startswith("127.0.0.1:") for replica in cluster.ready["replicas"])


@pytest.mark.slow  # make test has its parts in test_cluster_service.py and test_process_health.py
def test_what_is_killed_or_frozen_is_back_with_the_reason(cluster: LocalCluster) -> None:
    """A rank and an actor, which take their groups with them, and the coordinator."""
    expected = cluster.answer()
    target, draft, coordinator = cluster.status()["replicas"]
    os.kill(coordinator["pid"], signal.SIGSTOP)
    (rank,) = target["ranks"]
    os.kill(rank, signal.SIGKILL)
    keeper = psutil.Process(draft["pid"]).parent()
    assert keeper is not None
    keeper.kill()
    status = cluster.wait_for(lambda now: all(replica["restarts"] for replica in now["replicas"]))
    replicas = {replica["name"]: replica for replica in status["replicas"]}
    assert "rank 1" in replicas["target-worker-0"]["ends"][0]["reason"]
    assert not {target["pid"], rank} & {replicas["target-worker-0"]["pid"], *replicas["target-worker-0"]["ranks"]}
    assert replicas["draft-worker-0"]["ends"], replicas
    assert not psutil.pid_exists(draft["pid"]), "a process ends with its actor"
    assert "it has not answered for" in replicas["coordinator-0"]["ends"][0]["reason"]
    assert cluster.answer() == expected
    assert any("serving on" in line for line in replicas["target-worker-0"]["log"])


@pytest.mark.slow
def test_a_controller_that_is_killed_takes_over_what_runs(cluster: LocalCluster) -> None:
    before = {replica["name"]: replica["pid"] for replica in cluster.status()["replicas"]}
    (controller,) = (p for p in psutil.process_iter() if is_controller_of(p, cluster))
    controller.kill()
    controller.wait(30)
    status = cluster.wait_for(lambda now: len(now["replicas"]) == 3)
    assert {replica["name"]: replica["pid"] for replica in status["replicas"]} == before
    assert cluster.answer() == cluster.answer("--mode", "off")


def test_a_second_up_of_the_name_is_refused(cluster: LocalCluster) -> None:
    said = cluster.run("up", str(cluster.file))
    assert said.returncode == 2
    assert "test is up already" in said.stderr


def test_down_ends_the_service_its_ray_and_up(cluster: LocalCluster) -> None:
    processes = descendants(cluster.up.pid)
    assert len(processes) > 3
    said = cluster.run("down", str(cluster.file))
    assert said.returncode == 0, said.stderr
    assert cluster.up.wait(COMMAND_TIMEOUT_S) == 0
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive
    said = cluster.outside("status", str(cluster.file))
    assert (said.returncode, said.stderr) == (1, "error: test is not up on this machine\n")


def is_controller_of(process: psutil.Process, cluster: LocalCluster) -> bool:
    """By its title, and by the folder: another Ray may run on this machine."""
    try:
        return "ray::Controller" in " ".join(process.cmdline()) and process.environ().get("HOME") == str(
            cluster.file.parent
        )
    except psutil.Error:
        return False
