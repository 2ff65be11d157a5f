"""What `up`, `status` and `down` show: JSON objects for programs, or a line for each process for people.

Owns: the form for people, and what goes to stdout. Must not know: where a status comes from.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

from specpipe.cluster.replica import ReplicaStatus
from specpipe.cluster.service import ClusterStatus
from specpipe.cluster.status import Lines, status_json
from specpipe.telemetry.logs import visible


def write_status(status: ClusterStatus, *, is_json: bool, lines: Lines | None = None) -> None:
    shown = [json.dumps(status_json(status, lines))] if is_json else status_lines(status, lines)
    sys.stdout.write("".join(f"{line}\n" for line in shown))
    sys.stdout.flush()


def status_lines(status: ClusterStatus, lines: Lines | None = None) -> Iterator[str]:
    places = f": answers at {', '.join(status.answering)}" if status.answering else ""
    yield f"{status.name} is {'ready' if status.is_ready else 'not ready'}{places}"
    width = max((len(replica.name) for replica in status.replicas), default=0)
    for replica in status.replicas:
        yield f"  {replica.name:{width}}  {_state(replica)}"
        for end in replica.ends:
            yield f"  {'':{width}}  {_clock(end.at)} {visible(end.reason)}"
        for line in (lines or {}).get(replica.name, ()):
            yield f"  {'':{width}}  | {visible(line)}"
    for change in status.changes:
        yield f"  {_clock(change.at)} {change.role}s: {change.before} -> {change.after} ({change.reason})"


def waiting_lines(status: ClusterStatus) -> list[str]:
    """One for each replica that does not serve."""
    return [f"{r.name}: {r.state.value}" for r in status.replicas if not r.is_serving]


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _state(replica: ReplicaStatus) -> str:
    words = [replica.state.value]
    if replica.process is not None:
        words.append(f"at {replica.process.address}, pid {replica.process.pid}")
    elif replica.node:
        words.append(f"on {replica.node}")
    if replica.process is not None and not replica.is_serving:
        words.append(f"(it {replica.health.value})")
    if replica.num_restarts:
        words.append(f"(restarted {replica.num_restarts} times)" if replica.num_restarts > 1 else "(restarted once)")
    return " ".join(words)
