"""`specpipe leave`: whom it tells to end, whom it leaves alone, what it does without Ray. specpipe.cluster.leaving."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from specpipe.cli import cluster as commands
from specpipe.cli.app import run
from specpipe.cluster import leaving
from specpipe.cluster.keeper import Keeper
from specpipe.launcher import child
from specpipe.launcher.plan import COORDINATOR, DRAFT_WORKER, TARGET_WORKER, ProcessSpec

KEEPER = "ray::RayKeeper.start"
WORKER = """
import os, signal, sys
if "--deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
signal.pause()
"""
READY = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
os.write(int(sys.argv[sys.argv.index("--ready-fd") + 1]), b"127.0.0.1:9\\n")
signal.pause()
"""
PARENT = """
import subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
sys.stdin.read()
process.kill()
process.wait()
"""


@contextmanager
def process(folder: Path, role: str, *flags: str, title: str = KEEPER) -> Iterator[int]:
    """A process with the command line of a service's, started by one that calls itself `title`. Its pid."""
    (folder / "specpipe").mkdir(exist_ok=True)
    (folder / "specpipe/__main__.py").write_text(WORKER)
    command = [sys.executable, "-P", "-m", "specpipe", role, *flags]
    parent = subprocess.Popen(
        [title, "-c", PARENT, *command],
        executable=sys.executable,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    with parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        try:
            yield int(parent.stdout.readline())
        finally:
            parent.stdin.close()
            parent.wait(30)


def is_running(pid: int) -> bool:
    """One whose parent has not asked yet how it ended is a zombie."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("role", [COORDINATOR, DRAFT_WORKER, TARGET_WORKER])
def test_what_a_keeper_has_started_is_told_to_end_and_waited_for(role: str, tmp_path: Path) -> None:
    with process(tmp_path, role, "--grace", "60") as pid:
        assert leaving.end_processes([pid], 60) == ()
        assert not is_running(pid)


def test_what_does_not_end_in_time_is_told(tmp_path: Path) -> None:
    with process(tmp_path, TARGET_WORKER, "--deaf") as pid:
        assert leaving.end_processes([pid], 0.2) == (pid,)


@pytest.mark.parametrize(("role", "title"), [(DRAFT_WORKER, "specpipe serve"), ("generate", KEEPER)])
def test_what_no_keeper_has_started_and_what_is_no_service_goes_on(role: str, title: str, tmp_path: Path) -> None:
    with process(tmp_path, role, title=title) as pid:
        assert leaving.end_processes([pid], 60) == ()
        assert is_running(pid)


def test_processes_that_have_ended_and_the_kernels_are_passed_over() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert leaving.end_processes([ended.pid, os.getpid(), os.getppid()], 60) == ()
    assert os.getpid() in leaving.all_pids()


async def test_a_keeper_tells_an_end_in_order_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that somebody else has ended."""
    monkeypatch.setattr(child, "_command", lambda role, arguments: [sys.executable, "-c", READY, role, *arguments])
    keeper, spec = Keeper("127.0.0.1"), ProcessSpec(role=DRAFT_WORKER, arguments=())
    for number, is_in_order in ((signal.SIGTERM, True), (signal.SIGKILL, False)):
        started = await keeper.start(spec)
        os.kill(started.pid, number)
        assert (await keeper.wait()).is_in_order == is_in_order
    await keeper.stop(0.0)


@pytest.fixture
def ray_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The text of a shell script that is Ray's command."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    def say(script: str) -> None:
        (tmp_path / "ray").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "ray").chmod(0o700)

    return say


def test_ray_is_told_by_its_own_command_how_long_the_node_is_there(
    ray_says: Callable[[str], None], tmp_path: Path
) -> None:
    ray_says(f'echo "$@" > {tmp_path}/said')
    assert leaving.tell_ray(75)
    said = (tmp_path / "said").read_text()
    assert said.startswith("drain-node --reason=DRAIN_NODE_REASON_PREEMPTION ")
    assert said.endswith(" --deadline-remaining-seconds=75\n")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'Error: not accepted' >&2; exit 1", "Error: not accepted"),
        ("exec sleep 60", "timed out after 0.2 seconds"),
        (None, "No such file"),
    ],
)
def test_a_ray_that_does_not_agree_is_a_warning(
    script: str | None,
    reason: str,
    ray_says: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(leaving, "RAY_PATIENCE_S", 0.2 if script and "sleep" in script else 60.0)
    if script is not None:
        ray_says(script)
    assert not leaving.tell_ray(75)
    assert reason in caplog.text


@pytest.mark.parametrize(("left", "code", "said"), [((), 0, ""), ((7, 8), 1, "pid 7, pid 8")])
def test_leave_tells_ray_before_processes_and_says_what_still_runs(
    left: tuple[int, ...],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log: list[str] = []
    monkeypatch.setattr(commands, "check_ray", lambda command: log.append(command))
    monkeypatch.setattr("time.sleep", lambda seconds: log.append(f"{seconds:g} s"))
    monkeypatch.setattr(commands, "tell_ray", lambda seconds: log.append(f"ray {seconds:g}"))
    monkeypatch.setattr(commands, "end_processes", lambda _, seconds: left if seconds == 75 and len(log) == 3 else (9,))
    assert run(["leave", "--after", "5", "--timeout", "75"]) == code
    assert log == ["leave", "5 s", "ray 75"]
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--after", "-1"], ["--timeout", "inf"]])
def test_times_that_are_none_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["leave", *flags]) == 2
    assert "--after and --timeout must be at least 0" in capsys.readouterr().err
