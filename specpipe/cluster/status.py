"""The status of a service as JSON, for whoever is not a person.

Owns: names and shapes of its fields. Must not know: where a status comes from, how people are shown it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from specpipe.cluster.replica import End, ReplicaStatus
from specpipe.cluster.service import ClusterStatus

Lines = Mapping[str, Sequence[str]]  # name of a replica -> what it has logged last


def status_json(status: ClusterStatus, lines: Lines | None = None) -> dict[str, Any]:
    return {
        "name": status.name,
        "ready": status.is_ready,
        "grpc": list(status.coordinators),
        "replicas": [_replica_json(replica, lines) for replica in status.replicas],
        "changes": [asdict(change) for change in status.changes],
    }


def _replica_json(replica: ReplicaStatus, lines: Lines | None) -> dict[str, Any]:
    process = replica.process
    shown: dict[str, Any] = {
        "name": replica.name,
        "role": replica.role,
        "state": replica.state.name.lower(),
        "health": replica.health.name.lower() if process else None,
        "node": replica.node or None,
        "address": process.address if process else None,
        "http": (process.http or None) if process else None,
        "metrics": (process.metrics or None) if process else None,
        "pid": process.pid if process else None,
        "ranks": list(process.companions) if process else [],
        "restarts": replica.num_restarts,
        "ends": [_end_json(end) for end in replica.ends],
    }
    if lines is not None:
        shown["log"] = list(lines.get(replica.name, ()))
    return shown


def _end_json(end: End) -> dict[str, Any]:
    return {"at": round(end.at, 3), "reason": end.reason, "log": list(end.lines)}
