"""A whole service on a Ray in a network namespace with loopback alone, and commands beside it.

Ray listens on all interfaces; in the namespace there is but one. The Ray is that of a `specpipe up` (`local_cluster`),
or a head that was there before (`ray_head`).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from running import READY_TIMEOUT_S, end_process_tree, environment, specpipe

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
NUM_TRIES: Final = 3  # of a head to start
RAY: Final = "127.0.0.1:6379"
RAY_CLIENT: Final = "127.0.0.1:10001"
HEAD_FLAGS: Final = (
    "--head",
    "--block",  # as its own process, which ends all of it when it ends
    "--node-ip-address=127.0.0.1",
    f"--port={RAY.rpartition(':')[2]}",
    f"--ray-client-server-port={RAY_CLIENT.rpartition(':')[2]}",
    "--num-cpus=4",
    "--object-store-memory=80000000",
    "--include-dashboard=false",
    "--disable-usage-stats",
)
DIAL: Final = """
import socket, sys
for address in sys.argv[1:]:
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=10).close()
"""

NEEDS_RAY: Final = [
    pytest.mark.skipif(not any(importlib.metadata.distributions(name="ray")), reason="Ray is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root"),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}"),
]


@dataclass(kw_only=True)
class Namespace:
    """Where a process is that sees loopback alone, and commands beside it."""

    process: subprocess.Popen[str]
    environment: dict[str, str]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A specpipe command beside it."""
        return self.inside(specpipe(*arguments))

    def inside(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """A command in the network namespace."""
        return self._run([*self._entered, *command])

    def begin(self, command: list[str]) -> subprocess.Popen[str]:
        """The same, beside the test: it runs until its standard input ends."""
        return subprocess.Popen(
            [*self._entered, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    @property
    def _entered(self) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.process.pid}/ns/net", "--"]

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            env=self.environment,
            check=False,
        )


@dataclass(kw_only=True)
class Cluster(Namespace):
    """A service that is ready, on a Ray in the namespace."""

    file: Path
    ready: dict[str, Any]  # as it was said by `up --json`

    @property
    def address(self) -> str:
        """Of its coordinator."""
        return str(self.ready["grpc"][0])

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

    def pages(self, replicas: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        """What the autoscaler reads of each of these processes; None: of all in the ready line."""
        addresses = [replica["metrics"] for replica in replicas or self.ready["replicas"]]
        said = self.inside([sys.executable, "-c", READ_PAGES, *addresses])
        assert said.returncode == 0, said.stderr
        pages: list[dict[str, Any]] = json.loads(said.stdout)
        return pages

    def answer(self, *flags: str, num_tokens: int = NUM_TOKENS) -> list[int]:
        """Greedy, and as long as it is wanted."""
        said = self.run(
            "generate",
            "--connect",
            self.address,
            "--max-tokens",
            str(num_tokens),
            "--temperature",
            "0",
            "--ignore-eos",
            "--json",
            *flags,
            PROMPT,
        )
        assert said.returncode == 0, said.stderr
        token_ids: list[int] = json.loads(said.stdout)["token_ids"]
        assert len(token_ids) == num_tokens
        return token_ids


@dataclass(kw_only=True)
class LocalCluster(Cluster):
    """One whose Ray is that of its `up`."""

    ready_s: float  # that `up` took until it was ready

    @property
    def up(self) -> subprocess.Popen[str]:
        return self.process

    def outside(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A specpipe command of the same user, which reaches nothing: for when `up` has ended."""
        return self._run(specpipe(*arguments))


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Ray makes sockets in it."""
    path = Path(tempfile.mkdtemp(prefix="sp-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def local_cluster(folder: Path, text: str) -> Iterator[LocalCluster]:
    """The service that the text of a CLUSTER.yaml describes. Nothing of it is left after the block."""
    file, log, env = folder / "cluster.yaml", folder / "log", environment_in(folder)
    file.write_text(text)
    began_s = time.monotonic()
    with log.open("w") as stderr:
        command = alone(specpipe("up", str(file), "--json"))
        up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env)
    try:
        ready = json.loads(line_of(up, log))
        ready_s = time.monotonic() - began_s
        yield LocalCluster(process=up, file=file, environment=env, ready=ready, ready_s=ready_s)
    finally:
        end_process_tree(up, patience_s=COMMAND_TIMEOUT_S)


@contextlib.contextmanager
def ray_head(folder: Path, python: str = sys.executable) -> Iterator[Namespace]:
    """A Ray that is there before any `up`: its head, at RAY and, for clients from elsewhere, at RAY_CLIENT. It asks for
    a token. `python`: the one that has it. Nothing of it is left after the block."""
    patience = {"RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": f"{READY_TIMEOUT_S:.0f}"}
    env = environment_in(folder) | patience | {"RAY_AUTH_MODE": "token"}
    token = [python, "-m", "ray.scripts.scripts", "get-auth-token", "--generate"]
    subprocess.run(token, env=env, check=True, capture_output=True, timeout=COMMAND_TIMEOUT_S)
    for _ in range(NUM_TRIES):  # it gives its own processes 30 s, which a busy machine may not
        head = _begun_head(env, python, folder / "head.log")
        try:
            if _answers(head, python):
                yield head
                return
        finally:
            end_process_tree(head.process, patience_s=COMMAND_TIMEOUT_S)
    raise AssertionError((folder / "head.log").read_text()[-3000:])


def _begun_head(env: dict[str, str], python: str, log: Path) -> Namespace:
    with log.open("w") as output:
        command = alone([python, "-m", "ray.scripts.scripts", "start", *HEAD_FLAGS])
        process = subprocess.Popen(command, stdout=output, stderr=output, text=True, env=env)
    return Namespace(process=process, environment=env)


def _answers(head: Namespace, python: str) -> bool:
    """Once it does, or has ended."""
    deadline = time.monotonic() + COMMAND_TIMEOUT_S
    while head.process.poll() is None and time.monotonic() < deadline:
        if not head.inside([python, "-c", DIAL, RAY, RAY_CLIENT]).returncode:
            return True
    return False


def environment_in(folder: Path) -> dict[str, str]:
    """Of a user whose files are all there."""
    kept = {name: value for name, value in environment().items() if not name.startswith("RAY_")}
    return kept | {"HOME": str(folder), "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}


def alone(command: list[str]) -> list[str]:
    """The command in a network namespace of its own."""
    return ["unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]


def line_of(process: subprocess.Popen[str], log: Path) -> str:
    """The first that it says. Raises AssertionError with the end of its log if it says none in time, or ends."""
    assert process.stdout is not None
    is_there, _, _ = select.select([process.stdout], [], [], COMMAND_TIMEOUT_S)
    line = process.stdout.readline() if is_there else ""
    assert line, log.read_text()[-3000:]
    return line
