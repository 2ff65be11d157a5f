"""The cluster engine: Ray.

Owns: everything that is said to Ray. Placement groups, the actors that hold their bundles, and the controller, an actor
that keeps the service alive whether or not anybody is connected. All are detached and have names, so that a controller
that Ray has started again finds what the last one left, and `down` whatever there is.
Must not know: why something starts or ends (`replica`, `service`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specpipe.cluster.backend import Group, GroupLostError
from specpipe.cluster.config import ClusterConfig
from specpipe.cluster.health import Health
from specpipe.cluster.keeper import Ended, Started
from specpipe.cluster.plan import GroupPlan
from specpipe.cluster.rank_keeper import RankKeeper
from specpipe.cluster.rank_processes import RankProcesses
from specpipe.cluster.service import ClusterService, ClusterStatus
from specpipe.errors import ConfigError, SpecpipeError, WorkerUnavailableError
from specpipe.launcher.plan import ProcessSpec
from specpipe.telemetry.logs import configure_logging

CONTROLLER: Final = "controller"
GONE_PATIENCE_S: Final = 20.0  # until Ray has forgotten the name of what was killed
POLL_S: Final = 0.1
RESTART_POLL_S: Final = 1.0
_IS_UP: Final = "{name} is up already: `specpipe status` and `specpipe down` know of it"

logger = logging.getLogger(__name__)


class RayKeeper(RankKeeper):
    """A keeper as an actor."""

    def __init__(self, log_level: str) -> None:
        configure_logging(log_level)
        super().__init__(ray.util.get_node_ip_address())

    def where(self) -> tuple[str, tuple[str, ...]]:
        """Host, and the GPUs of this bundle."""
        return self._host, tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"])

    async def hold(self) -> None:
        """Never returns: whoever waits for it hears when this actor is lost."""
        await asyncio.Event().wait()


class KeeperHandle:
    """An actor's keeper, as those see it who are elsewhere: see `RankKeeper`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def start(self, spec: ProcessSpec, port: int | None = None) -> Started:
        started: Started = await _result_of(self._actor.start.remote(spec, port))
        return started

    async def wait(self) -> Ended:
        ended: Ended = await _result_of(self._actor.wait.remote())
        return ended

    async def health(self, known: Health) -> Health:
        health: Health = await _result_of(self._actor.health.remote(known))
        return health

    async def hold(self) -> Ended:
        """Returns never: see `RayKeeper.hold`."""
        ended: Ended = await _result_of(self._actor.hold.remote())
        return ended

    async def stop(self, grace_s: float) -> None:
        await _result_of(self._actor.stop.remote(grace_s))

    async def is_running(self) -> bool:
        return bool(await _result_of(self._actor.is_running.remote()))

    async def free_address(self) -> str:
        return str(await _result_of(self._actor.free_address.remote()))

    async def list_workers(self, addresses: Mapping[str, Sequence[str]]) -> None:
        await _result_of(self._actor.list_workers.remote(addresses))

    async def lines(self) -> tuple[str, ...]:
        lines: tuple[str, ...] = await _result_of(self._actor.lines.remote())
        return lines


class RayGroup:
    """See `Group`. What runs is one process, in the first bundle."""

    def __init__(
        self, keepers: Sequence[KeeperHandle], places: Sequence[tuple[str, tuple[str, ...]]], plan: GroupPlan
    ) -> None:
        """`places`: what each keeper has said of `where` it is."""
        self.node = places[0][0]
        self._first, self._others = keepers[0], keepers[1:]
        self._process = plan.process
        if self._others and places[0][1]:  # Ray shows each actor its own GPUs only, and the first starts all ranks
            gpus = ",".join(gpu for _, held in places for gpu in held)
            self._process = replace(plan.process, environment=(("CUDA_VISIBLE_DEVICES", gpus),))

    async def start(self, port: int | None) -> Started:
        return await self._first.start(self._process, port)

    async def wait(self) -> Ended:
        ends = [asyncio.ensure_future(each) for each in (self._first.wait(), *(o.hold() for o in self._others))]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return (ends[0] if ends[0] in done else done.pop()).result()
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def health(self, known: Health) -> Health:
        return await self._first.health(known)

    async def stop(self, grace_s: float) -> None:
        await self._first.stop(grace_s)

    async def list_workers(self, addresses: Mapping[str, Sequence[str]]) -> None:
        await self._first.list_workers(addresses)

    async def lines(self) -> tuple[str, ...]:
        return await self._first.lines()


