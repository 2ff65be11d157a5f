"""`specpipe up | status | down` on a local Ray: real processes in a network namespace with loopback alone.

One cluster for the whole file; its tests build on one another.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from running import READY_TIMEOUT_S, descendants, end_process_tree, environment, specpipe

COMMAND_TIMEOUT_S: Final = 2 * READY_TIMEOUT_S
TOOLS: Final = ("unshare", "nsenter", "ip")
NUM_TOKENS: Final = 24
READ_PAGES: Final = """
import asyncio, dataclasses, json, sys
from specpipe.cluster.load import fetch_pages
pages = asyncio.run(fetch_pages(sys.argv[1:]))
print(json.dumps([dataclasses.asdict(pages[address]) for address in sys.argv[1:]]))
"""
PROMPT: Final = "def read_lines(path):"

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not any(importlib.metadata.distributions(name="ray")), reason="Ray is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root"),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}"),
]


@dataclass(kw_only=True)
class LocalCluster:
    """An `up` that is ready, and commands beside it."""

    up: subprocess.Popen[str]
    file: Path
    environment: dict[str, str]
    address: str  # of its coordinator
    ready: dict[str, Any]  # as it was said by `up --json`

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A specpipe command beside it."""
        return self.inside(specpipe(*arguments))

    def inside(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """A command in the network namespace of the cluster."""
        return subprocess.run(
            ["nsenter", f"--net=/proc/{self.up.pid}/ns/net", "--", *command],
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            env=self.environment,
            check=False,
        )

    def status(self) -> dict[str, Any]:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            said = self.run("status", str(self.file), "--json", "--logs")
            if said.stdout:
                status: dict[str, Any] = json.loads(said.stdout)
                assert status["ready"] == (said.returncode == 0)
                return status
            assert time.monotonic() < deadline, said.stderr  # a controller that begins again says nothing yet

    def replica(self, name: str) -> dict[str, Any]:
        return next(replica for replica in self.status()["replicas"] if replica["name"] == name)

    def wait_for(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first status that does."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            status = self.status()  # takes seconds: no pause is needed
            if status["ready"] and holds(status):
                return status
            assert time.monotonic() < deadline, status

    def pages(self) -> list[dict[str, Any]]:
        """What the autoscaler reads of each process, in the order of the ready line."""
        addresses = [replica["metrics"] for replica in self.ready["replicas"]]
        said = self.inside([sys.executable, "-c", READ_PAGES, *addresses])
        assert said.returncode == 0, said.stderr
        pages: list[dict[str, Any]] = json.loads(said.stdout)
        return pages

    def answer(self, *flags: str) -> list[int]:
        said = self.run(
            "generate",
            "--connect",
            self.address,
            "--max-tokens",
            str(NUM_TOKENS),
            "--temperature",
            "0",
            "--ignore-eos",
            "--json",
            *flags,
            PROMPT,
        )
        assert said.returncode == 0, said.stderr
        token_ids: list[int] = json.loads(said.stdout)["token_ids"]
        assert len(token_ids) == NUM_TOKENS
        return token_ids


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Short: Ray makes sockets in it."""
    path = Path(tempfile.mkdtemp(prefix="sp-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[LocalCluster]:
    file = folder / "cluster.yaml"
    file.write_text("name: test\ngrace_s: 2\ntarget_workers: {tensor_parallel_size: 2, placement: SPREAD}\n")
    env = {name: value for name, value in environment().items() if not name.startswith("RAY_")}
    env |= {"HOME": str(folder), "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    inside = ["unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    with (folder / "log").open("w") as log:
        up = subprocess.Popen(
            inside + specpipe("up", str(file), "--json"), stdout=subprocess.PIPE, stderr=log, text=True, env=env
        )
    try:
        assert up.stdout is not None
        line = up.stdout.readline()  # ends, too, when the process does
        assert line, (folder / "log").read_text()[-3000:]
        ready = json.loads(line)
        yield LocalCluster(up=up, file=file, environment=env, address=ready["grpc"][0], ready=ready)
    finally:
        end_process_tree(up, patience_s=COMMAND_TIMEOUT_S)


def test_up_ends_in_a_service_that_answers_as_plain_decoding_does(cluster: LocalCluster, folder: Path) -> None:
    assert [replica["state"] for replica in cluster.ready["replicas"]] == ["ready"] * 3
    assert cluster.answer() == cluster.answer("--mode", "off")
    target, draft, coordinator = cluster.pages()
    assert coordinator["counts"]["tokens"] >= 2 * NUM_TOKENS
    assert draft["counts"]["draft_step_s"] > 0 == target["counts"]["draft_step_s"]
    assert (folder / ".ray" / "auth_token").is_file(), "Ray asks for a token"
    assert all(replica["address"].startswith("127.0.0.1:") for replica in cluster.ready["replicas"])


def test_a_rank_and_an_actor_that_are_killed_take_their_group_with_them_and_it_is_back_with_the_reason(
    cluster: LocalCluster,
) -> None:
    expected = cluster.answer()
    target, draft = (cluster.replica(name) for name in ("target-worker-0", "draft-worker-0"))
    (rank,) = target["ranks"]
    os.kill(rank, signal.SIGKILL)
    keeper = psutil.Process(draft["pid"]).parent()
    assert keeper is not None
    keeper.kill()
    status = cluster.wait_for(lambda now: all(r["restarts"] for r in now["replicas"] if r["role"] != "coordinator"))
    replicas = {replica["name"]: replica for replica in status["replicas"]}
    assert "rank 1" in replicas["target-worker-0"]["ends"][0]["reason"]
    assert not {target["pid"], rank} & {replicas["target-worker-0"]["pid"], *replicas["target-worker-0"]["ranks"]}
    assert replicas["draft-worker-0"]["ends"], replicas
    assert not psutil.pid_exists(draft["pid"]), "a process ends with its actor"
    assert cluster.answer() == expected
    assert any("serving on" in line for line in replicas["target-worker-0"]["log"])


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
    said = cluster.run("status", str(cluster.file))
    assert (said.returncode, said.stderr) == (1, "error: test is not up on this machine\n")


def is_controller_of(process: psutil.Process, cluster: LocalCluster) -> bool:
    """By its title, and by the folder: another Ray may run on this machine."""
    try:
        return "ray::Controller" in " ".join(process.cmdline()) and process.environ().get("HOME") == str(
            cluster.file.parent
        )
    except psutil.Error:
        return False
