"""Whether a process that runs also serves: its gRPC health, asked for again and again from beside it.

Owns: the asking, and when a process that is silent, or says that it hangs, is past waiting for.
Must not know: Ray, how a process is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from dataclasses import dataclass

from specpipe.config import TlsConfig
from specpipe.errors import ConfigError, WorkerUnavailableError
from specpipe.health_client import HealthClient
from specpipe.launcher.plan import ProcessSpec
from specpipe.server import LIVENESS, create_channel
from specpipe.tls import name_of_worker


class Health(enum.Enum):
    SERVING = "serves"
    NOT_SERVING = "does not serve"
    SILENT = "does not answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPatience:
    """In seconds."""

    every_s: float = 1.0  # between an answer and the next question
    answer_s: float = 3.0  # a process that answers later is silent
    hung_s: float = 30.0  # so long silent, or not alive by its own word: it will not get well


class ProcessHealth:
    """Of one process, from when it has said that it serves. A process that has never answered is not judged."""

    def __init__(self, address: str, spec: ProcessSpec, patience: HealthPatience | None = None) -> None:
        """`address`: HOST:PORT that it has announced."""
        self.now = Health.SERVING
        self._patience = patience or HealthPatience()
        self._has_changed = asyncio.Event()
        self._address = address if answers_grpc(spec) else ""
        self._name = spec.role if name_of_worker(address, spec.role) else ""
        self._tls = tls_of(spec)
        self._has_answered = False
        self._is_over = False

    async def differs_from(self, known: Health) -> Health:
        """Returns the health as soon as it is not `known`. Raises WorkerUnavailableError once the process has ended."""
        while self.now is known and not self._is_over:
            await self._has_changed.wait()
        if self._is_over:
            raise WorkerUnavailableError("the process has ended")
        return self.now

    def end(self) -> None:
        """The process has."""
        self._is_over = True
        self._has_changed.set()

    async def hangs(self) -> str:
        """Returns when it hangs past waiting for, with how that shows."""
        with contextlib.suppress(ConfigError):  # certificates that are not there: then nobody reaches it either
            if self._address:
                async with create_channel(self._address, self._tls, name=self._name) as channel:
                    return await self._ask(HealthClient(channel, timeout_s=self._patience.answer_s))
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def _ask(self, client: HealthClient) -> str:
        """Time is counted by questions: while this process itself was stopped none has passed."""
        bad_s = 0.0
        while True:
            began_s = time.monotonic()
            is_serving, is_alive = await asyncio.gather(client.is_well(""), client.is_well(LIVENESS))
            if is_alive is None and self._has_answered and await self._has_closed():
                is_serving, is_alive = False, True
            self._has_answered |= is_serving is not None
            self._note(is_serving)
            await asyncio.sleep(self._patience.every_s)
            passed_s = min(time.monotonic() - began_s, self._patience.every_s + self._patience.answer_s)
            bad_s = 0.0 if is_alive or not self._has_answered else bad_s + passed_s
            if bad_s >= self._patience.hung_s:
                shown = "it has not answered" if is_alive is None else "it has said that it hangs"
                return f"{shown} for {bad_s:.0f} s"

    async def _has_closed(self) -> bool:
        """Whether nothing listens there: it was told to end, and its last answers go on. What hangs still listens."""
        host, _, port = self._address.rpartition(":")
        try:
            async with asyncio.timeout(self._patience.answer_s):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError):
            return False
        writer.transport.abort()
        return False

    def _note(self, is_serving: bool | None) -> None:
        if not self._has_answered:
            return
        found = {True: Health.SERVING, False: Health.NOT_SERVING, None: Health.SILENT}[is_serving]
        if found is not self.now:
            self.now = found
            self._has_changed.set()
            self._has_changed = asyncio.Event()


def answers_grpc(spec: ProcessSpec) -> bool:
    """A rank that is a process of its own answers rank 0 alone, and announces where that is."""
    given = dict(zip(spec.arguments, spec.arguments[1:], strict=False))
    return given.get("--rank", "0") == "0"


def tls_of(spec: ProcessSpec) -> TlsConfig:
    """As its command line has it."""
    given = dict(zip(spec.arguments, spec.arguments[1:], strict=False))
    cert, key, ca = (given.get(flag, "") for flag in ("--tls-cert", "--tls-key", "--tls-ca"))
    return TlsConfig(cert=cert, key=key, ca=ca)