class RayRanks(RayGroup):
    """A target worker with a rank's process in each bundle: each sees the GPUs of its own."""

    def __init__(
        self, keepers: Sequence[KeeperHandle], places: Sequence[tuple[str, tuple[str, ...]]], plan: GroupPlan
    ) -> None:
        super().__init__(keepers, places, plan)
        self._ranks = RankProcesses(keepers, plan.process)

    async def start(self, port: int | None) -> Started:
        return await self._ranks.start(port)

    async def wait(self) -> Ended:
        return await self._ranks.wait()

    async def stop(self, grace_s: float) -> None:
        await self._ranks.stop(grace_s)


class RayBackend:
    """See `Backend`. Names in Ray are SERVICE/GROUP for placement groups and SERVICE/GROUP/NUMBER for actors."""

    def __init__(self, config: ClusterConfig) -> None:
        self._service = config.name
        self._log_level = config.log_level

    async def place(self, name: str, plan: GroupPlan) -> Group:
        with in_our_words():
            placement = _placement_named(self._full(name)) or placement_group(
                [dict(bundle) for bundle in plan.bundles],
                strategy=plan.placement,
                name=self._full(name),
                lifetime="detached",
            )
            await placement.ready()
            keepers = [self._keeper(name, number, placement, bundle) for number, bundle in enumerate(plan.bundles)]
            places = await asyncio.gather(*(keeper.where.remote() for keeper in keepers))
        kind = RayRanks if plan.has_distant_ranks else RayGroup
        return kind([KeeperHandle(keeper) for keeper in keepers], places, plan)

    async def release(self, name: str) -> None:
        with in_our_words():
            for actor in self._actors(name):
                _kill(actor)
            placement = _placement_named(self._full(name))
            if placement is not None:
                remove_placement_group(placement)
            await self._until_gone(name)

    async def names(self) -> list[str]:
        with in_our_words():
            actors = [actor.split("/") for actor in ray.util.list_named_actors()]
            found = [parts[1] for parts in actors if len(parts) == 3 and parts[0] == self._service]
            table = ray.util.placement_group_table()  # of all namespaces
            placed = [group["name"].split("/") for group in table.values() if _placement_named(group["name"] or "-")]
        found += [parts[1] for parts in placed if len(parts) == 2 and parts[0] == self._service]
        return list(dict.fromkeys(found))

    def _full(self, name: str) -> str:
        return f"{self._service}/{name}"

    def _actors(self, name: str) -> list[str]:
        return [actor for actor in ray.util.list_named_actors() if actor.startswith(f"{self._full(name)}/")]

    def _keeper(self, name: str, number: int, placement: PlacementGroup, bundle: Mapping[str, float]) -> Any:
        others = {key: amount for key, amount in bundle.items() if key not in ("CPU", "GPU")}
        actor = ray.remote(RayKeeper).options(
            name=f"{self._full(name)}/{number}",
            lifetime="detached",
            get_if_exists=True,
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources=others or None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=placement, placement_group_bundle_index=number
            ),
        )
        return actor.remote(self._log_level)

    async def _until_gone(self, name: str) -> None:
        """A name that is still known would give its next owner what is about to die."""
        give_up_at = time.monotonic() + GONE_PATIENCE_S
        while self._actors(name) or _placement_named(self._full(name)) is not None:
            if time.monotonic() > give_up_at:
                logger.warning("%s is still there %.0f s after it was given back", name, GONE_PATIENCE_S)
                return
            await asyncio.sleep(POLL_S)


class Controller:
    """The actor that keeps a service alive."""

    def __init__(self, config: ClusterConfig) -> None:
        configure_logging(config.log_level)
        self._service = ClusterService(config, RayBackend(config))
        self._started = asyncio.get_running_loop().create_task(self._service.start())
        self._started.add_done_callback(_note_failed_start)
        self._stopped = asyncio.Event()

    async def wait_ready(self) -> ClusterStatus:
        """Raises what the first process to fail has said, WorkerUnavailableError if it is stopped before."""
        await asyncio.wait([self._started])
        if self._started.cancelled():
            raise WorkerUnavailableError("the service was taken down before it was ready")
        self._started.result()
        return self._service.status

    async def wait_stopped(self) -> None:
        await self._stopped.wait()

    def status(self) -> ClusterStatus:
        return self._service.status

    async def lines(self) -> dict[str, tuple[str, ...]]:
        return await self._service.lines()

    async def stop(self, grace_s: float) -> None:
        """Returns when nothing of the service is left but this actor."""
        self._started.cancel()
        await asyncio.gather(self._started, return_exceptions=True)
        await self._service.stop(grace_s)
        self._stopped.set()


