"""The whole service on this machine: one process for each worker and one for the coordinator, over loopback gRPC.

`plan` decides what runs where (pure), `child` is one process from spawn to end, `service` starts, supervises and stops
them.
Must not know: torch, protobuf, what the processes do.
"""

from specpipe.launcher.plan import ServiceConfig
from specpipe.launcher.service import LocalService, ProcessInfo

__all__ = ["LocalService", "ProcessInfo", "ServiceConfig"]
