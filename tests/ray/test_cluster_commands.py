"""`specpipe up | status | down` where there is no Ray, no cluster or a wrong file; what they show."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from running import environment

import specpipe
from specpipe.cli.app import run
from specpipe.cli.cluster_output import status_lines
from specpipe.cluster.health import Health
from specpipe.cluster.keeper import Keeper, Started, exit_reason
from specpipe.cluster.replica import End, ReplicaState, ReplicaStatus
from specpipe.cluster.scaler import CountChange
from specpipe.cluster.service import ClusterStatus
from specpipe.cluster.status import status_json
from specpipe.errors import ConfigError, WorkerUnavailableError
from specpipe.launcher.plan import COORDINATOR, DRAFT_WORKER, ProcessSpec

WITHOUT_RAY = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "ray" else find_spec(name, *rest)
sys.modules["ray"] = None
from specpipe.cli.app import run
sys.exit(run(sys.argv[1:]))
"""


def without_ray(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command in an interpreter that has no Ray."""
    command = [sys.executable, "-c", WITHOUT_RAY, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, env=environment(), check=False)


@pytest.mark.parametrize("command", ["up", "status", "down"])
def test_without_ray_one_sentence_says_what_to_install(command: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("name: test\n")
    said = without_ray(command, "cluster.yaml", cwd=tmp_path)
    assert said.returncode == 2
    assert said.stderr == (
        f"error: Ray is not installed, and `specpipe {command}` needs it: "
        "in specpipe's checkout, pip install '.[ray]'\n"
    )


def test_without_ray_the_other_commands_work(tmp_path: Path) -> None:
    said = without_ray("demo-models", cwd=tmp_path)
    assert said.returncode == 0
    assert len(said.stdout.splitlines()) == 2


def test_only_what_is_begun_after_a_look_for_ray_imports_it() -> None:
    root = Path(specpipe.__file__).parent
    naming = {path.stem for path in root.rglob("*.py") if re.search(r"^\s*(import|from) ray\b", path.read_text(), re.M)}
    assert naming == {"connection", "head", "on_ray", "serving"}


def test_ray_is_not_loaded_by_the_command_line() -> None:
    code = "import specpipe.cli.app, sys; sys.exit('ray' in sys.modules or 'yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: {target: /models/none}\n", "/models/none"),
        ("coordinator: {}\n", "coordinator is not known: did you mean coordinators?"),
        ('name: "\\e]0;title\\a"\n', r"got '\x1b]0;title\x07'"),
    ],
)
def test_a_wrong_file_is_refused_before_ray_is_begun(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    assert run(["up", str(path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "down"])
def test_a_service_that_is_not_up_is_told_at_once(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not any(importlib.metadata.distributions(name="ray")):
        pytest.skip("Ray is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "cluster.yaml"
    path.write_text("name: test\n")
    assert run([command, str(path)]) == 1
    assert capsys.readouterr().err == "error: test is not up on this machine\n"


HEALTHS = {"draft-worker-0": Health.SILENT}


def replica(name: str, role: str, state: ReplicaState, process: Started | None, ends: Sequence[End]) -> ReplicaStatus:
    return ReplicaStatus(
        name=name,
        role=role,
        state=state,
        node="10.0.0.1",
        process=process,
        health=HEALTHS.get(name, Health.SERVING),
        num_restarts=len(ends),
        ends=tuple(ends),
    )


STATUS = ClusterStatus(
    name="code",
    is_ready=False,
    replicas=(
        replica(
            "target-worker-0",
            "target-worker",
            ReplicaState.READY,
            Started(address="10.0.0.1:7001", metrics="10.0.0.1:7002", pid=11, companions=(12, 13)),
            [],
        ),
        replica("draft-worker-0", DRAFT_WORKER, ReplicaState.READY, Started(address="10.0.0.1:7003", pid=14), []),
        replica(
            "coordinator-0",
            COORDINATOR,
            ReplicaState.WAITING,
            None,
            [End(at=1.0, reason="it was ended by SIGKILL", lines=("last words",))],
        ),
    ),
    changes=(CountChange(at=2.0, role="draft-worker", before=1, after=2, reason="they are busy"),),
)


def test_people_see_where_each_process_is_and_why_it_has_ended() -> None:
    lines = list(status_lines(STATUS, {"target-worker-0": ("it \x1b[2Jworks",)}))
    assert lines[0] == "code is not ready"
    assert "ready at 10.0.0.1:7001, pid 11" in lines[1]
    assert lines[2].endswith(r"| it \x1b[2Jworks")
    assert lines[3].endswith("at 10.0.0.1:7003, pid 14 (it does not answer)")
    assert "waits to start again on 10.0.0.1 (restarted once)" in lines[4]
    assert lines[5].endswith("it was ended by SIGKILL")
    assert lines[6].endswith("draft-workers: 1 -> 2 (they are busy)")


def test_programs_see_the_same_as_json() -> None:
    shown = json.loads(json.dumps(status_json(STATUS)))
    assert shown["replicas"][0]["ranks"] == [12, 13]
    assert [replica["health"] for replica in shown["replicas"]] == ["serving", "silent", None]
    assert shown["replicas"][2]["ends"] == [{"at": 1.0, "reason": "it was ended by SIGKILL", "log": ["last words"]}]
    assert shown["changes"][0]["after"] == 2
    assert shown["grpc"] == []


@pytest.mark.parametrize(
    ("code", "lines", "reason"),
    [
        (-9, (), "it was ended by SIGKILL"),
        (0, (), "it ended with code 0"),
        (1, ("error: early", "noise", "error: the group has lost rank 1"), "the group has lost rank 1"),
        (3, ("noise",), "it ended with code 3"),
        (-250, (), "it was ended by signal 250"),
    ],
)
def test_why_a_process_has_ended_is_told_in_its_own_words_where_it_has_some(
    code: int, lines: tuple[str, ...], reason: str
) -> None:
    assert exit_reason(code, lines) == reason


async def test_a_keeper_raises_what_its_process_says_and_may_be_asked_again() -> None:
    keeper = Keeper("127.0.0.1")
    spec = ProcessSpec(role=COORDINATOR, arguments=("--host", "{host}", "--target", "file:"))
    for _ in range(2):
        with pytest.raises(ConfigError, match="names no file"):
            await keeper.start(spec)
    assert (await keeper.wait()).reason == "it was not running"
    with pytest.raises(WorkerUnavailableError, match="no process runs"):
        await keeper.health(Health.SERVING)
    await keeper.stop(0.0)


async def test_a_keeper_writes_lists_of_workers_whole() -> None:
    keeper = Keeper("127.0.0.1")
    keeper.list_workers({"target": ["10.0.0.1:1", "10.0.0.2:1"], "draft": []})
    keeper.list_workers({"target": ["10.0.0.2:1"], "draft": []})
    folder = keeper._lists()
    assert lists_in(folder) == {"target": "10.0.0.2:1\n", "draft": ""}
    await keeper.stop(0.0)
    assert lists_in(folder) == {}


def lists_in(folder: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in Path(folder).glob("*")}
