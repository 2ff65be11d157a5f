"""A backend that can be asked: arize-phoenix takes a request's spans over OTLP and tells them again.

It is installed into an environment of its own, since its dependencies are not ours: minutes, so in the slow set only.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from collector import answers, free_address
from observed import ask
from prometheus_server import wait_for
from running import running_service
from tiny_models import TinyPair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
INSTALL_S = 2400
START_S = 300.0
# Its OTLP receiver would listen on every interface of the machine, whatever its settings say.
ON_LOOPBACK = """
import sys
from grpc.aio import _server
listen = _server.Server.add_insecure_port
_server.Server.add_insecure_port = lambda self, address: listen(self, address.replace("[::]", "127.0.0.1"))
from phoenix.server.main import main
sys.argv = ["phoenix", "serve"]
main()
"""


def test_a_backend_shows_each_request_as_one_tree(tiny_pair: TinyPair, tmp_path: Path) -> None:
    with running_phoenix(tmp_path, installed_phoenix(tmp_path / "environment")) as (web, receiver):
        models = ("--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft))
        with running_service(tmp_path / "service.log", *models, "--otlp-endpoint", receiver, "--no-http") as service:
            told = asyncio.run(ask(service.address, ["asked-of-phoenix"]))
        spans = spans_at(web)
    (root,) = [span for span in spans if span["parent_id"] is None]
    assert root["name"] == "generate"
    assert len({span["context"]["trace_id"] for span in spans}) == 1
    assert {span["parent_id"] for span in spans} - {None} <= {span["context"]["span_id"] for span in spans}
    finished = told["asked-of-phoenix"].finished
    assert finished is not None
    counts = Counter(span["name"] for span in spans)
    assert counts["verify"] == counts["round"] >= finished.speculation.rounds
    assert counts["draft"] > 0


def installed_phoenix(folder: Path) -> Path:
    """Its Python. Skips where it cannot be installed."""
    given = os.environ.get("SPECPIPE_PHOENIX", "")  # of an environment that is there already
    if given:
        return Path(given)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [str(folder / "bin/python"), "-m", "pip", "install", "-q", "arize-phoenix"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        pytest.skip(f"arize-phoenix cannot be installed: {done.stderr[-500:]}")
    return folder / "bin/python"


@contextmanager
def running_phoenix(folder: Path, python: Path) -> Iterator[tuple[str, str]]:
    """HOST:PORT of its page and of its OTLP receiver."""
    web, receiver = free_address(), free_address()
    settings = {
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": web.rpartition(":")[2],
        "PHOENIX_GRPC_PORT": receiver.rpartition(":")[2],
        "PHOENIX_WORKING_DIR": str(folder / "phoenix"),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }
    log = folder / "phoenix.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [python, "-c", ON_LOOPBACK], env={**os.environ, **settings}, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait_for("phoenix", lambda: answers(web) and answers(receiver), log, START_S)
        yield web, receiver
    finally:
        process.terminate()
        process.wait(60)


def spans_at(web: str) -> list[dict[str, Any]]:
    """All of the project into which spans go that name none. Phoenix writes them down a little after it took them."""
    found: list[dict[str, Any]] = []

    def are_whole() -> bool:
        try:
            with urllib.request.urlopen(f"http://{web}/v1/projects/default/spans?limit=1000", timeout=10) as answer:
                found[:] = json.load(answer)["data"]
        except urllib.error.HTTPError:
            return False
        return any(span["name"] == "generate" for span in found)

    wait_for("spans", are_whole, Path(os.devnull))
    return found
