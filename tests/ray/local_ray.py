"""A whole service on a local Ray: `specpipe up` in a network namespace with loopback alone, and commands beside it.

Ray listens on all interfaces; in the namespace there is but one.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
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

NEEDS_RAY: Final = [
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
        return ["nsenter", f"--net=/proc/{self.up.pid}/ns/net", "--"]

    def outside(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A specpipe command of the same user, which reaches nothing: for when `up` has ended."""
        return self._run(specpipe(*arguments))

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
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


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Ray makes sockets in it."""
    path = Path(tempfile.mkdtemp(prefix="sp-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def local_cluster(folder: Path, text: str) -> Iterator[LocalCluster]:
    """The service that the text of a CLUSTER.yaml describes. Nothing of it is left after the block."""
    file = folder / "cluster.yaml"
    file.write_text(text)
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
