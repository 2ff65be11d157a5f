"""Where the local Ray of an `up` is written down for `status` and `down`, and that one `up` alone has a name.

Owns: one file for each name, and the lock that an `up` holds on it for as long as it lives: the kernel gives it up with
the process, whatever ends that. Must not know: Ray.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final

from specpipe.errors import ConfigError, WorkerUnavailableError

POLL_S: Final = 0.1
NUM_TRIES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRay:
    """Where a local Ray is, and whether it wants the token that Ray keeps in ~/.ray."""

    address: str  # HOST:PORT of its head
    auth_mode: str  # "token" or "disabled"


class LocalPlace:
    """Of the service of one name, for one user of this machine."""

    def __init__(self, name: str) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        self._name = name
        self._file = cache / "specpipe" / "clusters" / f"{name}.json"

    @contextlib.contextmanager
    def held(self) -> Iterator[IO[str]]:
        """The name is this process's in the block, for which `tell` takes what is given.

        Raises ConfigError if another process has it, WorkerUnavailableError if the file cannot be made.
        """
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            file = self._file.open("a+")
        except OSError as error:
            raise WorkerUnavailableError(f"{self._file} cannot be written: {error.strerror}") from None
        with file:
            if not _take(file):
                raise ConfigError(f"{self._name} is up already: `specpipe status` and `specpipe down` know of it")
            file.truncate(0)
            try:
                yield file
            finally:
                file.truncate(0)

    def find(self) -> LocalRay:
        """Raises WorkerUnavailableError if no `up` has the name, or its Ray is not there yet."""
        if not self.is_held():
            raise WorkerUnavailableError(f"{self._name} is not up on this machine")
        try:
            return LocalRay(**json.loads(self._file.read_text()))
        except (OSError, ValueError, TypeError):
            raise WorkerUnavailableError(f"{self._name} is starting or ending: its Ray is not there") from None

    def is_held(self) -> bool:
        """By an `up` that lives."""
        try:
            with self._file.open() as file:
                return not _is_free(file, fcntl.LOCK_SH)
        except OSError:
            return False

    def wait_free(self, patience_s: float) -> bool:
        """Whether the `up` of the name has ended, or does in that time."""
        give_up_at = time.monotonic() + patience_s
        while self.is_held():
            if time.monotonic() > give_up_at:
                return False
            time.sleep(POLL_S)
        return True


def tell(file: IO[str], local: LocalRay) -> None:
    """Write it down where `LocalPlace.held` has opened a file."""
    file.write(json.dumps(asdict(local)))
    file.flush()


def _is_free(file: IO[str], kind: int) -> bool:
    """Takes the lock, for as long as the file is open, if it is to be had."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _take(file: IO[str]) -> bool:
    """Whoever only looks whether it is free has it for a moment."""
    for _ in range(NUM_TRIES):
        if _is_free(file, fcntl.LOCK_EX):
            return True
        time.sleep(POLL_S)
    return False
