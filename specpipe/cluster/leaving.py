"""What runs on this Ray node ends in order before the node is taken away, and goes on elsewhere.

Owns: finding the processes that keepers have started here, telling them to end, waiting until they have. Ray is told
first that the node leaves, by its own command: it places nothing more here then, so what has ended begins elsewhere
(`replica`). All of it works without a Ray that answers: its head may be gone already.
Must not know: why the node leaves, what the processes do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from specpipe.launcher.plan import COORDINATOR, DRAFT_WORKER, TARGET_WORKER

PROC: Final = Path("/proc")
ROLES: Final = (COORDINATOR, DRAFT_WORKER, TARGET_WORKER)
ACTOR_TITLE: Final = b"ray::"  # so Ray calls the processes of actors, and a keeper is one
RAY_PATIENCE_S: Final = 20.0  # for a Ray that is asked to place nothing more here

logger = logging.getLogger(__name__)


def tell_ray(deadline_s: float) -> bool:
    """Have Ray place nothing more on this node, which is gone in `deadline_s` seconds. Returns whether Ray agrees."""
    command = [
        str(Path(sys.executable).with_name("ray")),
        "drain-node",
        "--reason=DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message=specpipe leave",
        f"--deadline-remaining-seconds={deadline_s:.0f}",
    ]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=RAY_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("Ray is not told that this node leaves: %s", error)
        return False
    if said.returncode:
        lines = said.stderr.split("\n")
        logger.warning("Ray is not told that this node leaves: %s", next((x for x in reversed(lines) if x.strip()), ""))
    return not said.returncode


def end_processes(pids: Iterable[int], patience_s: float) -> tuple[int, ...]:
    """SIGTERM to those of these processes that a keeper has started; the others are left alone.

    Returns when all have ended, or after `patience_s` seconds, with the pids of those that have not.
    """
    with contextlib.ExitStack() as stack:
        told: dict[int, int] = {}  # pid by the descriptor that is readable when the process has ended
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                descriptor = os.pidfd_open(pid)
                stack.callback(os.close, descriptor)
                if _is_kept(pid):  # asked after the descriptor is had: the pid can be nobody else's now
                    signal.pidfd_send_signal(descriptor, signal.SIGTERM)
                    told[descriptor] = pid
        logger.info("%d processes are told to end", len(told))
        return _wait(told, patience_s)


def all_pids() -> Iterator[int]:
    """Of this machine, or of this container."""
    return (int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal())


def _wait(told: dict[int, int], patience_s: float) -> tuple[int, ...]:
    poll = select.poll()
    for descriptor in told:
        poll.register(descriptor, select.POLLIN)
    give_up_at = time.monotonic() + patience_s
    while told and (left_s := give_up_at - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(1000 * left_s):
            poll.unregister(descriptor)
            del told[descriptor]
    return tuple(told.values())


def _is_kept(pid: int) -> bool:
    """Whether it is a process of the service (see `launcher.child`) that an actor of Ray's has started."""
    words = _command_line(pid)
    is_ours = words[2:4] == [b"-m", b"specpipe"] and words[4:5] in [[role.encode()] for role in ROLES]
    return is_ours and _command_line(_parent(pid))[0].startswith(ACTOR_TITLE)


def _command_line(pid: int) -> list[bytes]:
    """Of a process that has ended: one empty word."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return [b""]


def _parent(pid: int) -> int:
    """0 for a process that has ended."""
    try:
        stat = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])  # the name in parentheses may hold anything
