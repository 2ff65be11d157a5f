"""The process of a rank on another host than rank 0's: dials it, works until the group ends, and ends with it.

Owns: that process from start to end. Must not know: sessions, what a step is for.

A rank that is asked to end (SIGTERM) goes on until rank 0 has let its sessions finish, as long as the grace lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from dataclasses import replace

from specpipe.config import EngineConfig, TargetWorkerConfig
from specpipe.engine.parallel.channel import Channel
from specpipe.engine.parallel.distant import claim_of
from specpipe.engine.parallel.rank import Ending, Mailbox, RankHello, run, say_failed
from specpipe.engine.parallel.rendezvous import join
from specpipe.errors import ConfigError, SpecpipeError, WorkerUnavailableError
from specpipe.exit_codes import EXIT_FAILED
from specpipe.process import ORPHAN_GRACE_S, lifecycle

logger = logging.getLogger(__name__)


async def serve_rank(config: TargetWorkerConfig) -> int:
    """Be one rank until the group ends; returns the exit code. Raises what ended it, if that was not in order."""
    assert config.rendezvous is not None
    async with lifecycle(config.server) as life:
        rank = _Rank(config, asyncio.get_running_loop())
        try:
            if not await life.unless_stopped(asyncio.shield(rank.ready)):
                return life.exit_code
            life.announce(config.rendezvous.address)
            if await life.unless_stopped(asyncio.shield(rank.ended)):
                return 0
            logger.info("asked to end: rank %d ends with rank 0, or after %g s", rank.number, config.server.grace_s)
            await life.drain(asyncio.shield(rank.ended))
            return life.exit_code
        finally:
            rank.is_over.set()


class _Rank:
    """The work, on a thread of its own."""

    def __init__(self, config: TargetWorkerConfig, loop: asyncio.AbstractEventLoop) -> None:
        assert config.rendezvous is not None
        self.number = config.rendezvous.rank
        self.is_over = threading.Event()  # nobody waits for it any more
        self.ready: asyncio.Future[None] = loop.create_future()  # it takes steps
        self.ended: asyncio.Future[None] = loop.create_future()  # done: in order; else it has the reason
        self._has_left = False
        self._config = config
        self._rendezvous = config.rendezvous
        self._loop = loop
        threading.Thread(target=self._main, name="rank", daemon=True).start()

    def _main(self) -> None:
        channel: Channel | None = None
        try:
            claim = claim_of(self._config.engine, self.number, self._config.tensor_parallel_size)
            channel, payload = join(self._rendezvous.address, self._rendezvous.token, claim, is_over=self.is_over)
            self._work(channel, RankHello.from_bytes(payload))
        except SpecpipeError as error:
            self._fail(error, channel)
        except Exception as error:
            logger.exception("rank %d failed", self.number)
            self._fail(SpecpipeError(f"rank {self.number}: {type(error).__name__}: {error}"), channel)

    def _work(self, channel: Channel, hello: RankHello) -> None:
        logger.info("rank %d of %d has joined %s", self.number, hello.size, self._rendezvous.address)
        config = merged(self._config.engine, hello)
        run(Mailbox(channel, self._leave), hello, config, has_one_host=False, on_ready=self._note_ready)

    def _note_ready(self) -> None:
        self._tell(self.ready, None)

    def _leave(self, ending: Ending) -> None:
        """On the thread of the control socket. The process ends even if nobody hears of it."""
        self._has_left = True
        in_order = ending is Ending.IN_ORDER
        self._end(None if in_order else WorkerUnavailableError(f"rank {self.number} ends: {ending.value}"))
        if not self.is_over.wait(ORPHAN_GRACE_S):
            os._exit(0 if in_order else EXIT_FAILED)

    def _fail(self, error: SpecpipeError, channel: Channel | None) -> None:
        if channel is not None and not self._has_left:
            say_failed(channel, str(error))
        self._end(error)

    def _end(self, error: SpecpipeError | None) -> None:
        self._tell(self.ended, error)
        self._tell(self.ready, error or WorkerUnavailableError("the group has ended before it was ready"))

    def _tell(self, future: asyncio.Future[None], error: SpecpipeError | None) -> None:
        """From any thread; the first to tell is heard."""

        def settle() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
                future.exception()  # whether or not anybody asks for it

        with contextlib.suppress(RuntimeError):  # the loop has ended, and the process is about to
            self._loop.call_soon_threadsafe(settle)


def merged(own: EngineConfig, hello: RankHello) -> EngineConfig:
    """What steps are like is rank 0's to say; where files lie and what computes is this host's. Raises ConfigError."""
    try:
        told = EngineConfig(**hello.engine)
    except TypeError as error:
        raise ConfigError(f"rank 0 has told no configuration of ours ({error})") from None
    return replace(told, model=own.model, device=own.device, num_threads=own.num_threads, core=own.core)
