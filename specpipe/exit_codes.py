"""With what code a process of ours ends.

Imports nothing: the command line needs one before its own modules are loaded.
"""

from __future__ import annotations

from typing import Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_INVALID: Final = 2  # what was asked can never work
EXIT_INTERRUPTED: Final = 130  # by SIGINT
EXIT_TERMINATED: Final = 143  # by SIGTERM, where that is not the way to end
