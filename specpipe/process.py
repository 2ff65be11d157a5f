"""The life of one process of the service: how it starts, learns that it must end, and ends.

Owns: signals, the pipe to the parent, the ready line, pinning, thread counts. Must not know: what the
process serves.

A process that was started by another one (`parent_fd`) ends with it: the kernel kills it when the thread that started
it ends, SIGKILL of the parent included, and end-of-file on `parent_fd` ends it where the kernel does not. NOTE: so the
starting thread must live as long as its children: start them from the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from specpipe.config import ServerConfig
from specpipe.errors import ConfigError, InvalidRequestError, SpecpipeError
from specpipe.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_INVALID

logger = logging.getLogger(__name__)

HTTP_PREFIX = "http="  # of the word in the ready line that says where pages are served
METRICS_PREFIX = "metrics="  # ... and where Prometheus finds metrics
LAST_WAIT_S = 0.2  # for a thread that was told to end
ORPHAN_GRACE_S = 2.0
"""How long an orphan may take to end by itself."""

_PR_SET_PDEATHSIG = 1
_LONG_JOBS = {"model": "a step", "tokenizer_0": "the tokenizer"}  # by the name of the thread that may be inside one
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Lifecycle:
    """What a process is told from outside. Made by `lifecycle`."""

    def __init__(self, config: ServerConfig) -> None:
        self.stop = asyncio.Event()
        """Asked to end: refuse new work, let running work end for the grace."""
        self.hurry = asyncio.Event()
        """Asked again, or the parent is gone: end now."""
        self.exit_code = 0
        self._config = config

    def request_stop(self, exit_code: int = 0) -> None:
        if self.stop.is_set():
            self.hurry.set()
        self.exit_code = max(self.exit_code, exit_code)
        self.stop.set()

    def orphan(self) -> None:
        logger.warning("the parent process is gone")
        self.hurry.set()
        self.request_stop()

    def announce(self, address: str, companions: Sequence[int] = (), *, http: str = "", metrics: str = "") -> None:
        """Tell the parent that this process serves on `address` (HOST:PORT), and the pids of its companions.

        `http` is where it serves pages, `metrics` where Prometheus finds them (HOST:PORT; empty: nowhere). The line is
        "ADDRESS [http=HOST:PORT] [metrics=HOST:PORT] [PID ...]".
        """
        logger.info("serving on %s", address)
        text = self._config.ready_text.format(address=address)
        places = [prefix + place for prefix, place in ((HTTP_PREFIX, http), (METRICS_PREFIX, metrics)) if place]
        words = [text, *places, *map(str, companions)]
        fd = self._config.ready_fd
        if fd is not None:
            with contextlib.suppress(BrokenPipeError):  # the parent is gone: parent_fd says so too
                os.write(fd, f"{' '.join(words)}\n".encode())
            os.close(fd)

    async def unless_stopped(self, work: Awaitable[object]) -> bool:
        """Await `work`; False as soon as the process is asked to end (the work is then cancelled). Raises its error."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return False
            await task
            return True
        finally:
            await _cancel(task, stop)

    async def drain(self, work: Awaitable[object]) -> None:
        """Await `work` for the grace at most, and only until there is a hurry."""
        task = asyncio.ensure_future(work)
        hurry = asyncio.ensure_future(self.hurry.wait())
        try:
            await asyncio.wait([task, hurry], timeout=self._config.grace_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
            else:
                logger.warning("ending before running work has ended")
        finally:
            await _cancel(task, hurry)


@asynccontextmanager
async def lifecycle(config: ServerConfig) -> AsyncIterator[Lifecycle]:
    """Listen to signals and to the parent while inside. Entered first thing in a service's `serve`."""
    life = Lifecycle(config)
    with _signals(life, has_parent=config.parent_fd is not None), _parent_watch(life, config.parent_fd):
        yield life


async def serve_until_stopped(
    life: Lifecycle,
    address: str,
    *,
    drain: Callable[[], Awaitable[object]],
    failure: asyncio.Future[None] | None = None,
    companions: Sequence[int] = (),
    http: str = "",
    metrics: str = "",
) -> int:
    """Announce `address`, wait until told to end, drain. Returns the exit code; raises what `failure` holds."""
    spare_what_is_loaded()
    life.announce(address, companions, http=http, metrics=metrics)
    ended = failure if failure is not None else asyncio.get_running_loop().create_future()
    if await life.unless_stopped(asyncio.shield(ended)):
        raise SpecpipeError("the service ended by itself")
    logger.info("asked to end")
    await life.drain(drain())
    return life.exit_code


@contextmanager
def loading() -> Iterator[None]:
    """While modules and weights are loaded Python looks for no unused cycles, but once at the end.

    Nearly all that torch and transformers bring stays, and looking at it again and again is a tenth to a fifth of the
    time that it takes to load them. Not for what may wait.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def spare_what_is_loaded() -> None:
    """From here on Python looks for unused cycles among what is made later only.

    A look at all that torch and a model bring takes 0.3 to 0.5 s, and came in the middle of the first hundred answers.
    """
    gc.freeze()


def run_process(
    main: Callable[[], Awaitable[int]],
    config: ServerConfig,
    *,
    core: int | None = None,
    num_threads: int = 1,
) -> int:
    """Run a service's `serve` as the whole of this process and return its exit code.

    Sets thread counts and pins before anything computes, so it is called before torch is imported. An error of ours is
    logged in one sentence (2 if what was asked is invalid, else 1), any other with its trace (1).
    """
    try:
        set_up_process(core=core, num_threads=num_threads)
        if config.parent_fd is not None:
            die_with_parent()
        code = asyncio.run(_as_coroutine(main))
    except InvalidRequestError as error:
        logger.error("%s", error)
        code = EXIT_INVALID
    except SpecpipeError as error:
        logger.error("%s", error)
        code = EXIT_FAILED
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except Exception:
        logger.exception("the process failed")
        code = EXIT_FAILED
    _leave_if_stuck(code)
    return code


def set_up_process(*, core: int | None, num_threads: int) -> None:
    """Thread counts and pinning. Raises ConfigError if this process may not use `core`."""
    for name in _THREAD_VARIABLES:
        os.environ[name] = str(num_threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    if core is not None:
        allowed = cores_before_pinning()
        if core not in allowed:
            raise ConfigError(f"core {core} is not one of this process's cores: {sorted(allowed)}")
        os.sched_setaffinity(0, {core})


@functools.cache
def cores_before_pinning() -> frozenset[int]:
    """Cores that this process might use when it was first asked: what a child of it may be pinned to."""
    return frozenset(os.sched_getaffinity(0))


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def _as_coroutine(main: Callable[[], Awaitable[int]]) -> int:
    return await main()


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _leave_if_stuck(code: int) -> None:
    """Exit at once if a thread is still inside a job: the interpreter would wait for it, or not end it in peace."""
    for thread in threading.enumerate():
        if thread.name not in _LONG_JOBS:
            continue
        thread.join(LAST_WAIT_S)
        if thread.is_alive():
            logger.warning("leaving while %s still runs", _LONG_JOBS[thread.name])
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


@contextmanager
def _signals(life: Lifecycle, *, has_parent: bool) -> Iterator[None]:
    """SIGTERM asks to end. So does SIGINT, unless a parent is there to decide (a terminal sends it to both)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, life.request_stop)
    if has_parent:
        loop.add_signal_handler(signal.SIGINT, lambda: None)
    else:
        loop.add_signal_handler(signal.SIGINT, life.request_stop, EXIT_INTERRUPTED)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)


@contextmanager
def _parent_watch(life: Lifecycle, parent_fd: int | None) -> Iterator[None]:
    """A thread that waits for end-of-file on `parent_fd`; it works while the event loop does not."""
    if parent_fd is None:
        yield
        return
    done_read, done_write = os.pipe()
    loop = asyncio.get_running_loop()
    thread = threading.Thread(target=_watch_parent, args=(life, loop, parent_fd, done_read), daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(done_write)
        thread.join()
        os.close(done_read)


def _watch_parent(life: Lifecycle, loop: asyncio.AbstractEventLoop, parent_fd: int, done_fd: int) -> None:
    poll = select.poll()  # not `select`, which knows descriptors below 1024 only
    poll.register(parent_fd, select.POLLIN)
    poll.register(done_fd, select.POLLIN)
    while True:
        if done_fd in dict(poll.poll()):
            return
        if not os.read(parent_fd, 1024):
            break
    loop.call_soon_threadsafe(life.orphan)
    poll.unregister(parent_fd)
    if not poll.poll(1000 * ORPHAN_GRACE_S):
        os._exit(EXIT_FAILED)
