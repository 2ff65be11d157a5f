"""GenerateService and the coordinator as a process.

Owns: the RPC, and the order in which the process starts and ends. Must not know: sessions, workers' messages.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from coordinator.answer_stream import AnswerStream
from coordinator.codec import event_to_pb, question_from_pb
from coordinator.driver import Coordinator
from coordinator.events import Kind
from coordinator.fit import check_tokenizer
from coordinator.metrics import CoordinatorMetrics, RequestCount
from coordinator.request_trace import RequestTrace
from coordinator.requests import Question, Request
from coordinator.tokenization import Tokenization, TokenizerThread, hide_torch
from coordinator.trace_service import SERVICE_NAME as TRACE_SERVICE_NAME
from coordinator.trace_service import TraceService
from coordinator.tracing import Metadata
from coordinator.validation import ServiceFacts, check_prompt_bytes, check_question, create_request
from specpipe.answers import ChatMessage
from specpipe.causes import one_cause
from specpipe.config import CoordinatorConfig
from specpipe.engine.vocabulary import Vocabulary
from specpipe.errors import ConfigError, WorkerUnavailableError
from specpipe.process import lifecycle, loading, serve_until_stopped
from specpipe.rpc.v1 import generate_pb2, generate_pb2_grpc, trace_pb2_grpc
from specpipe.server import Server, create_server
from specpipe.spans import Role
from specpipe.telemetry.metrics import ProcessMetrics
from specpipe.tls import channel_credentials
from specpipe.types import ModelInfo

logger = logging.getLogger(__name__)

SERVICE_NAME = "specpipe.rpc.v1.GenerateService"
SERVICE_NAMES = (SERVICE_NAME, TRACE_SERVICE_NAME)
ID_REUSE_WAIT_S = 0.5  # for a request with this id that is being cancelled
HEALTH_INTERVAL_S = 0.2
STOP_GRACE_S = 0.5  # for statuses to reach clients, after every request has ended
MAX_DEADLINE_S = 10 * 365 * 86400.0  # a deadline beyond it is none


class GenerateService(generate_pb2_grpc.GenerateServiceServicer):
    """Answers requests once `open` has been called with what is served."""

    def __init__(self, coordinator: Coordinator, thread: TokenizerThread) -> None:
        self._coordinator = coordinator
        self._thread = thread
        self._tokenization: Tokenization | None = None
        self._facts: ServiceFacts | None = None

    def open(self, tokenization: Tokenization, facts: ServiceFacts) -> None:
        self._tokenization, self._facts = tokenization, facts

    @property
    def facts(self) -> ServiceFacts | None:
        """None until `open`."""
        return self._facts

    async def Generate(  # noqa: N802 (the name is the RPC's)
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        metadata, remaining_s = context.invocation_metadata() or (), context.time_remaining()
        question = question_from_pb(request)
        stream = await self.begin(question, remaining_s=remaining_s, metadata=metadata, is_let_in=True)
        _watch_reader(context, stream)
        try:
            async for event in stream:
                yield event_to_pb(event)
        finally:
            stream.close()

    async def begin(
        self,
        question: Question,
        *,
        remaining_s: float | None = None,
        metadata: Metadata = (),
        is_let_in: bool = False,
    ) -> AnswerStream:
        """Check the question and begin to answer it; whoever asks, over gRPC or HTTP. The caller closes the stream.

        `metadata`: headers of the call, of which traceparent and tracestate are read. `is_let_in`: by a server that
        lets nobody in once the service is to end; others who ask then are refused here. Raises what refuses the
        question, in the sentences that gRPC clients get.
        """
        received_ms = _now_ms()
        trace = self._coordinator.tracing.begin(question, metadata, received_ms=received_ms)
        metrics = self._coordinator.metrics
        count = None if metrics is None else metrics.begin(is_chat=question.is_chat, received_ms=received_ms)
        with _told_if_refused(trace), _told_if_refused(count):
            if self._coordinator.is_stopping and not is_let_in:
                raise WorkerUnavailableError("the service is stopping")
            request = await self._read(question, received_ms, _deadline_ms(remaining_s, received_ms), trace)
            return await self._submit(request, trace, count)

    async def _read(
        self, question: Question, received_ms: float, deadline_ms: float | None, trace: RequestTrace | None
    ) -> Request:
        if self._facts is None:
            raise WorkerUnavailableError(f"the service is still starting: {self._coordinator.awaited}")
        check_question(question, self._facts)
        self._coordinator.check_room(question.request_id)
        started_ms = _now_ms()
        prompt = await self._tokenize(question, self._facts)
        request = create_request(question, prompt, self._facts, received_ms=received_ms, deadline_ms=deadline_ms)
        if trace is None:
            return request
        trace.tokenized(started_ms, _now_ms(), len(prompt))
        return replace(request, trace_context=trace.context, wants_reports=trace.wants_reports)

    async def _submit(self, request: Request, trace: RequestTrace | None, count: RequestCount | None) -> AnswerStream:
        assert self._tokenization is not None
        await self._coordinator.wait_for_id(request.request_id, ID_REUSE_WAIT_S)
        answer = self._tokenization.create_answer(request.stop_strings)
        return self._coordinator.submit(request, answer, trace, count)

    async def _tokenize(self, question: Question, facts: ServiceFacts) -> list[int]:
        assert self._tokenization is not None
        prompt = question.prompt
        if isinstance(prompt, str):
            return await self._thread.run(self._tokenization.encode_within, prompt, facts.model.max_context)
        messages = [part for part in prompt or () if isinstance(part, ChatMessage)]
        if messages:
            chat = [{"role": message.role, "content": message.content} for message in messages]
            rendered = await self._thread.run(self._tokenization.render_chat, chat)
            check_prompt_bytes(len(rendered.encode()), facts)
            encode = functools.partial(self._tokenization.encode_within, is_rendered=True)
            return await self._thread.run(encode, rendered, facts.model.max_context)
        return [part for part in prompt or () if isinstance(part, int)]


@contextmanager
def _told_if_refused(observer: RequestTrace | RequestCount | None) -> Iterator[None]:
    """A request that does not begin ends its trace and is counted, whatever is the reason."""
    try:
        yield
    except BaseException as error:
        if observer is not None:
            observer.refuse(error, _now_ms())
        raise


def _watch_reader(context: Any, stream: AnswerStream) -> None:
    """The end of the call, whoever ends it, ends the request; a reader that stalls ends the call."""
    context.add_done_callback(lambda _: stream.close())
    task = asyncio.current_task()
    if task is not None:
        stream.give_up = task.cancel


def _deadline_ms(remaining_s: float | None, now_ms: float) -> float | None:
    return None if remaining_s is None or remaining_s > MAX_DEADLINE_S else now_ms + 1000 * client_time_s(remaining_s)


def client_time_s(remaining_s: float) -> float:
    """No more than what the client really gave, so that no hop is ever told more than its caller has.

    NOTE: gRPC rounds the time that it sends up to three digits or so: of 20 s it makes up to 20.1 s, of 600 s 601 s
    (measured, grpcio 1.85). One such unit is taken off; the client ends the call by its own clock anyway.
    """
    unit_s = 10.0 ** (math.floor(math.log10(max(1.02 * remaining_s, 0.1))) - 2)
    return max(0.0, remaining_s - max(unit_s, 0.001))


class App:
    """Everything a coordinator process is made of, without the process: `serve` runs it, and tests do."""

    def __init__(self, config: CoordinatorConfig, server: Server, coordinator: Coordinator | None = None) -> None:
        self.config = config
        self.server = server
        self.coordinator = coordinator or Coordinator(config)
        self._thread = TokenizerThread()
        self._service = GenerateService(self.coordinator, self._thread)
        self._is_open = False
        self.http_address = ""
        """HOST:PORT of the live page, while it is served."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While open, the port is served and workers are dialled. Requests are refused until `wait_ready` returns."""
        generate_pb2_grpc.add_GenerateServiceServicer_to_server(self._service, self.server.grpc_server)
        traces = TraceService(self.coordinator.tracing)
        trace_pb2_grpc.add_TraceServiceServicer_to_server(traces, self.server.grpc_server)
        try:
            async with self._page_served(), self.coordinator.running(), asyncio.TaskGroup() as group:
                await self.server.start()
                health = group.create_task(self._watch_health())
                try:
                    yield
                finally:
                    health.cancel()
                    self.coordinator.end_all(WorkerUnavailableError("the service is stopping"))
                    await self.server.stop(STOP_GRACE_S)
        finally:
            self._thread.close()

    @asynccontextmanager
    async def _page_served(self) -> AsyncIterator[None]:
        if self.config.http_port is None:
            yield
            return
        from coordinator.web.page import LivePage  # no other coordinator pays for the import

        page = LivePage(self.coordinator, begin=self._service.begin, facts=lambda: self._service.facts)
        self.http_address = page.address
        if self.config.server.tls.is_on:
            logger.warning("the live page at %s has no TLS and asks for no certificate", page.address)
        async with page.running():
            yield

    async def wait_ready(self) -> None:
        """Returns once requests are answered. Raises ConfigError and ModelMismatchError."""
        tokenizing = asyncio.ensure_future(self._load_configured())  # a wrong name is told at once, workers or not
        waiting = asyncio.ensure_future(self.coordinator.wait_ready())
        try:
            configured, model = await asyncio.gather(tokenizing, waiting)
        finally:
            tokenizing.cancel()
            waiting.cancel()
        tokenization = configured or await self._load_named(model.name)
        await self._check_tokenizer(tokenization, model)
        self._service.open(tokenization, create_facts(self.config, model, tokenization))
        self._is_open = True
        await self.server.set_serving(self.is_ready)

    @property
    def is_ready(self) -> bool:
        return self._is_open and self.coordinator.is_ready and not self._thread.is_stuck

    async def drain(self) -> None:
        """Not ready; returns when the last answer is complete.

        gRPC clients are sent elsewhere; what they have asked until then is answered. Pages ask in vain.
        """
        self._is_open, self.coordinator.is_stopping = False, True
        await self.server.set_serving(False)
        await self.server.close()
        await self.coordinator.wait_idle()

    async def _load_configured(self) -> Tokenization | None:
        return await self._load(self.config.tokenizer) if self.config.tokenizer else None

    async def _load_named(self, model: str) -> Tokenization:
        """By the name that the target workers give their model: a hub name, or the last part of a folder of theirs."""
        try:
            return await self._load(model)
        except ConfigError as error:
            raise ConfigError(
                f"{error} ({model!r} is what target workers call their model: name a folder with its tokenizer with "
                "--tokenizer)"
            ) from error

    async def _check_tokenizer(self, tokenization: Tokenization, target: ModelInfo) -> None:
        """Of most, the fingerprint tells that it is the target's. Raises ModelMismatchError for a wrong one."""
        if tokenization.fingerprint == target.tokenizer_fingerprint:
            return
        ours = await self._thread.run(tokenization.vocabulary)
        theirs = await self._read_target_vocabulary(target.vocab_size)
        await asyncio.to_thread(check_tokenizer, tokenization.name, ours, theirs, target)

    async def _read_target_vocabulary(self, num_ids: int) -> Vocabulary | None:
        """What the first target worker tells that answers; None: it cannot tell."""
        while True:
            for connection in self.coordinator.pools[Kind.TARGET]:
                try:
                    return await connection.link.read_vocabulary(num_ids)
                except WorkerUnavailableError as error:
                    logger.info("the tokenizer waits to be compared with the target's: %s", error)
            await asyncio.sleep(HEALTH_INTERVAL_S)

    def _load(self, name: str) -> Awaitable[Tokenization]:
        return self._thread.load(name)

    async def _watch_health(self) -> None:
        while True:
            await self.server.set_serving(self.is_ready)
            await self.server.set_alive(not self._thread.is_stuck)
            await asyncio.sleep(HEALTH_INTERVAL_S)


