"""Descriptors that `select` does not know: those from 1024 on, as a process with many connections has them."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

FIRST = 1024
NEEDED = 2 * FIRST  # descriptors that a process must be allowed


@contextmanager
def many_descriptors() -> Iterator[None]:
    """This process may have as many as it takes, in the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < NEEDED:
        pytest.skip(f"needs {NEEDED} descriptors, and this process may have {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, NEEDED), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def moved_high(descriptor: int) -> int:
    """The same with a high number. The low one is closed."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST)
    os.close(descriptor)
    return high
