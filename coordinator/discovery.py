"""Where workers are looked for: addresses as they stand, and names that stand for any number of them.

Owns: how `--target` and `--draft` are read, what a name stands for, what is new and what is gone. Must not know:
links, sessions, how a worker is dialled.

`HOST:PORT` is one worker for ever. `dns:HOST:PORT` is one at each address of the name, asked for again and again: a
headless Service of Kubernetes has one for each pod that is ready. `file:PATH` is one for each line of the file, read
again and again: the Ray launcher writes it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import stat
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from specpipe.ports import is_address, join_address

logger = logging.getLogger(__name__)

DNS: Final = "dns:"
FILE: Final = "file:"
READ_EVERY_S: Final = 0.5  # how often a file is read: that costs nothing
MAX_WORKERS: Final = 1000  # of one name: each is dialled for ever
MAX_FILE_BYTES: Final = 1024 * 1024
MAX_SHOWN: Final = 60  # characters of a line

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> addresses HOST:PORT. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a name stands for now and did not before, and the reverse; in the order of the answer."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class Look(Protocol):
    """One way of finding out what a name stands for."""

    @property
    def shown(self) -> str:
        """The name, in the middle of a sentence."""
        ...

    @property
    def every_s(self) -> float | None:
        """How often it is worth it; None: as the settings say."""
        ...

    async def find(self, resolve: Resolve) -> Sequence[str]:
        """HOST:PORT of each worker. Raises OSError."""
        ...


class DnsLook:
    every_s: float | None = None

    def __init__(self, source: str) -> None:
        host, _, port = source.removeprefix(DNS).rpartition(":")
        self.host, self.port = host.strip("[]"), int(port)

    @property
    def shown(self) -> str:
        return self.host

    async def find(self, resolve: Resolve) -> Sequence[str]:
        return await resolve(self.host, self.port)


class FileLook:
    every_s: float | None = READ_EVERY_S

    def __init__(self, source: str) -> None:
        self.path = Path(source.removeprefix(FILE))

    @property
    def shown(self) -> str:
        return str(self.path)

    async def find(self, resolve: Resolve) -> Sequence[str]:  # noqa: ARG002 - a file asks nobody
        text = await asyncio.to_thread(_read_text, self.path)
        lines = [line.strip() for line in text.splitlines()]
        if wrong := next((line for line in lines if line and not is_address(line)), None):
            raise OSError(f"{wrong[:MAX_SHOWN]!r} is not HOST:PORT")
        return [line for line in lines if line]


class Name:
    """What one name has stood for so far."""

    def __init__(self, source: str) -> None:
        """`source`: dns:HOST:PORT or file:PATH."""
        self.source = source
        self.addresses: tuple[str, ...] = ()
        self._look: Look = FileLook(source) if source.startswith(FILE) else DnsLook(source)
        self._problem = ""

    async def ask(self, resolve: Resolve) -> Change:
        """What has changed. A resolver that fails changes nothing, and is heard of once."""
        shown = self._look.shown
        try:
            found = tuple(dict.fromkeys(await self._look.find(resolve)))
            if len(found) > MAX_WORKERS:
                raise OSError(f"{len(found)} workers are more than {MAX_WORKERS}")
        except OSError as error:
            self._note(f"{shown} is not resolved ({error.strerror or error}): what it stood for before is kept")
            return Change()
        self._note("" if found else f"{shown} stands for no address now")
        change = difference(self.addresses, found)
        self.addresses = found
        return change

    def next_ask_s(self, usual_s: float) -> float:
        """Until it is worth asking again."""
        return usual_s if self._look.every_s is None else min(usual_s, self._look.every_s)

    def _note(self, problem: str) -> None:
        if problem and problem != self._problem:
            logger.warning("%s; it is asked for again", problem)
        self._problem = problem


def difference(before: Sequence[str], now: Sequence[str]) -> Change:
    return Change(
        added=tuple(address for address in now if address not in before),
        removed=tuple(address for address in before if address not in now),
    )


def is_name(source: str) -> bool:
    return source.startswith((DNS, FILE))


def _read_text(path: Path) -> str:
    """NOTE: a pipe or a device may never end, or never begin: nobody would get the thread back that reads it."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no file")
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise OSError(f"it is larger than {MAX_FILE_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise OSError("it is no text") from None


async def resolve_name(host: str, port: int) -> list[str]:
    """By the system's resolver, which may take a minute to find out that nobody answers.

    It is asked on a thread that nobody waits for: the event loop's own threads would hold up the end of the process.
    """
    answer: Future[list[str]] = Future()
    answer.set_running_or_notify_cancel()
    threading.Thread(target=_resolve, args=(host, port, answer), name=f"resolve {host}", daemon=True).start()
    return await asyncio.wrap_future(answer)


def _resolve(host: str, port: int, answer: Future[list[str]]) -> None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        answer.set_result([join_address(str(address[0]), port) for *_, address in found])
    except UnicodeError:  # before anybody is asked: a label that is empty or too long
        answer.set_exception(OSError(f"{host!r} cannot be the name of a host"))
    except OSError as error:
        answer.set_exception(error)
