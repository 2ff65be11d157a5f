"""Services and commands as a user runs them: real processes, ended again whatever happens.

Every service of the whole suite is started here, so that their number stays in sight (15 at most in `make test`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

# 15 s on a quiet machine; the machine that runs tests seldom is.
READY_TIMEOUT_S = float(os.environ.get("SPECPIPE_READY_TIMEOUT_S", "150"))


@dataclass(kw_only=True)
class RunningService:
    """A `specpipe serve --json` that is ready."""

    process: subprocess.Popen[str]
    address: str
    http: str | None  # HOST:PORT of the live page
    processes: list[dict[str, Any]]
    log: Path
    exit_code: int | None = field(default=None)

    def pid(self, role: str) -> int:
        """Of the first process with this role now: a restarted worker has another than the ready line says."""
        return next(pid for pid, command in self.children() if role in command)

    def children(self) -> list[tuple[int, list[str]]]:
        found = []
        for child in psutil.Process(self.process.pid).children():
            try:
                found.append((child.pid, child.cmdline()))
            except psutil.NoSuchProcess:
                continue
        return found

    def address_of(self, role: str) -> str:
        return next(p["address"] for p in self.processes if p["role"] == role)

    def workers(self, role: str) -> list[tuple[int, str]]:
        """Process ids, as the ready line says, and addresses of all processes with this role."""
        return [(p["pid"], p["address"]) for p in self.processes if p["role"] == role]

    def terminate(self, timeout_s: float = 30.0) -> int:
        """SIGTERM. Returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        self.exit_code = self.process.wait(timeout_s)
        return self.exit_code


def specpipe(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "specpipe", *arguments]


@contextmanager
def running_service(log: Path, *flags: str) -> Iterator[RunningService]:
    """Start `serve` on a free port. After the block neither it nor any child of it runs."""
    with log.open("w") as stderr:
        own = [] if "--no-http" in flags or "--http-port" in flags else ["--http-port", "0"]
        process = subprocess.Popen(
            specpipe("serve", "--json", "--port", "0", *own, *flags),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment(),
        )
        try:
            ready = json.loads(_read_ready_line(process, log))
            yield RunningService(
                process=process, address=ready["grpc"], http=ready["http"], processes=ready["processes"], log=log
            )
        finally:
            end_process_tree(process)


@contextmanager
def running_part(log: Path, *arguments: str) -> Iterator[str]:
    """Start one process of a service by its own command, on a free port. Yields the address at which it serves."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            specpipe(*arguments), stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment()
        )
        try:
            yield _read_ready_line(process, log).strip()
        finally:
            end_process_tree(process)


def run_command(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run `specpipe` to its end."""
    return subprocess.run(
        specpipe(*arguments), capture_output=True, text=True, timeout=timeout_s, env=environment(), check=False
    )


def write_lines(path: Path, *lines: object) -> str:
    """A file of JSON lines. Returns its path as a flag wants it."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def environment() -> dict[str, str]:
    """Ours, on few threads, and without a terminal's colours or width."""
    kept = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLUMNS")}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end_process_tree(process: subprocess.Popen[str], patience_s: float = 20.0) -> None:
    """SIGTERM, then SIGKILL for whatever is left. Raises AssertionError if children outlived their parent."""
    children = descendants(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=5)
    for child in alive:
        child.kill()
    assert not alive, f"still running after their parent: {alive}"


def _read_ready_line(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        readable, _, _ = select.select([process.stdout], [], [], 0.5)
        if readable:
            break
    line = process.stdout.readline() if readable else ""
    assert line, f"not ready: {log.read_text()[-3000:]}"
    return line
