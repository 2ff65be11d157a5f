"""The service as an application of Ray Serve: what KubeRay's RayService begins, watches and replaces.

Owns: one deployment without resources, which begins the service and is healthy as long as somebody answers requests.
Requests do not come this way: clients ask coordinators. HTTP here gets the status, as `specpipe status --json` does.
`app` wants `ray[serve]`, and nothing else does. Must not know: Kubernetes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from specpipe.cluster.config import ClusterConfig
from specpipe.cluster.on_ray import ControllerHandle, take_down
from specpipe.cluster.reading import read_cluster
from specpipe.cluster.status import status_json
from specpipe.errors import SpecpipeError, WorkerUnavailableError

if TYPE_CHECKING:
    from ray import serve

END_PATIENCE_S: Final = 60.0
LOOK_EVERY_S = 1.0  # whether somebody answers


class ServedCluster:
    """Made on a node of the Ray on which the service is to be; `ray.address` of the file is of no matter here."""

    async def __init__(self, file: str) -> None:  # type: ignore[misc]  # Serve awaits it
        """Returns once requests are answered. Raises what the first process to fail has said.

        Leaves nothing then of a service that it has begun. One that is there already it leaves as it is: Serve makes
        this anew now and then, and what it has made before may have gone.
        """
        config = read_cluster(Path(file))
        self._handle = await _begun(config)
        status = await self._handle.status()
        while not status.answering:  # one that was there may be anywhere in its life
            await asyncio.sleep(LOOK_EVERY_S)
            status = await self._handle.status()

    async def check_health(self) -> None:
        """Asked by Serve. Raises WorkerUnavailableError while no coordinator answers requests."""
        status = await self._handle.status()
        if not status.answering:
            raise WorkerUnavailableError(f"no coordinator of {status.name} answers")

    async def __call__(self, _request: object) -> dict[str, Any]:
        return status_json(await self._handle.status())


def app(arguments: dict[str, str]) -> serve.Application:
    """`import_path` of a Serve configuration, with `args: {file: CLUSTER.yaml}`."""
    from ray import serve

    deployment = serve.deployment(ServedCluster, name="specpipe", ray_actor_options={"num_cpus": 0})
    return deployment.bind(arguments["file"])


async def _begun(config: ClusterConfig) -> ControllerHandle:
    """The controller of a service that has been ready once, or answers whatever its start has come to."""
    found = ControllerHandle.find(config)
    handle = found or ControllerHandle.create(config)
    try:
        await handle.wait_ready()
    except SpecpipeError:
        if found is None:
            await take_down(config, END_PATIENCE_S)
            raise
        if not (await handle.status()).answering:
            raise
    return handle
