"""Being connected to a Ray: a fresh local one, which ends with us, or one that is there.

Owns: how Ray is started (`head`) and dialled. Ray is loaded here first: without it, one sentence.
Must not know: what is done there; where a local Ray is written down (`local_place`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Final

from specpipe.cluster.config import ClusterConfig
from specpipe.cluster.local_place import LocalPlace, LocalRay, tell
from specpipe.cluster.plan import counts_at_most, plan_group
from specpipe.cluster.reading import NEEDS_EXTRA
from specpipe.errors import ConfigError, WorkerUnavailableError
from specpipe.ports import LOOPBACK

OBJECT_STORE_BYTES: Final = 80 * 1024 * 1024  # of a local Ray, about the least that it takes; nothing of ours is in it
DIAL_TIMEOUT_S: Final = 2.0
START_TIMEOUT_S: Final = 300.0  # of a local Ray, which gives itself much less
END_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.05
NUM_TRIES: Final = 3  # of a local Ray to start
AUTH_MODE: Final = "RAY_AUTH_MODE"

HasEnded = Callable[[], bool]
"""Whether a Ray has ended by itself; of one that is not ours nobody knows."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The process of a local Ray's head (`specpipe.cluster.head`), which ends when `life_fd` is closed."""

    process: subprocess.Popen[bytes]
    life_fd: int
    local: LocalRay


def check_ray(command: str) -> None:
    """Raises ConfigError, with what to install, if there is no Ray here."""
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:  # a folder of that name is no Ray
        raise ConfigError(NEEDS_EXTRA.format(name="Ray", command=command))


@contextlib.contextmanager
def new_ray(config: ClusterConfig) -> Iterator[HasEnded]:
    """What `up` is connected to inside. A local Ray is begun here and ended here."""
    if not config.ray.is_local:
        with _dialled(config, config.ray.address):
            yield lambda: False
        return
    with LocalPlace(config.name).held() as place:
        logger.info("a Ray is begun on this machine")
        with _local_head(config) as head:
            tell(place, head.local)
            with _dialled_local(config, head.local):
                yield lambda: _is_over(head.process)


@contextlib.contextmanager
def existing_ray(config: ClusterConfig) -> Iterator[None]:
    """What `status` and `down` are connected to inside. Raises WorkerUnavailableError if it is not there."""
    if not config.ray.is_local:
        with _dialled(config, config.ray.address):
            yield
        return
    local = LocalPlace(config.name).find()
    _check_answers(local)
    with _dialled_local(config, local):
        yield


def wait_local_end(config: ClusterConfig, patience_s: float) -> None:
    """After a service was taken down: until the `up` of its local Ray has ended too, if it has one."""
    if config.ray.is_local and not LocalPlace(config.name).wait_free(patience_s):
        raise WorkerUnavailableError(f"the `specpipe up` of {config.name} has not ended after {patience_s:.0f} s")


def _check_answers(local: LocalRay) -> None:
    """NOTE: Ray itself would dial one that is not there for minutes."""
    host, _, port = local.address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=DIAL_TIMEOUT_S).close()
    except OSError:
        raise WorkerUnavailableError(f"Ray at {local.address} does not answer") from None


@contextlib.contextmanager
def _dialled_local(config: ClusterConfig, local: LocalRay) -> Iterator[None]:
    os.environ.setdefault(AUTH_MODE, local.auth_mode)  # Ray asks for it when it is loaded
    with _dialled(config, local.address, _node_ip_address=LOOPBACK):
        yield


@contextlib.contextmanager
def _dialled(config: ClusterConfig, address: str, **options: Any) -> Iterator[None]:
    """Raises WorkerUnavailableError in one sentence."""
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(
            address=address, namespace=config.ray.namespace, log_to_driver=False, logging_level=logging.ERROR, **options
        )
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:  # RayError: no token, say
        raise WorkerUnavailableError(f"Ray at {address}: {' '.join(str(error).split())}") from None
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _local_head(config: ClusterConfig) -> Iterator[Head]:
    """A Ray on loopback alone. Nothing of it is left after the block."""
    head = _start_head(local_options(config))
    try:
        yield head
    finally:
        _end(head.process, head.life_fd)


def _start_head(options: dict[str, Any]) -> Head:
    """Raises WorkerUnavailableError. Ray gives its own processes 30 s, which a busy machine may not: it is retried."""
    for num_left in reversed(range(NUM_TRIES)):
        try:
            return _try_head(options)
        except WorkerUnavailableError as error:
            if not num_left:
                raise
            logger.warning("%s; it is tried again", error)
    raise AssertionError("unreachable")


def _try_head(options: dict[str, Any]) -> Head:
    parent_fd, life_fd = os.pipe()
    ready_fd, said_fd = os.pipe()
    with tempfile.TemporaryFile(mode="w+b") as log, os.fdopen(ready_fd) as ready:
        try:
            process = _spawn_head(options, said_fd, parent_fd, log)
        finally:
            os.close(said_fd)
            os.close(parent_fd)
        try:
            return Head(process=process, life_fd=life_fd, local=_heard(ready, log))
        except BaseException:
            _end(process, life_fd)
            raise


def _spawn_head(options: dict[str, Any], said_fd: int, parent_fd: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Our processes would give way to all others on the machine if Ray had its way: hence the niceness."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "specpipe.cluster.head", str(said_fd), str(parent_fd), json.dumps(options)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(said_fd, parent_fd),
        start_new_session=True,
        env={"RAY_worker_niceness": "0", **os.environ},
    )


def _heard(ready: IO[str], log: IO[bytes]) -> LocalRay:
    poll = select.poll()
    poll.register(ready, select.POLLIN)
    if not poll.poll(1000 * START_TIMEOUT_S):
        raise WorkerUnavailableError(f"a local Ray did not start in {START_TIMEOUT_S:g} s")
    words = ready.readline().split()
    if len(words) != 2:
        log.seek(0)
        lines = log.read().decode(errors="replace").splitlines()
        raise WorkerUnavailableError(f"a local Ray did not start: {lines[-1] if lines else 'it said nothing'}")
    return LocalRay(address=words[0], auth_mode=words[1])


def _end(process: subprocess.Popen[bytes], life_fd: int) -> None:
    """NOTE: what Ray has started notices within a minute that all is over; it is in the head's process group."""
    os.close(life_fd)
    give_up_at = time.monotonic() + END_TIMEOUT_S
    while not _is_over(process) and time.monotonic() < give_up_at:
        time.sleep(POLL_S)
    if not _is_over(process):
        logger.warning("the local Ray did not end in %.0f s: killed", END_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _is_over(process: subprocess.Popen[bytes]) -> bool:
    """Its id, and so its group's, stays its own."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def local_options(config: ClusterConfig) -> dict[str, Any]:
    """Of a local Ray. All that is asked for can be placed there, be there as many cores or not."""
    demand: dict[str, float] = {}
    for role, count in counts_at_most(config).items():
        for bundle in plan_group(config, role).bundles if count else ():
            for name, amount in bundle.items():
                demand[name] = demand.get(name, 0.0) + count * amount
    return {
        "namespace": config.ray.namespace,
        "include_dashboard": False,
        "num_cpus": max(os.cpu_count() or 1, math.ceil(demand.pop("CPU", 0.0))),
        "resources": {name: amount for name, amount in demand.items() if name != "GPU"},
        "object_store_memory": OBJECT_STORE_BYTES,
        "_node_ip_address": LOOPBACK,
    }
