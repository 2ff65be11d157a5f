"""How processes are named to OpenTelemetry: https://opentelemetry.io/docs/specs/semconv/resource/

Owns: the attributes of a resource, the provider's name. Must not know: OpenTelemetry, what the process does.
"""

from __future__ import annotations

import os
import socket

import specpipe
from specpipe.spans import Process, Role

PROVIDER = "specpipe"
"""gen_ai.provider.name of spans and metrics."""


def own_process(role: Role, *, address: str = "", incarnation: int = 0) -> Process:
    """This one."""
    return Process(
        role=role,
        address=address,
        host=socket.gethostname(),
        pid=os.getpid(),
        version=specpipe.__version__,
        incarnation=incarnation,
    )


def resource_of(process: Process) -> dict[str, str | int]:
    return {
        "service.name": f"specpipe-{process.role.value}",
        "service.instance.id": f"{process.host}:{process.pid}",
        "service.version": process.version,
        "host.name": process.host,
        "process.pid": process.pid,
    }
