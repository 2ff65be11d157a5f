"""The service as an application of the real Ray Serve, on a Ray in a network namespace with loopback alone.

`ray[serve]` is installed into an environment of its own, beside ours: half a minute, so in the slow set only.
"""

from __future__ import annotations

import importlib.metadata
import json
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from local_ray import COMMAND_TIMEOUT_S, NEEDS_RAY, RAY, Cluster, Namespace, ray_head, short_folder
from running import descendants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), *NEEDS_RAY]

ROOT = Path(__file__).parents[2]
INSTALL_S = 1200
CONTROLLER, REPLICA = "ray::Controller", "ray::ServeReplica"
READ_STATUS = (
    "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000/', timeout=60).read().decode())"
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of an environment with Ray Serve, and with all that ours has."""
    folder = tmp_path_factory.mktemp("serve") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    found = str(folder / "bin/python")
    where = [found, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    (own / "rest.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    wanted = f"ray[serve]=={importlib.metadata.version('ray')}"
    install = [sys.executable, "-m", "pip", "--python", found, "install", "-q", "--no-compile", wanted]
    done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        pytest.skip(f"{wanted} cannot be installed: {done.stderr[-500:]}")
    return found


@pytest.fixture
def head(python: str) -> Iterator[Namespace]:
    with short_folder() as folder, ray_head(folder, python) as here:
        yield here


def test_serve_begins_the_service_once_whoever_is_lost_meanwhile(head: Namespace, python: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"name: served\ngrace_s: 2\nray: {{address: '{RAY}', namespace: serve}}\n")
    application = "specpipe.cluster.serving:app"
    with head.begin([python, "-m", "ray.serve.scripts", "run", application, f"file={file}"]) as serve:
        try:
            wait_for(lambda: named(head, CONTROLLER), serve)[0].kill()
            (replica,) = named(head, REPLICA)
            status = wait_for(lambda: said_by_serve(head), serve)
            assert named(head, REPLICA) == [replica], "it has neither failed nor taken down what it has begun"
            cluster = Cluster(process=head.process, environment=head.environment, file=file, ready=status)
            cluster.wait_for(lambda now: len(now["replicas"]) == 3)
            assert cluster.answer() == cluster.answer("--mode", "off")
            before = pids(cluster)
            replica.kill()
            replica.wait(30)
            wait_for(lambda: named(head, REPLICA), serve)
            wait_for(lambda: said_by_serve(head), serve)
            assert pids(cluster) == before, "what is there is found"
        finally:
            serve.send_signal(signal.SIGINT)
            serve.communicate(timeout=COMMAND_TIMEOUT_S)
    down = head.run("down", str(file))
    assert down.returncode == 0, down.stderr


def named(head: Namespace, title: str) -> list[psutil.Process]:
    """Processes of actors, by what Ray calls them."""
    found = []
    for process in descendants(head.process.pid):
        try:
            if process.cmdline()[0].startswith(title):
                found.append(process)
        except (psutil.Error, IndexError):
            continue
    return found


def said_by_serve(head: Namespace) -> dict[str, Any] | None:
    """The status that the application says over HTTP; None while it says none."""
    said = head.inside([sys.executable, "-c", READ_STATUS])
    if said.returncode:
        return None
    status: dict[str, Any] = json.loads(said.stdout)
    return status


def pids(cluster: Cluster) -> list[int]:
    return [replica["pid"] for replica in cluster.status()["replicas"]]


def wait_for(look: Callable[[], Any], serve: subprocess.Popen[str]) -> Any:
    """What it sees at last."""
    deadline = time.monotonic() + COMMAND_TIMEOUT_S
    while not (seen := look()):
        assert serve.poll() is None, "Ray Serve has ended"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return seen
