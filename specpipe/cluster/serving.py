"""The service as an application of Ray Serve: what KubeRay's RayService begins, watches and replaces.

Owns: one deployment without resources, which begins the service and is healthy as long as somebody answers requests.
Requests do not come this way: clients ask coordinators. HTTP here gets the status, as `specpipe status --json` does.
It wants `ray[serve]`. Must not know: Kubernetes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray import serve

from specpipe.cluster.on_ray import ControllerHandle, take_down
from specpipe.cluster.reading import read_cluster
from specpipe.cluster.status import status_json
from specpipe.errors import SpecpipeError, WorkerUnavailableError

END_PATIENCE_S = 60.0


class ServedCluster:
    """Made on a node of the Ray on which the service is to be; `ray.address` of the file is of no matter here."""

    async def __init__(self, file: str) -> None:  # type: ignore[misc]  # Serve awaits it
        """Returns once everything serves. Raises what the first process to fail has said, and leaves nothing then."""
        config = read_cluster(Path(file))
        self._handle = ControllerHandle.find(config) or ControllerHandle.create(config)
        try:
            await self._handle.wait_ready()
        except SpecpipeError:
            await take_down(config, END_PATIENCE_S)
            raise

    async def check_health(self) -> None:
        """Asked by Serve. Raises WorkerUnavailableError while no coordinator answers."""
        status = await self._handle.status()
        if not status.coordinators:
            raise WorkerUnavailableError(f"no coordinator of {status.name} answers")

    async def __call__(self, _request: object) -> dict[str, Any]:
        return status_json(await self._handle.status())


def app(arguments: dict[str, str]) -> serve.Application:
    """`import_path` of a Serve configuration, with `args: {file: CLUSTER.yaml}`."""
    deployment = serve.deployment(ServedCluster, name="specpipe", ray_actor_options={"num_cpus": 0})
    return deployment.bind(arguments["file"])
