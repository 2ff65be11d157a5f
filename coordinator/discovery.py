"""Where workers are looked for: addresses as they stand, and names that stand for any number of them.

Owns: how `--target` and `--draft` are read, what a name resolves to, what is new and what is gone. Must not know:
links, sessions, how a worker is dialled.

`HOST:PORT` is one worker for ever. `dns:HOST:PORT` is one at each address of the name, asked for again and again: a
headless Service of Kubernetes has one for each pod that is ready.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from specpipe.server import join_address

logger = logging.getLogger(__name__)

DNS: Final = "dns:"

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> addresses HOST:PORT. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a name stands for now and did not before, and the reverse; in the order of the answer."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class Name:
    """What one name has stood for so far."""

    def __init__(self, source: str) -> None:
        """`source`: dns:HOST:PORT."""
        host, _, port = source.removeprefix(DNS).rpartition(":")
        self.source = source
        self.host, self.port = host.strip("[]"), int(port)
        self.addresses: tuple[str, ...] = ()
        self._problem = ""

    async def ask(self, resolve: Resolve) -> Change:
        """What has changed. A resolver that fails changes nothing, and is heard of once."""
        try:
            found = tuple(dict.fromkeys(await resolve(self.host, self.port)))
        except OSError as error:
            self._note(f"{self.host} is not resolved ({error.strerror or error}): what it stood for before is kept")
            return Change()
        self._note("" if found else f"{self.host} stands for no address now")
        change = difference(self.addresses, found)
        self.addresses = found
        return change

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
    return source.startswith(DNS)


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
