"""`specpipe up | status | down` on a Ray that is there already, by each way of reaching it. It asks for a token.

One head for the whole file, as its own process in a network namespace with loopback alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from findings import record
from local_ray import NEEDS_RAY, RAY, RAY_CLIENT, Cluster, Namespace, ray_head, short_folder
from running import descendants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), *NEEDS_RAY]

ADDRESSES = [RAY, f"ray://{RAY_CLIENT}", "auto"]
OURS = ("coordinator", "draft-worker", "target-worker")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture(scope="module")
def head(folder: Path) -> Iterator[Namespace]:
    with ray_head(folder) as here:
        yield here


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_service_stays_after_up_answers_as_plain_decoding_does_and_ends_by_down(
    address: str, head: Namespace, folder: Path
) -> None:
    cluster = begun(head, folder, address)
    assert [replica["state"] for replica in cluster.status()["replicas"]] == ["ready"] * 3
    expected = cluster.answer("--mode", "off")
    assert cluster.answer() == expected
    second = head.run("up", str(cluster.file))
    assert (second.returncode, "existing is up already" in second.stderr) == (2, True), second.stderr
    processes = ours(head)
    assert len(processes) == 3
    down = head.run("down", str(cluster.file))
    assert down.returncode == 0, down.stderr
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive
    assert head.process.poll() is None, "the Ray is not ours to end"
    for command in ("status", "down"):
        said = head.run(command, str(cluster.file))
        assert (said.returncode, last_line(said.stderr)) == (1, f"error: existing is not up on Ray at {address}")
    record(f"{address}: {len(expected)} equal tokens")


@pytest.mark.parametrize("address", [RAY, f"ray://{RAY_CLIENT}"])
def test_without_the_token_nobody_is_let_in_and_hears_why(address: str, head: Namespace, folder: Path) -> None:
    stranger = folder / "stranger"
    stranger.mkdir(exist_ok=True)
    outsider = Namespace(process=head.process, environment=head.environment | {"HOME": str(stranger)})
    said = outsider.run("status", str(described(folder, address)))
    assert said.returncode == 1
    assert said.stdout == ""
    assert last_line(said.stderr).startswith(f"error: Ray at {address}: ")
    assert "token" in last_line(said.stderr)


def last_line(text: str) -> str:
    """Ray itself may say before it that it finds no way to other machines."""
    return text.splitlines()[-1]


def described(folder: Path, address: str) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(f"name: existing\ngrace_s: 2\nray: {{address: '{address}'}}\n")
    return file


def begun(head: Namespace, folder: Path, address: str) -> Cluster:
    """Once `up` has returned."""
    file = described(folder, address)
    up = head.run("up", str(file), "--json")
    assert up.returncode == 0, up.stderr
    return Cluster(process=head.process, environment=head.environment, file=file, ready=json.loads(up.stdout))


def ours(head: Namespace) -> list[psutil.Process]:
    """Processes of a service among all those that the head has begun."""
    return [process for process in descendants(head.process.pid) if is_ours(process)]


def is_ours(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return words[2:4] == ["-m", "specpipe"] and words[4] in OURS
