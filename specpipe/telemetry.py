"""What a process says about itself while it runs: today its log.

Owns: the one place where logging is set up. Must not know: services, models. Libraries only ever call
`logging.getLogger`.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

from specpipe.errors import ConfigError

LOG_LEVELS: Final = ("debug", "info", "warning", "error")


def configure_logging(level: str, role: str = "") -> None:
    """Send this process's log to stderr, one line a record, from `level` up.

    `role` names the process in each line; children of a launcher leave it empty, since the launcher adds theirs.
    Raises ConfigError for an unknown level.
    """
    if level not in LOG_LEVELS:
        raise ConfigError(f"log level must be one of {', '.join(LOG_LEVELS)}, got {level!r}")
    prefix = f"[{role}] " if role else ""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s {prefix}%(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