async def serve(config: CoordinatorConfig) -> int:
    """Serve until told to stop; returns the exit code.

    Raises ConfigError (port taken, no tokenizer, no workers named) and ModelMismatchError (workers that do not fit).
    """
    check_config(config)
    async with lifecycle(config.server) as life:
        metrics = ProcessMetrics(Role.COORDINATOR, config.telemetry, config.server.host)
        server = create_server(config.server, SERVICE_NAMES, metrics=metrics.rpc)  # first: a taken port is told at once
        metrics.watch(server)
        counted = CoordinatorMetrics(metrics.instruments) if metrics.is_on else None
        with loading():
            hide_torch()
        app = App(config, server, Coordinator(config, metrics=counted))
        with one_cause():
            async with metrics.told() as metrics_address, app.running():
                if not await life.unless_stopped(app.wait_ready()):
                    return life.exit_code
                return await serve_until_stopped(
                    life, app.server.address, drain=app.drain, http=app.http_address, metrics=metrics_address
                )


def check_config(config: CoordinatorConfig) -> None:
    if not config.targets:
        raise ConfigError("a coordinator needs the address of at least one target worker")
    if config.server.tls.is_on:
        channel_credentials(config.server.tls)  # raises
    if config.drafter not in ("model", "ngram", "none"):
        raise ConfigError(f"drafter must be model, ngram or none, got {config.drafter!r}")


def create_facts(config: CoordinatorConfig, model: ModelInfo, tokenization: Tokenization) -> ServiceFacts:
    has_drafter = config.drafter != "model" or bool(config.drafts)
    return ServiceFacts(
        model=model,
        model_name=config.served_model_name or model.name.rstrip("/").rpartition("/")[2],
        drafter=config.drafter if has_drafter else "none",
        mode=config.mode,
        rule=config.rule,
        num_speculative_tokens=config.num_speculative_tokens,
        least_tokens=tokenization.least_tokens,
    )


def _now_ms() -> float:
    return 1000 * time.monotonic()
