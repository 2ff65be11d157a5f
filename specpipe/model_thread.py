"""The one thread that runs the model, and the mail between it and the event loop.

Owns: the thread, the pending messages of each link on their way in, and the wake-ups both ways. Must not know: gRPC,
protobuf, what a step is.

A link is one stream from one coordinator. The event loop attaches it, posts its messages and detaches it; the model
thread receives them between two steps only, merged and bounded as `specpipe.link.Outbox` says, so a flood of messages
during a long step costs neither memory nor a later one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from specpipe.errors import InvariantError, SpecpipeError
from specpipe.link import Outbox, messages_of
from specpipe.reports import Report
from specpipe.types import Close, Closed, Extension, Failed, Heartbeat, Open, SessionMessage

logger = logging.getLogger(__name__)

MAX_WAIT_S: Final = 3600.0  # a deadline that a peer names may lie beyond what a lock can wait for


class StepLoop(Protocol):
    """A worker's work. All but `heartbeat` are called on the model thread only, one at a time."""

    def receive(self, link: int, message: SessionMessage) -> None:
        """Apply a message of a peer; late ones for unknown sessions are normal and ignored.

        A SpecpipeError that is raised fails that session (Failed, then Closed); a bad Extension is dropped.
        """
        ...

    def link_lost(self, link: int) -> None:
        """The stream is gone: end its sessions and free their slots. Nothing sent to it arrives any more."""
        ...

    def link_paused(self, link: int, is_paused: bool) -> None:
        """The peer has been silent: run no steps for its sessions until it speaks again."""
        ...

    def run_once(self) -> float | None:
        """Run one step if there is work.

        Returns seconds to wait for messages before the next call: 0.0 for none, None until a message comes. It may be
        called sooner, after `MAX_WAIT_S`. An exception that escapes ends the process.
        """
        ...

    def heartbeat(self) -> Heartbeat:
        """What the thread does now. Called from the event loop: must be thread-safe and never wait for a step.

        `step_running_ms`: how long `run_once` has been at one thing, be it the forward pass, or what comes before or
        after it; 0 while it is not running. A part that hangs shows, and a long pass is not longer for its neighbours.
        """
        ...


Send = Callable[[int, SessionMessage], None]
"""(link, message): thread-safe, never blocks; a message for a link that is gone vanishes."""


@dataclass(slots=True)
class _Link:
    wake: Callable[[], None]  # called on the event loop after `outbox` got something
    inbox: Outbox = field(default_factory=Outbox)
    outbox: Outbox = field(default_factory=Outbox)
    is_paused: bool = False
    was_paused: bool = False  # what the step loop was told
    is_lost: bool = False


