"""How a command ends: exit codes, and one sentence on stderr.

Owns: the table from errors to exit codes (`specpipe.exit_codes`). The sentence begins with "error: ", which the
launcher looks for; one that begins with "note: " is no reason to end.
"""

from __future__ import annotations

import sys

from specpipe.errors import InvalidRequestError, ModelMismatchError, SpecpipeError, UnsupportedModelError
from specpipe.exit_codes import EXIT_FAILED, EXIT_INVALID
from specpipe.launcher.child import ERROR_PREFIX
from specpipe.telemetry.logs import visible


def exit_code_of(error: SpecpipeError) -> int:
    """2 for what was asked wrongly, 1 for what went wrong."""
    is_invalid = isinstance(error, InvalidRequestError | ModelMismatchError | UnsupportedModelError)
    return EXIT_INVALID if is_invalid else EXIT_FAILED


def say_error(message: str) -> None:
    """One line, whatever the message holds."""
    sys.stderr.write(f"{ERROR_PREFIX}{visible(' '.join(message.split()))}\n")
    sys.stderr.flush()


def say_note(message: str) -> None:
    """Something to know that is no failure."""
    sys.stderr.write(f"note: {visible(message)}\n")
    sys.stderr.flush()
