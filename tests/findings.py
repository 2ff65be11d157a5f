"""What a test found out that is worth reading although it passed: shown at the end of the run.

With SPECPIPE_FINDINGS=FILE each line is also appended to that file at once, for runs that take hours.
"""

from __future__ import annotations

import os
from pathlib import Path

lines: list[str] = []
"""Of the running test; tests/conftest.py carries them to the end of the run, also out of another process."""


def record(text: str) -> None:
    """Keep `text` with the name of the running test."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
    line = f"{test.rpartition('/')[2]}: {text}"
    lines.append(line)
    if path := os.environ.get("SPECPIPE_FINDINGS"):
        with Path(path).open("a") as file:
            file.write(line + "\n")
