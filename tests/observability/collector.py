"""A real collector, rotel, between specpipe and an OTLP receiver of ours."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_server import wait_for

SETTINGS = {
    "ROTEL_EXPORTER": "otlp",
    "ROTEL_OTLP_EXPORTER_PROTOCOL": "grpc",
    "ROTEL_OTLP_EXPORTER_RETRY_INITIAL_BACKOFF": "1s",
    "ROTEL_BATCH_TIMEOUT": "100ms",
}


class NoCollectorError(Exception):
    """There is none, or not for this machine."""


@contextmanager
def running_collector(folder: Path, *, spans_to: str, metrics_to: str) -> Iterator[str]:
    """Yields HOST:PORT where it takes OTLP over gRPC; passes all of it on. Raises NoCollectorError."""
    log = folder / "rotel.log"
    address, http = free_address(), free_address()
    settings = {
        **SETTINGS,
        "ROTEL_OTLP_GRPC_ENDPOINT": address,
        "ROTEL_OTLP_HTTP_ENDPOINT": http,
        "ROTEL_OTLP_EXPORTER_ENDPOINT": f"http://{spans_to}",
        "ROTEL_OTLP_EXPORTER_METRICS_ENDPOINT": f"http://{metrics_to}",
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            [agent(), "start"], env={**os.environ, **settings}, stdout=output, stderr=subprocess.STDOUT, cwd=folder
        )
    try:
        wait_for("collector", lambda: answers(address) or process.poll() is not None, log)
        if process.poll() is not None:
            raise NoCollectorError(f"rotel does not run here: {log.read_text()[-500:]}")
        yield address
    finally:
        process.terminate()
        process.wait(30)


def agent() -> str:
    """The program that the package holds."""
    found = importlib.util.find_spec("rotel")
    if found is None or found.origin is None:
        raise NoCollectorError("rotel is not installed")
    return str(Path(found.origin).with_name("rotel-agent"))


def free_address() -> str:
    """rotel cannot be asked which port it was given."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def answers(address: str) -> bool:
    host, _, port = address.partition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1):
            return True
    except OSError:
        return False
