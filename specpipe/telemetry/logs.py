"""The log of a process.

Owns: the one place where logging is set up. Must not know: services, models. Libraries only ever call
`logging.getLogger`.
"""

from __future__ import annotations

import datetime
import logging
import sys
from typing import Any, Final, Literal, get_args

from specpipe.errors import ConfigError

LogLevel = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: Final[tuple[str, ...]] = get_args(LogLevel)
FORWARDED: Final = {"is_forwarded": True}
_ESCAPES: Final = {
    code: ascii(chr(code))[1:-1]
    for code in (*range(32), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(code) != "\t"
}


def configure_logging(level: str, role: str = "") -> None:
    """Send this process's log to stderr, one line a record, from `level` up.

    `role` names the process in each line; children of a launcher leave it empty, since the launcher adds theirs. A
    record with `extra=FORWARDED` is another process's line and goes out as it is.
    Raises ConfigError for an unknown level.
    """
    if level not in LOG_LEVELS:
        raise ConfigError(f"log level must be one of {', '.join(LOG_LEVELS)}, got {level!r}")
    prefix = f"[{role}] " if role else ""
    handler = _StderrHandler()
    handler.setFormatter(_Formatter(f"%(asctime)s {prefix}%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _StderrHandler(logging.Handler):
    """Writes to what sys.stderr is at that moment, so that progress bars can step aside for a line."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except (OSError, ValueError):  # stderr is gone; logging has nowhere left to say so
            self.handleError(record)


class _Formatter(logging.Formatter):
    """A message is one line without control characters: it may hold what a client or a peer has sent."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(record.getMessage()) if hasattr(record, "is_forwarded") else super().format(record)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802 - logging's
        """ISO 8601, local time with its distance from UTC: lines of several hosts and days can be put in order."""
        return datetime.datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = visible(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        """No line of a trace looks like a record, whatever an error says."""
        return "\n".join(f"    {visible(line)}" for line in super().formatException(ei).splitlines())


def visible(text: str) -> str:
    """Without control characters, line ends among them: they stand there as \\n and the like."""
    return text.translate(_ESCAPES)
