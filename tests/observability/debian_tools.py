"""Programs of others that tests run. What is missing is a reason to skip; .ci/run installs what can be had."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def program(name: str, package: str) -> str:
    """Its path. Skips the test where it is missing."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install {package})")
    return found


def run(*command: str, cwd: Path | None = None) -> str:
    """Its output. Fails the test with all of it unless the exit code is 0."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)}: {said}"
    return said


def promtool(*arguments: str) -> str:
    return run(program("promtool", "prometheus"), *arguments)