def _note_failed_start(started: asyncio.Task[None]) -> None:
    """Of a controller that Ray has started again nobody asks how that went."""
    if not started.cancelled() and (error := started.exception()) is not None:
        logger.error("the service has not started: %s", error, exc_info=error)


class ControllerHandle:
    """A controller, as those see it who are connected to its Ray."""

    def __init__(self, actor: Any, name: str) -> None:
        self._actor = actor
        self._name = name

    @classmethod
    def create(cls, config: ClusterConfig) -> ControllerHandle:
        """Begin the service. Raises ConfigError if there is one of that name."""
        name = _controller_name(config)
        with in_our_words():
            if _actor_named(name) is not None:
                raise ConfigError(_IS_UP.format(name=config.name))
            actor = ray.remote(Controller).options(name=name, lifetime="detached", num_cpus=0, max_restarts=-1)
            try:
                return cls(actor.remote(config), name)
            except ValueError:  # another `up` was quicker
                raise ConfigError(_IS_UP.format(name=config.name)) from None

    @classmethod
    def find(cls, config: ClusterConfig) -> ControllerHandle | None:
        name = _controller_name(config)
        with in_our_words():
            actor = _actor_named(name)
        return cls(actor, name) if actor is not None else None

    async def wait_ready(self) -> ClusterStatus:
        """See `Controller.wait_ready`."""
        status: ClusterStatus = await self._asked("wait_ready")
        return status

    async def wait_stopped(self) -> None:
        """Returns when somebody has stopped it, in order or not. One that Ray starts again has not been stopped."""
        with contextlib.suppress(GroupLostError):
            await self._asked("wait_stopped")

    async def status(self) -> ClusterStatus:
        status: ClusterStatus = await self._asked("status")
        return status

    async def lines(self) -> dict[str, tuple[str, ...]]:
        lines: dict[str, tuple[str, ...]] = await self._asked("lines")
        return lines

    async def stop(self, grace_s: float) -> None:
        await _result_of(self._actor.stop.remote(grace_s))

    async def _asked(self, question: str) -> Any:
        """What it says. One that Ray starts again is asked again. Raises GroupLostError once none has the name."""
        while True:
            try:
                return await _result_of(getattr(self._actor, question).remote())
            except GroupLostError as error:
                if _actor_named(self._name) is None:
                    raise
                logger.warning("the controller is lost, and asked again: %s", error)
                await asyncio.sleep(RESTART_POLL_S)


async def take_down(config: ClusterConfig, patience_s: float) -> bool:
    """End the service in order, then whatever is left of it. Returns whether there was anything."""
    handle, backend = ControllerHandle.find(config), RayBackend(config)
    if handle is not None:
        try:
            async with asyncio.timeout(patience_s):
                await handle.stop(config.grace_s)
        except (SpecpipeError, TimeoutError) as error:
            if _actor_named(_controller_name(config)) is not None:  # else somebody else has ended it, in order
                logger.warning("the controller did not end the service in order: %s", str(error) or "it took too long")
        _kill(_controller_name(config))
    left = await backend.names()
    await asyncio.gather(*(backend.release(name) for name in left))
    return handle is not None or bool(left)


@contextlib.contextmanager
def in_our_words() -> Iterator[None]:
    """What was raised inside an actor as it was raised; what Ray has lost as GroupLostError."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, SpecpipeError):
            raise error.cause from None
        raise WorkerUnavailableError(f"an actor failed: {_last_line(error)}") from None
    except RayError as error:
        raise GroupLostError(_last_line(error)) from None


async def _result_of(reference: Any) -> Any:
    with in_our_words():
        return await reference


def _last_line(error: BaseException) -> str:
    """Ray's messages end with what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _controller_name(config: ClusterConfig) -> str:
    return f"{config.name}/{CONTROLLER}"


def _actor_named(name: str) -> Any:
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def _kill(name: str) -> None:
    actor = _actor_named(name)
    if actor is not None:
        ray.kill(actor, no_restart=True)


def _placement_named(name: str) -> PlacementGroup | None:
    try:
        return ray.util.get_placement_group(name)
    except ValueError:
        return None