class ModelThread:
    """Runs a StepLoop. Made and used on the event loop; `create_loop` runs on the thread (it may load the model)."""

    def __init__(self, create_loop: Callable[[Send], StepLoop], *, name: str = "model") -> None:
        self._create_loop = create_loop
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._condition = threading.Condition()
        self._numbers = itertools.count(1)
        self._links: dict[int, _Link] = {}
        self._mail: dict[int, _Link] = {}  # links with something for the thread, in order of the first of it
        self._num_dropped_before = (0, 0)  # in and out, of links that are gone
        self._is_stopping = False
        self._step_loop: StepLoop | None = None
        self._receiving_since_s: float | None = None  # since when the step loop receives mail; None: it does not
        self._event_loop: asyncio.AbstractEventLoop
        self._ready: asyncio.Future[None]
        self.failure: asyncio.Future[None]
        """Done when the thread has ended: with the exception that ended it, or None after `stop`."""

    def start(self) -> None:
        """Start the thread. Called once, on the running event loop."""
        self._event_loop = asyncio.get_running_loop()
        self._ready = self._event_loop.create_future()
        self.failure = self._event_loop.create_future()
        self._thread.start()

    async def wait_ready(self) -> None:
        """Returns when `create_loop` has; raises what it raised."""
        await asyncio.shield(self._ready)

    @property
    def is_running(self) -> bool:
        """The step loop exists and takes messages."""
        return self._step_loop is not None and not self._is_stopping and not self.failure.done()

    def heartbeat(self) -> Heartbeat:
        """The step loop's, where receiving mail is one of the things that it may be at."""
        if self._step_loop is None:
            return Heartbeat()
        heartbeat, since_s = self._step_loop.heartbeat(), self._receiving_since_s
        if since_s is None:
            return heartbeat
        return replace(heartbeat, step_running_ms=(time.perf_counter() - since_s) * 1e3)

    # Links

    def attach(self, wake: Callable[[], None]) -> tuple[int, Outbox]:
        """Begin a link. Returns its number and what the step loop has for it; `wake` is called when there is more."""
        number = next(self._numbers)
        link = _Link(wake)
        with self._condition:
            self._links[number] = link
        return number, link.outbox

    def detach(self, link: int) -> None:
        """End a link: the step loop is told, after which it hears no more of it."""
        self._mark(link, lambda state: setattr(state, "is_lost", True))

    def pause(self, link: int, is_paused: bool) -> None:
        self._mark(link, lambda state: setattr(state, "is_paused", is_paused))

    def post(self, link: int, message: SessionMessage) -> None:
        """Hand a message to the step loop, which receives it before its next step."""
        if isinstance(message, Extension | Open):  # what came during a step is to be told from what came after it
            message = replace(message, arrived_s=time.perf_counter())
        self._mark(link, lambda state: state.inbox.put(message))

    def num_pending(self, link: int) -> int:
        """Sessions with messages that the step loop has not received yet."""
        state = self._links.get(link)
        return 0 if state is None else state.inbox.num_sessions

    @property
    def num_waiting(self) -> tuple[int, int]:
        """Sessions with messages on their way in, and on their way out. On any thread."""
        links = tuple(self._links.values())
        return sum(link.inbox.num_sessions for link in links), sum(link.outbox.num_sessions for link in links)

    @property
    def num_dropped(self) -> tuple[int, int]:
        """Messages that gave way to newer ones on their way in, and on their way out. On any thread; never falls."""
        with self._condition:
            num_in, num_out = self._num_dropped_before
            links = self._links.values()
            return (
                num_in + sum(link.inbox.num_dropped for link in links),
                num_out + sum(link.outbox.num_dropped for link in links),
            )

    def send(self, link: int, message: SessionMessage) -> None:
        """See `Send`. Wakes the event loop at most once until it has looked."""
        state = self._links.get(link)
        if state is not None and not state.is_lost and state.outbox.put(message):
            self._call_soon(state.wake)

    def stop(self) -> None:
        """Ask the thread to end after the running step; `failure` tells when it has."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify()

    def fail(self, error: BaseException) -> None:
        """Thread-safe: what the thread needs is lost, and it may be stuck. `failure` holds `error` without it."""
        self._call_soon(self._finish, error)

    def _mark(self, link: int, change: Callable[[_Link], object]) -> None:
        with self._condition:
            state = self._links.get(link)
            if state is None or state.is_lost:
                return
            change(state)
            self._mail[link] = state
            self._condition.notify()

    # On the thread

    def _main(self) -> None:
        error: BaseException | None = None
        try:
            self._step_loop = self._create_loop(self.send)
            self._call_soon(_set_result, self._ready)
            self._run(self._step_loop)
        except BaseException as raised:  # the thread's last frame: reported by `failure`
            error = raised
        self._call_soon(self._finish, error)

    def _run(self, step_loop: StepLoop) -> None:
        wait_s: float | None = 0.0
        while (mail := self._wait(wait_s)) is not None:
            self._receiving_since_s = time.perf_counter()
            for number, link in mail:
                self._deliver(step_loop, number, link)
            self._receiving_since_s = None
            wait_s = step_loop.run_once()

    def _wait(self, wait_s: float | None) -> list[tuple[int, _Link]] | None:
        """The links with mail, after waiting for some if there is none; None: stop."""
        with self._condition:
            if wait_s != 0.0:
                limit_s = None if wait_s is None else min(wait_s, MAX_WAIT_S)
                self._condition.wait_for(lambda: self._mail or self._is_stopping, limit_s)
            mail = list(self._mail.items())
            self._mail.clear()
            return None if self._is_stopping else mail

    def _deliver(self, step_loop: StepLoop, number: int, link: _Link) -> None:
        if link.is_lost:
            with self._condition:
                del self._links[number]
                num_in, num_out = self._num_dropped_before
                self._num_dropped_before = (num_in + link.inbox.num_dropped, num_out + link.outbox.num_dropped)
            step_loop.link_lost(number)
            return
        while (batch := link.inbox.take()) is not None:
            for message in messages_of(batch):
                self._receive(step_loop, number, message)
        if link.is_paused != link.was_paused:
            link.was_paused = link.is_paused
            step_loop.link_paused(number, link.was_paused)

    def _receive(self, step_loop: StepLoop, number: int, message: SessionMessage) -> None:
        try:
            step_loop.receive(number, message)
        except InvariantError:
            raise
        except SpecpipeError as error:
            told = message.label if isinstance(message, Open) else f"session {message.session}"
            logger.info("%s: %s refused: %s", told, type(message).__name__, error)
            if isinstance(message, Extension | Close | Closed | Report):
                return
            self.send(
                number,
                Failed(
                    session=message.session,
                    code=error.code,
                    message=str(error),
                    is_retryable=error.is_retryable,
                ),
            )
            step_loop.receive(number, Close(session=message.session, reason=str(error)))

    def _finish(self, error: BaseException | None) -> None:
        if self.failure.done():
            return
        if not self._ready.done():
            self._ready.set_exception(error or RuntimeError("the model thread stopped before it was ready"))
            self._ready.exception()  # whoever asks sees it; nobody has to
        if error is None:
            self.failure.set_result(None)
        else:
            self.failure.set_exception(error)
            self.failure.exception()

    def _call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        try:
            self._event_loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            logger.debug("the event loop is closed: nobody to tell")


def _set_result(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
