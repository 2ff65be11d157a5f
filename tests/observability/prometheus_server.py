"""Debian's Prometheus on a free port, reading what a test tells it to."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import yaml
from debian_tools import program
from stack import PROMETHEUS, read_yaml

PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    url: str
    log: Path

    def query(self, expr: str) -> list[dict[str, Any]]:
        """An instant query. Raises AssertionError with Prometheus' own words if it is refused."""
        return list(self.get("query", query=expr)["result"])

    def get(self, call: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{call}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as refusal:
            raise AssertionError(f"{parameters}: {refusal.read().decode()}") from refusal

    def has_read(self, num_targets: int, *, since_s: float) -> bool:
        """Whether each of so many targets was read by a scrape that began after that moment (of `time.time()`)."""
        return len(self.query(f"timestamp(up == 1) > {since_s}")) == num_targets

    def has_evaluated(self, *, since_s: float) -> bool:
        """Whether each group of rules was evaluated after that moment."""
        groups = self.get("rules")["groups"]
        return all(datetime.fromisoformat(group["lastEvaluation"]).timestamp() > since_s for group in groups)

    def is_ready(self) -> bool:
        """It listens before it can answer."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=10):
                return True
        except urllib.error.HTTPError:
            return False

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        wait_for(what, condition, self.log)


@contextmanager
def running_prometheus(folder: Path, jobs: list[dict[str, Any]]) -> Iterator[Prometheus]:
    """Our rules, and these scrape jobs, each target read every second: tests are to be short."""
    log = folder / "prometheus.log"
    command = [
        program("prometheus", "prometheus"),
        f"--config.file={write_config(folder, jobs)}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
    try:
        server = Prometheus(url=f"http://{listening_address(process, log)}", log=log)
        server.wait_for("storage that is read", server.is_ready)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def write_config(folder: Path, jobs: list[dict[str, Any]]) -> Path:
    """That of compose, with other jobs and no patience."""
    config = read_yaml(PROMETHEUS / "compose.yaml")
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / pattern) for pattern in config["rule_files"]]
    config["scrape_configs"] = jobs
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def listening_address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Asked of the system, since port 0 is all that the program knows of it."""
    found: list[str] = []

    def is_listening() -> bool:
        assert process.poll() is None, f"it ended: {log.read_text()[-3000:]}"
        connections = psutil.Process(process.pid).net_connections("tcp4")
        found[:] = [f"{c.laddr.ip}:{c.laddr.port}" for c in connections if c.status == psutil.CONN_LISTEN]
        return bool(found)

    wait_for("a port to listen on", is_listening, log)
    return found[0]


def wait_for(what: str, condition: Callable[[], bool], log: Path, patience_s: float = PATIENCE_S) -> None:
    """Raises AssertionError with the end of the log if it does not come true."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} in {patience_s} s: {log.read_text()[-3000:]}"
        time.sleep(0.1)
