"""The application of Ray Serve: what it begins, what it leaves alone, when it is well.

`specpipe.cluster.serving` and the handle of `on_ray`. Ray is the real one, without a cluster: actors are stand-ins that
say what a test has given them to say.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if not any(importlib.metadata.distributions(name="ray")):
    pytest.skip("Ray is not installed", allow_module_level=True)

from ray.exceptions import RayActorError

from specpipe.cluster import on_ray, serving
from specpipe.cluster.backend import GroupLostError
from specpipe.cluster.config import ClusterConfig
from specpipe.cluster.health import Health
from specpipe.cluster.keeper import Started
from specpipe.cluster.on_ray import ControllerHandle
from specpipe.cluster.replica import ReplicaState, ReplicaStatus
from specpipe.cluster.service import ClusterStatus
from specpipe.cluster.serving import ServedCluster, app
from specpipe.errors import ConfigError, WorkerUnavailableError
from specpipe.launcher.plan import COORDINATOR

NAME = "specpipe/controller"
COORDINATOR_STATUS = ReplicaStatus(
    name="coordinator-0",
    role=COORDINATOR,
    state=ReplicaState.READY,
    node="10.0.0.1",
    process=Started(address="10.0.0.1:50051", pid=11),
    health=Health.SERVING,
    num_restarts=0,
    ends=(),
)


def status_with(**changes: Any) -> ClusterStatus:
    """Of a service with one coordinator, all well but for the changes."""
    return ClusterStatus(name="specpipe", is_ready=not changes, replicas=(replace(COORDINATOR_STATUS, **changes),))


WELL, SILENT = status_with(), status_with(health=Health.SILENT)


class Actor:
    """A controller that is asked from elsewhere. What it says next comes first; the last it says for ever."""

    def __init__(self, **said: list[Any]) -> None:
        self.said = {"wait_ready": [WELL], "status": [WELL]} | said

    def __getattr__(self, question: str) -> Any:
        return SimpleNamespace(remote=lambda *_: self._say(question))

    async def _say(self, question: str) -> Any:
        left = self.said[question]
        next_said = left.pop(0) if len(left) > 1 else left[0]
        if callable(next_said):
            next_said = next_said()
        if isinstance(next_said, Exception):
            raise next_said
        return next_said


class Cluster:
    """What there is on Ray by name, and what was done there."""

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}
        self.next_actor = Actor()
        self.log: list[str] = []

    def create(self, config: ClusterConfig) -> ControllerHandle:
        self.log.append("create")
        self.actors[NAME] = self.next_actor
        return ControllerHandle(self.next_actor, NAME)

    async def take_down(self, config: ClusterConfig, patience_s: float) -> bool:
        self.log.append("take down")
        return self.actors.pop(NAME, None) is not None


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(on_ray, "_actor_named", made.actors.get)
    monkeypatch.setattr(on_ray, "RESTART_POLL_S", 0.0)
    monkeypatch.setattr(serving, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(ControllerHandle, "create", made.create)
    monkeypatch.setattr(serving, "take_down", made.take_down)
    return made


@pytest.fixture
def serve(tmp_path: Path) -> Callable[[], Any]:
    """Makes the application's one object as Serve does."""
    file = tmp_path / "cluster.yaml"
    file.write_text("name: specpipe\n")

    async def made() -> ServedCluster:
        served = object.__new__(ServedCluster)
        await served.__init__(str(file))  # type: ignore[misc]
        return served

    return made


async def test_it_begins_the_service_and_says_its_status(cluster: Cluster, serve: Callable[[], Any]) -> None:
    served = await serve()
    assert cluster.log == ["create"]
    await served.check_health()
    assert (await served(None))["grpc"] == ["10.0.0.1:50051"]


