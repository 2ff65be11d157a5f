"""`specpipe up | status | down CLUSTER.yaml`: the whole service on a Ray cluster. `specpipe leave`: one node of it.

Owns: four runs, from the file to the exit code. With a Ray that is there, `up` returns once requests are answered, and
the service stays; a local Ray lives as long as its `up`, which a signal or `down` ends.
Ray is loaded after the file has been read: all else works without it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from specpipe.cli.cluster_output import waiting_lines, write_status
from specpipe.cli.failure import say_error
from specpipe.cli.flags import ServiceFlags, option, takes_flags
from specpipe.cli.models import resolve_models
from specpipe.cli.signals import Signals, run_with_signals
from specpipe.cluster.config import DEMO, ClusterConfig
from specpipe.cluster.connection import HasEnded, check_ray, existing_ray, new_ray, wait_local_end
from specpipe.cluster.leaving import all_pids, end_processes, tell_ray
from specpipe.cluster.reading import read_cluster
from specpipe.cluster.service import ClusterStatus
from specpipe.errors import ConfigError, WorkerUnavailableError
from specpipe.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED
from specpipe.telemetry.logs import LogLevel, configure_logging

if TYPE_CHECKING:
    from specpipe.cluster.on_ray import ControllerHandle

PROGRESS_EVERY_S: Final = 5.0
LOOK_EVERY_S: Final = 1.0  # whether a local Ray is there
STATUS_TIMEOUT_S: Final = 60.0
END_PATIENCE_S: Final = 60.0  # beyond two graces, of an end in order

T = TypeVar("T")

logger = logging.getLogger(__name__)

ClusterFile = Annotated[Path, typer.Argument(help="What the service is made of: docs/ray.md.", metavar="CLUSTER.yaml")]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpFlags:
    """Flags of `up`."""

    timeout: Annotated[
        float | None, option("Seconds until everything must serve.  [models.load_timeout_s of the file]")
    ] = None
    json: Annotated[bool, option("One JSON line when ready.", "--json")] = False
    log_level: Annotated[LogLevel, option("What is logged to stderr.  [info]")] = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusFlags:
    """Flags of `status`."""

    json: Annotated[bool, option("One JSON object.", "--json")] = False
    logs: Annotated[bool, option("With the last lines that each process has logged.", "--logs")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveFlags:
    """Flags of `leave`."""

    after: Annotated[float, option("Seconds in which all goes on as it is, first.  [0]")] = 0.0
    timeout: Annotated[float, option("Seconds that all may then take to end.  [120]")] = 120.0


@takes_flags(own=UpFlags)
def up(file: ClusterFile, *, own: UpFlags) -> int:
    """Start the service of CLUSTER.yaml on Ray and keep it alive."""
    configure_logging(own.log_level)
    config = read_cluster(file, "up")
    timeout_s = config.models.load_timeout_s if own.timeout is None else own.timeout
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"--timeout must be more than 0, got {timeout_s:g}")
    config = config.patient(timeout_s)
    if config.ray.is_local:
        check_models(config)
    check_ray("up")
    with new_ray(config) as has_ended:
        return run_with_signals(
            lambda signals: _up(config, own, timeout_s, signals, has_ended), terminated=EXIT_TERMINATED
        )


@takes_flags(own=StatusFlags)
def status(file: ClusterFile, *, own: StatusFlags) -> int:
    """Show each process of a service that is up: where it is, and why it has ended if it has. 1 if not all serve."""
    configure_logging("warning")
    config = read_cluster(file, "status")
    check_ray("status")
    with existing_ray(config):
        return run_with_signals(lambda _: _status(config, own), terminated=EXIT_TERMINATED)


def down(file: ClusterFile) -> int:
    """End a service that is up, once its answers have finished, and all that it holds."""
    configure_logging("warning")
    config = read_cluster(file, "down")
    check_ray("down")
    with existing_ray(config):
        code = run_with_signals(lambda _: _down(config), terminated=EXIT_TERMINATED)
    if code == EXIT_OK:
        wait_local_end(config, END_PATIENCE_S)
    return code


@takes_flags(own=LeaveFlags)
def leave(*, own: LeaveFlags) -> int:
    """End what runs on this Ray node in order, to go on elsewhere: before the node is taken away."""
    configure_logging("info")
    if not (0 <= own.after < math.inf and 0 <= own.timeout < math.inf):
        raise ConfigError("--after and --timeout must be at least 0")
    check_ray("leave")
    time.sleep(own.after)
    tell_ray(own.timeout)
    left = end_processes(all_pids(), own.timeout)
    if left:
        say_error(f"after {own.timeout:g} s these still run: {', '.join(f'pid {pid}' for pid in left)}")
    return EXIT_FAILED if left else EXIT_OK


def check_models(config: ClusterConfig) -> None:
    """Before a local Ray is begun. Raises as `resolve_models`."""
    models = config.models
    flags = ServiceFlags(
        target=None if models.target == DEMO else models.target,
        draft=None if models.drafter == DEMO else models.drafter,
        tensor_parallel_size=config.target_workers.tensor_parallel_size,
    )
    resolve_models(flags, is_drafting=config.is_drafting)


async def _up(config: ClusterConfig, own: UpFlags, timeout_s: float, signals: Signals, has_ended: HasEnded) -> int:
    from specpipe.cluster.on_ray import ControllerHandle

    handle = ControllerHandle.create(config)
    is_staying = False
    try:
        ready = await _unless_ended(_ready(handle, timeout_s), has_ended)
        write_status(ready, is_json=own.json)
        is_staying = not config.ray.is_local
        return EXIT_OK if is_staying else await _unless_ended(_until_ended(handle, signals), has_ended)
    finally:
        if not is_staying and not has_ended():
            await _take_down(config)


async def _unless_ended(work: Coroutine[Any, Any, T], has_ended: HasEnded) -> T:
    """The work's result. Raises WorkerUnavailableError if its Ray ends first: whoever asks it anything would wait."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=LOOK_EVERY_S))[0]:
            if has_ended():
                raise WorkerUnavailableError("the local Ray has ended by itself, and all that ran on it: `up` again")
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _ready(handle: ControllerHandle, timeout_s: float) -> ClusterStatus:
    """Waits for it, saying what it waits for. Raises WorkerUnavailableError after `timeout_s`."""
    ready = asyncio.ensure_future(handle.wait_ready())
    waiting: list[str] = []
    try:
        async with asyncio.timeout(timeout_s):
            while not (await asyncio.wait([ready], timeout=PROGRESS_EVERY_S))[0]:
                before, waiting = waiting, waiting_lines(await handle.status())
                if waiting != before:
                    logger.info("%s", "; ".join(waiting) or "the service begins")
        return ready.result()
    except TimeoutError:
        raise WorkerUnavailableError(f"not ready after {timeout_s:g} s: {'; '.join(waiting)}") from None
    finally:
        ready.cancel()


