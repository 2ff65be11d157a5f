"""`specpipe generate`: ask, stream the answers, leave nothing running.

Owns: one run, from flags to exit code. All prompts are submitted at once and shown in order.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final

import typer

from specpipe.answers import AnswerEvent, Started
from specpipe.cli.flags import (
    SamplingFlags,
    ServiceFlags,
    SpeculationFlags,
    TlsFlags,
    checked_address,
    named_as_flags,
    option,
    takes_flags,
    tls_config,
)
from specpipe.cli.models import check_device, resolve_models
from specpipe.cli.output import JsonOutput, Output, PlainOutput
from specpipe.cli.pictures import TraceOutput, check_picture, finished_trace
from specpipe.cli.progress import loading_bars
from specpipe.cli.prompts import requests_of_file, requests_of_texts
from specpipe.cli.signals import run_with_signals
from specpipe.client import GenerateClient, GenerateRequest
from specpipe.config import TlsConfig
from specpipe.errors import ConfigError, SpecpipeError
from specpipe.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_TERMINATED
from specpipe.launcher import LocalService, ServiceConfig
from specpipe.spans import KeptTrace
from specpipe.telemetry.logs import LogLevel, configure_logging
from specpipe.tls import NO_TLS
from specpipe.types import Mode, Rule

MAX_SUBMITTED: Final = 1024  # more at once would overflow a coordinator's queue


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateFlags:
    """Flags of `generate` alone."""

    prompts: Annotated[Path | None, option("File of JSON lines with prompts of their own settings.")] = None
    chat: Annotated[bool, option("Prompts are what a user says in a chat.", "--chat")] = False
    connect: Annotated[
        list[str],
        option("Ask this running service; may be repeated: another of its coordinators.", metavar="HOST:PORT"),
    ] = field(default_factory=list)
    json: Annotated[bool, option("One JSON object a prompt.", "--json")] = False
    trace: Annotated[bool, option("Show every round of each answer on stderr, as a timeline.", "--trace")] = False
    trace_file: Annotated[Path | None, option("Write that as a page (FILE.html) or a picture (FILE.svg).")] = None
    log_level: Annotated[LogLevel, option("What is logged to stderr.  [warning]")] = "warning"


@takes_flags(
    own=GenerateFlags, tls=TlsFlags, service=ServiceFlags, speculation=SpeculationFlags, sampling=SamplingFlags
)
def generate(
    prompt: Annotated[
        list[str] | None, typer.Argument(help="What to go on from; may be repeated.", metavar="PROMPT")
    ] = None,
    *,
    own: GenerateFlags,
    tls: TlsFlags,
    service: ServiceFlags,
    speculation: SpeculationFlags,
    sampling: SamplingFlags,
) -> int:
    """Answer prompts. Without --connect, the whole service is started on this machine for it."""
    configure_logging(own.log_level)
    requests = requests_of(prompt or [], own, request_of_flags(sampling, speculation))
    output: Output = JsonOutput() if own.json else PlainOutput(len(requests))
    traces = trace_output(own, len(requests))
    if own.connect:
        addresses = [checked_address("--connect", address) for address in own.connect]
        refuse_service_flags(service)
        asked = functools.partial(answer_all, addresses, requests, output, traces, tls=tls_config(tls))
        return run_with_signals(lambda _: asked(), terminated=EXIT_TERMINATED)
    if tls_config(tls).is_on:
        raise ConfigError("--tls-ca, --tls-cert and --tls-key are for a running service: name it with --connect")
    with named_as_flags(ServiceFlags, SpeculationFlags):
        config = service_config(service, speculation, requests, own.log_level)
    return run_with_signals(lambda _: answer_with_service(config, requests, output, traces), terminated=EXIT_TERMINATED)


def request_of_flags(sampling: SamplingFlags, speculation: SpeculationFlags) -> GenerateRequest:
    """What every prompt is asked with unless its line says otherwise. Raises InvalidRequestError."""
    request = GenerateRequest(
        prompt="?",
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_id),
        ignore_eos=sampling.ignore_eos or None,
        mode=speculation.mode,
        rule=speculation.rule,
        num_speculative_tokens=speculation.num_speculative_tokens,
    )
    request.check()
    return request


def requests_of(texts: list[str], own: GenerateFlags, flags: GenerateRequest) -> list[GenerateRequest]:
    """Raises ConfigError unless there are prompts, from one place."""
    if texts and own.prompts:
        raise ConfigError("give prompts as arguments or with --prompts, not both")
    if own.prompts:
        return requests_of_file(own.prompts, flags, is_chat=own.chat)
    if not texts:
        raise ConfigError("give a prompt, or a file of them with --prompts")
    requests = requests_of_texts(texts, flags, is_chat=own.chat)
    for request in requests:
        request.check()
    return requests


def trace_output(own: GenerateFlags, num_prompts: int) -> TraceOutput | None:
    """None: nobody wants to see traces. Raises ConfigError for a file that cannot be written."""
    if not own.trace and own.trace_file is None:
        return None
    if own.trace_file is not None:
        check_picture("--trace-file", own.trace_file)
    return TraceOutput(path=own.trace_file, num_prompts=num_prompts, is_shown=own.trace)


def refuse_service_flags(service: ServiceFlags) -> None:
    """Raises ConfigError for flags that a running service has already decided."""
    if service.given():
        raise ConfigError(f"{', '.join(service.given())} cannot be used with --connect: that service already runs")


def service_config(
    flags: ServiceFlags, speculation: SpeculationFlags, requests: Iterable[GenerateRequest], log_level: str
) -> ServiceConfig:
    """The service that these requests need: without draft workers if none of them drafts. Raises ConfigError."""
    is_drafting = any(request.mode is not Mode.OFF for request in requests)
    target, draft = resolve_models(flags, is_drafting=is_drafting)
    config = ServiceConfig(
        target=target,
        draft=draft,
        tensor_parallel_size=given(flags.tensor_parallel_size, 1),
        draft_workers=given(flags.draft_workers, 1),
        target_workers=given(flags.target_workers, 1),
        mode=(speculation.mode or Mode.PIPELINED) if is_drafting else Mode.OFF,
        rule=speculation.rule or Rule.COUPLED,
        num_speculative_tokens=speculation.num_speculative_tokens,
        dtype=flags.dtype or "auto",
        draft_dtype=flags.draft_dtype,
        device=flags.device or "cpu",
        is_pinned=not flags.no_pin,
        log_level=log_level,
    )
    check_device(config.device)
    return config


def given(value: int | None, default: int) -> int:
    return default if value is None else value


async def answer_with_service(
    config: ServiceConfig, requests: list[GenerateRequest], output: Output, traces: TraceOutput | None = None
) -> int:
    """Start a service for these requests alone. Nothing of it is left after."""
    async with LocalService(config) as service:
        with loading_bars() as on_progress:
            await service.start(on_progress)
        return await answer_all(service.address, requests, output, traces)


async def answer_all(
    address: str | Sequence[str],
    requests: list[GenerateRequest],
    output: Output,
    traces: TraceOutput | None = None,
    *,
    tls: TlsConfig = NO_TLS,
) -> int:
    """Returns the exit code: 1 if any prompt failed, or could not be shown as it was asked for."""
    is_free = asyncio.Semaphore(MAX_SUBMITTED)
    asked = [replace(request, trace=traces is not None) for request in requests]
    streams = [EventStream() for _ in asked]
    are_right = True
    async with GenerateClient(address, tls) as client:
        tasks = [asyncio.create_task(s.fill(client, r, is_free)) for r, s in zip(asked, streams, strict=True)]
        try:
            for request, stream, task in zip(asked, streams, tasks, strict=True):
                are_right &= await output.show(request, stream.events())
                if traces is not None:
                    await task
                    are_right &= traces.show(stream.trace)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return EXIT_OK if are_right else EXIT_FAILED


class EventStream:
    """Events of one answer, kept until it is their turn to be shown."""

    def __init__(self) -> None:
        self.trace: KeptTrace | SpecpipeError | None = None  # once filled: if it was asked for, and anything began
        self._queue: asyncio.Queue[AnswerEvent | SpecpipeError | None] = asyncio.Queue()

    async def fill(self, client: GenerateClient, request: GenerateRequest, is_free: asyncio.Semaphore) -> None:
        """A service keeps few traces: this one is fetched at once, whenever it is to be shown."""
        request_id = ""
        async with is_free:
            try:
                async for event in client.generate(request):
                    if isinstance(event, Started):
                        request_id = event.request_id
                    self._queue.put_nowait(event)
                self._queue.put_nowait(None)
            except SpecpipeError as error:
                self._queue.put_nowait(error)
            if request.trace and request_id:
                self.trace = await _trace_or_error(client, request_id)

    async def events(self) -> AsyncIterator[AnswerEvent]:
        """Raises the error that ended the answer, if one did."""
        while (item := await self._queue.get()) is not None:
            if isinstance(item, SpecpipeError):
                raise item
            yield item


async def _trace_or_error(client: GenerateClient, request_id: str) -> KeptTrace | SpecpipeError:
    try:
        return await finished_trace(client, request_id)
    except SpecpipeError as error:
        return error