async def test_a_controller_that_ray_starts_again_takes_nothing_down(
    cluster: Cluster, serve: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    cluster.next_actor = Actor(wait_ready=[RayActorError(), RayActorError(), WELL])
    await serve()
    assert cluster.log == ["create"]
    assert caplog.text.count("the controller is lost") == 2


async def test_a_controller_that_is_gone_for_good_is_told_and_what_it_left_is_taken_down(
    cluster: Cluster, serve: Callable[[], Any]
) -> None:
    """Somebody has said `specpipe down` meanwhile. Serve tries again, and begins the service anew."""

    def lose() -> RayActorError:
        del cluster.actors[NAME]
        return RayActorError()

    cluster.next_actor = Actor(wait_ready=[lose])
    with pytest.raises(GroupLostError):
        await serve()
    assert cluster.log == ["create", "take down"]
    cluster.next_actor = Actor()
    await serve()


async def test_a_start_of_its_own_that_fails_leaves_nothing(cluster: Cluster, serve: Callable[[], Any]) -> None:
    cluster.next_actor = Actor(wait_ready=[ConfigError("/models/none: no such folder")])
    with pytest.raises(ConfigError, match="/models/none: no such folder"):
        await serve()
    assert cluster.log == ["create", "take down"]


async def test_a_service_that_is_there_is_never_taken_down(cluster: Cluster, serve: Callable[[], Any]) -> None:
    """Whoever has begun it: its controller keeps it, and its start may have failed long ago."""
    failed = ConfigError("/models/none: no such folder")
    cluster.actors[NAME] = Actor(wait_ready=[failed], status=[SILENT])
    with pytest.raises(ConfigError, match="/models/none: no such folder"):
        await serve()
    cluster.actors[NAME] = Actor(wait_ready=[failed], status=[WELL])
    await serve()
    assert cluster.log == []


async def test_a_service_that_is_there_and_does_not_answer_is_waited_for(
    cluster: Cluster, serve: Callable[[], Any]
) -> None:
    actor = cluster.actors[NAME] = Actor(status=[SILENT, SILENT, WELL])
    await (await serve()).check_health()
    assert actor.said["status"] == [WELL]


@pytest.mark.parametrize(
    "changes",
    [
        {"health": Health.SILENT},
        {"health": Health.NOT_SERVING},
        {"state": ReplicaState.LEAVING, "process": None},
        {"state": ReplicaState.WAITING, "process": None},
    ],
)
async def test_it_is_well_while_a_coordinator_answers_not_while_one_runs(
    changes: dict[str, Any], cluster: Cluster, serve: Callable[[], Any]
) -> None:
    served = await serve()
    cluster.actors[NAME].said["status"] = [status_with(**changes)]
    with pytest.raises(WorkerUnavailableError, match="no coordinator of specpipe answers"):
        await served.check_health()
    cluster.actors[NAME].said["status"] = [WELL]
    await served.check_health()


@pytest.mark.parametrize("question", ["wait_ready", "status", "lines", "wait_stopped"])
async def test_whatever_a_controller_is_asked_it_is_asked_again_while_ray_knows_its_name(
    question: str, cluster: Cluster
) -> None:
    """So `specpipe up` neither ends nor takes anything down for it."""
    actor = cluster.actors[NAME] = Actor(**{question: [RayActorError(), None]})
    assert await getattr(ControllerHandle(actor, NAME), question)() is None
    assert actor.said[question] == [None]


async def test_a_controller_whose_name_is_gone_has_been_stopped(cluster: Cluster) -> None:
    handle = ControllerHandle(Actor(wait_stopped=[RayActorError()], status=[RayActorError()]), NAME)
    await handle.wait_stopped()
    with pytest.raises(GroupLostError):
        await handle.status()


def test_the_application_is_one_deployment_that_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `ray[serve]`, which has the decorator. tests/ray/test_serving_on_ray.py has the real one."""
    bound: dict[str, Any] = {}

    def deployment(kind: type[Any], **options: Any) -> Any:
        return SimpleNamespace(bind=lambda *arguments: bound.update(kind=kind, arguments=arguments, **options))

    ray = sys.modules["ray"]
    monkeypatch.setattr(ray, "serve", SimpleNamespace(deployment=deployment), raising=False)
    monkeypatch.setitem(sys.modules, "ray.serve", ray.serve)
    app({"file": "/etc/specpipe/cluster.yaml"})
    assert bound == {
        "kind": ServedCluster,
        "arguments": ("/etc/specpipe/cluster.yaml",),
        "name": "specpipe",
        "ray_actor_options": {"num_cpus": 0},
    }