async def _until_ended(handle: ControllerHandle, signals: Signals) -> int:
    """Returns 0 after `down` or SIGTERM, 130 after Ctrl-C."""
    has_signal = asyncio.create_task(signals.defer().wait())
    stopped = asyncio.ensure_future(handle.wait_stopped())
    ends: list[asyncio.Future[Any]] = [has_signal, stopped]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    return EXIT_INTERRUPTED if signals.received is signal.SIGINT else EXIT_OK


async def _status(config: ClusterConfig, own: StatusFlags) -> int:
    from specpipe.cluster.on_ray import ControllerHandle

    handle = ControllerHandle.find(config)
    if handle is None:
        say_error(f"{config.name} is not up on Ray at {config.ray.address}")
        return EXIT_FAILED
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            lines = await handle.lines() if own.logs else None
            now = await handle.status()
    except TimeoutError:
        raise WorkerUnavailableError(f"the controller of {config.name} does not answer") from None
    write_status(now, is_json=own.json, lines=lines)
    return EXIT_OK if now.is_ready else EXIT_FAILED


async def _down(config: ClusterConfig) -> int:
    if await _take_down(config):
        return EXIT_OK
    say_error(f"{config.name} is not up on Ray at {config.ray.address}")
    return EXIT_FAILED


async def _take_down(config: ClusterConfig) -> bool:
    from specpipe.cluster.on_ray import take_down

    return await take_down(config, 2 * config.grace_s + END_PATIENCE_S)
