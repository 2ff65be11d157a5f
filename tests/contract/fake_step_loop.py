"""A worker without a model, for tests of streams: it commits, fails and closes as it is asked to."""

import asyncio
import threading
from contextlib import asynccontextmanager, suppress

from specpipe.config import ServerConfig
from specpipe.errors import WorkerUnavailableError
from specpipe.model_thread import ModelThread
from specpipe.server import create_channel, create_server
from specpipe.tls import NO_TLS
from specpipe.types import (
    Close,
    Closed,
    Commit,
    Extension,
    Heartbeat,
    Hello,
    ModelInfo,
    Open,
    Origin,
    SamplingParams,
    SpeculationParams,
    StopRules,
)
from specpipe.worker_client import WorkerLink
from specpipe.worker_service import WorkerService
from specpipe.worker_stream import PROTOCOL_VERSION, WIRES

MODEL = ModelInfo(
    name="fake", fingerprint="f", tokenizer_fingerprint="t", vocab_size=1000, max_context=100_000, eos_token_ids=(1,)
)
HELLO = Hello(protocol_version=PROTOCOL_VERSION, incarnation=5, model=MODEL, num_slots=64, max_sessions=8)


def an_open(session, tokens=(1, 2), **changes):
    return Open(
        session=session,
        request_id="r",
        tokens=tuple(tokens),
        num_prompt_tokens=1,
        sampling=SamplingParams(),
        stops=StopRules(max_length=9),
        speculation=SpeculationParams(),
        **changes,
    )


def an_extension(session, base=2, tokens=(5,)):
    return Extension(session=session, base=base, parents=(0,), tokens=tuple(tokens), confidences=(0.5,))


def a_commit(session, base, tokens):
    return Commit(session=session, round=1, base=base, tokens=tuple(tokens), origins=(Origin.PLAIN,) * len(tokens))


class FakeStepLoop:
    """Answers Open by a commit of one token and Close by Closed; keeps what it was told. `gate` holds a step."""

    def __init__(self, send):
        self.send = send
        self.sessions = {}
        self.received = []
        self.events = []
        self.num_steps = 0
        self.step_running_ms = 0.0
        self.step_error = None
        self.gate = threading.Event()
        self.gate.set()

    def receive(self, link, message):
        self.received.append((link, message))
        if isinstance(message, Open):
            self.sessions[link, message.session] = list(message.tokens)
            self.send(link, a_commit(message.session, len(message.tokens), (7,)))
        elif isinstance(message, Close):
            tokens = self.sessions.pop((link, message.session), [])
            self.send(link, Closed(session=message.session, length=len(tokens)))

    def link_lost(self, link):
        self.events.append((link, "lost"))
        for key in [key for key in self.sessions if key[0] == link]:
            del self.sessions[key]

    def link_paused(self, link, is_paused):
        self.events.append((link, "paused" if is_paused else "resumed"))

    def run_once(self):
        self.num_steps += 1
        self.gate.wait(20)
        if self.step_error is not None:
            raise self.step_error

    def heartbeat(self):
        return Heartbeat(
            step=self.num_steps, step_running_ms=self.step_running_ms, num_sessions=len(self.sessions), num_free_slots=9
        )


class Ticks:
    """A `sleep` for Timing that lasts until the test lets it pass."""

    def __init__(self):
        self._waiting = []

    async def sleep(self, _):
        passed = asyncio.get_running_loop().create_future()
        self._waiting.append(passed)
        await passed

    def tick(self):
        waiting, self._waiting = self._waiting, []
        for passed in waiting:
            if not passed.done():
                passed.set_result(None)

    @property
    def num_waiting(self):
        return sum(not passed.done() for passed in self._waiting)


class FakeWorker:
    """A WorkerService on a real server at a free port."""

    def __init__(self, kind="target", *, hello=HELLO, timing=None, tls=NO_TLS):
        self.kind = kind
        self._tls = tls
        self._hello = hello
        self._timing = timing

    async def __aenter__(self):
        self.thread = ModelThread(self._create)
        self.thread.start()
        await self.thread.wait_ready()
        self.server = create_server(ServerConfig(tls=self._tls), [WIRES[self.kind].service_name])
        self.service = WorkerService(self.kind, self._hello, self.thread, timing=self._timing)
        self.service.add_to(self.server)
        await self.server.start()
        self.address = self.server.address
        return self

    async def __aexit__(self, *_):
        self.loop.gate.set()
        self.service.close()
        await self.server.stop(5.0)
        self.thread.stop()
        await asyncio.wait([self.thread.failure])

    def _create(self, send):
        self.loop = FakeStepLoop(send)
        return self.loop

    def connect(self, incarnation=9, *, timing=None):
        return WorkerLink.connect(self.address, self.kind, incarnation, timing=timing)

    @asynccontextmanager
    async def raw_call(self):
        """A stream on which a test says what it likes."""
        async with create_channel(self.address) as channel:
            call = WIRES[self.kind].stub(channel).Connect()
            yield call
            call.cancel()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class Reader:
    """Reads a link in the background and keeps the messages that match."""

    def __init__(self, link):
        self.link = link
        self.batches = []
        self.error = None

    async def __aenter__(self):
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_):
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _read(self):
        try:
            async for batch in self.link:
                self.batches.append(batch)
        except WorkerUnavailableError as error:
            self.error = error

    def all(self, name):
        return [message for batch in self.batches for message in getattr(batch, name)]
