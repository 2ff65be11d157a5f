"""`python -m specpipe.cluster.head READY_FD PARENT_FD OPTIONS`: a local Ray that ends with whoever started it.

Owns: nothing but that. It is a process of its own, in a session of its own, since Ray's processes would else get the
signals of a terminal and be gone before what runs on them has ended in order.
"""

from __future__ import annotations

import json
import os
import sys


def main(ready_fd: int, parent_fd: int, options: str) -> None:
    """Says "ADDRESS MODE_OF_AUTHENTICATION" on `ready_fd`, and ends when `parent_fd` does."""
    import ray

    context = ray.init(address="local", log_to_driver=False, logging_level="ERROR", **json.loads(options))
    mode = os.environ.get("RAY_AUTH_MODE", "disabled")
    os.write(ready_fd, f"{context.address_info['gcs_address']} {mode}\n".encode())
    os.close(ready_fd)
    while os.read(parent_fd, 1024):
        pass
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
