"""How long a start may take is one number: of the file, or of `up --timeout` where that is longer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from specpipe.cli import cluster as commands
from specpipe.cli.app import run
from specpipe.cluster.config import ClusterConfig
from specpipe.cluster.plan import ROLES, plan_group
from specpipe.cluster.reading import fill_cluster
from specpipe.errors import WorkerUnavailableError
from specpipe.launcher import child
from specpipe.launcher.child import ChildProcess
from specpipe.launcher.plan import DRAFT_WORKER, START_TIMEOUT_S, ProcessSpec

NEVER_READY = "import signal; signal.pause()"


@pytest.mark.parametrize("role", ROLES)
def test_every_process_of_a_cluster_has_the_time_that_the_file_gives(role: str) -> None:
    assert plan_group(ClusterConfig(), role).process.start_timeout_s == START_TIMEOUT_S
    config = fill_cluster({"models": {"load_timeout_s": 7200}}, "cluster.yaml")
    assert plan_group(config, role).process.start_timeout_s == 7200


async def test_a_process_that_does_not_serve_in_its_time_is_killed_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_command", lambda *_: [sys.executable, "-c", NEVER_READY])
    parent_fd, life_fd = os.pipe()
    spec = ProcessSpec(role=DRAFT_WORKER, arguments=(), start_timeout_s=0.01)
    try:
        with pytest.raises(WorkerUnavailableError, match=r"draft-worker was not ready after 0\.01 s"):
            await asyncio.wait_for(ChildProcess.start(spec, parent_fd), 60)
    finally:
        os.close(parent_fd)
        os.close(life_fd)
    assert not any(NEVER_READY in process.cmdline() for process in psutil.Process().children())


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `up` would have begun, and how long it would have waited, had there been a Ray."""
    given: dict[str, Any] = {}

    @contextlib.contextmanager
    def no_ray(config: ClusterConfig) -> Iterator[Any]:
        yield lambda: False

    async def note(config: ClusterConfig, own: Any, timeout_s: float, *_: Any) -> int:
        given.update(load_timeout_s=config.models.load_timeout_s, timeout_s=timeout_s)
        return 0

    monkeypatch.setattr(commands, "check_ray", lambda _: None)
    monkeypatch.setattr(commands, "new_ray", no_ray)
    monkeypatch.setattr(commands, "_up", note)
    return given


@pytest.mark.parametrize(
    ("text", "flags", "load_timeout_s", "timeout_s"),
    [
        ("", [], START_TIMEOUT_S, START_TIMEOUT_S),
        ("models: {load_timeout_s: 3600}", [], 3600, 3600),
        ("models: {load_timeout_s: 600}", ["--timeout", "1800"], 1800, 1800),
        ("models: {load_timeout_s: 600}", ["--timeout", "60"], 600, 60),
    ],
)
def test_up_waits_as_long_as_a_process_may_take_and_gives_it_as_long_as_it_waits(
    text: str, flags: list[str], load_timeout_s: float, timeout_s: float, begun: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    assert run(["up", str(path), *flags]) == 0
    assert begun == {"load_timeout_s": load_timeout_s, "timeout_s": timeout_s}


@pytest.mark.parametrize("timeout", ["0", "-1", "inf", "nan"])
def test_a_time_that_is_none_is_refused(
    timeout: str, begun: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("")
    assert run(["up", str(path), "--timeout", timeout]) == 2
    assert f"--timeout must be more than 0, got {timeout}" in capsys.readouterr().err
    assert not begun
