"""`python -m specpipe.cluster.head READY_FD PARENT_FD OPTIONS`: a local Ray that ends with whoever started it.

It ends when it has lost its only node, too, or the process that knows where all is: nothing would come back by itself.

Owns: nothing but that. It is a process of its own, in a session of its own, since Ray's processes would else get the
signals of a terminal and be gone before what runs on them has ended in order.
"""

from __future__ import annotations

import json
import os
import select
import sys
from typing import Any, Final

LOOK_EVERY_S: Final = 1.0
NEEDED: Final = ("gcs_server", "raylet")  # as Ray calls its processes


def main(ready_fd: int, parent_fd: int, options: str) -> None:
    """Says "ADDRESS MODE_OF_AUTHENTICATION" on `ready_fd`, and ends when `parent_fd` does."""
    import ray

    context = ray.init(address="local", log_to_driver=False, logging_level="ERROR", **json.loads(options))
    mode = os.environ.get("RAY_AUTH_MODE", "disabled")
    os.write(ready_fd, f"{context.address_info['gcs_address']} {mode}\n".encode())
    os.close(ready_fd)
    while not _has_ended(parent_fd):
        if _is_broken():
            os._exit(1)  # an end in order would wait for what is not there; Ray's processes end with this one
    ray.shutdown()


def _has_ended(parent_fd: int) -> bool:
    """Looks for a second whether whoever started us goes."""
    poll = select.poll()  # not `select`, which knows descriptors below 1024 only
    poll.register(parent_fd, select.POLLIN)
    return bool(poll.poll(1000 * LOOK_EVERY_S)) and not os.read(parent_fd, 1024)


def _is_broken() -> bool:
    """NOTE: Ray has no public word for it: `ray.nodes()` itself hangs without the processes that it is about."""
    import ray

    node: Any = ray._private.worker._global_node
    return any(kind in NEEDED for kind, _ in node.dead_processes())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
