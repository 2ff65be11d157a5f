"""How large the slow tests are: full size by default, a share of it with SPECPIPE_SLOW_SCALE (0.1: a trial run)."""

from __future__ import annotations

import os

SCALE = float(os.environ.get("SPECPIPE_SLOW_SCALE", "1"))


def scaled(count: int, *, least: int = 1) -> int:
    """`count` at the scale asked for, and `least` at least."""
    return max(least, round(count * SCALE))
