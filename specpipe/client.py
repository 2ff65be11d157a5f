"""A typed client of GenerateService: a request goes in, events come out, statuses come back as specpipe's errors.

Owns: protobuf of the public service on the client's side. Must not know: workers, models, tokenizers.
Used by the command line, by tests and by benchmarks; it is what a user's own Python client would look like.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final, Self

import grpc
import grpc.aio

from specpipe.answers import AnswerEvent, ChatMessage, Chunk, Finished, Prompt, SpeculationStats, Started, Timing
from specpipe.codec_trace import trace_from_pb
from specpipe.config import MAX_SPECULATIVE_TOKENS, TlsConfig
from specpipe.errors import ErrorCode, InvalidRequestError, SpecpipeError, TraceNotFoundError, WorkerUnavailableError
from specpipe.resume import ResumedAnswer, spread
from specpipe.rpc.v1 import common_pb2, generate_pb2, generate_pb2_grpc, trace_pb2, trace_pb2_grpc
from specpipe.server import create_channel
from specpipe.spans import KeptTrace
from specpipe.telemetry.propagation import TRACEPARENT, current_context
from specpipe.tls import NO_TLS
from specpipe.tries import Tries, own_error
from specpipe.types import FinishReason, Mode, Origin, Rule

DEFAULT_TIMEOUT_S: Final = 3600.0  # a call without a deadline could hang for ever
TRACE_TIMEOUT_S: Final = 30.0
MAX_SEED: Final = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One question. What is None takes the service's documented default."""

    prompt: Prompt  # text, token ids, or the messages of a chat
    request_id: str = ""  # empty: the service makes one
    model: str = ""  # empty: the one served
    temperature: float | None = None  # 0: greedy; default 1
    top_p: float | None = None  # in (0, 1]
    top_k: int | None = None  # 0: off
    min_p: float | None = None  # in [0, 1]
    seed: int | None = None  # unsigned 64-bit; None: by the request id if one is given, else drawn; reported
    max_tokens: int | None = None  # default 256, cut at the context
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    mode: Mode | None = None
    rule: Rule | None = None
    num_speculative_tokens: int | None = None
    trace: bool = False  # keep what is done for it, for `GenerateClient.get_trace`

    def check(self) -> None:
        """Raise InvalidRequestError, naming the field, for what no service would accept.

        The service checks the same again: this is for callers who want to know before anything is started.
        """
        for name, is_right, wanted in self._rules():
            if not is_right:
                value = getattr(self, name)
                shown = list(value) if isinstance(value, tuple) else value
                raise InvalidRequestError(f"{name} must be {wanted}, got {shown!r}")

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        temperature, top_p, top_k, min_p = self.temperature, self.top_p, self.top_k, self.min_p
        yield "prompt", len(self.prompt) > 0, "at least one character or token id"
        yield "temperature", temperature is None or 0 <= temperature < math.inf, "a finite number of at least 0"
        yield "top_p", top_p is None or 0 < top_p <= 1, "above 0 and at most 1"
        yield "top_k", top_k is None or 0 <= top_k < 2**31, "at least 0 (0: off)"
        yield "min_p", min_p is None or 0 <= min_p <= 1, "from 0 to 1"
        yield "seed", self.seed is None or 0 <= self.seed <= MAX_SEED, "from 0 to 2^64 - 1"
        yield "max_tokens", self.max_tokens is None or 1 <= self.max_tokens < 2**63, "at least 1"
        yield "stop", all(self.stop), "texts of at least one character"
        yield "stop_token_ids", all(0 <= i < 2**31 for i in self.stop_token_ids), "token ids of at least 0"
        k = self.num_speculative_tokens
        yield (
            "num_speculative_tokens",
            k is None or 1 <= k <= MAX_SPECULATIVE_TOKENS,
            f"from 1 to {MAX_SPECULATIVE_TOKENS}",
        )


@dataclass(slots=True, kw_only=True)
class Answer:
    """What the events of one request add up to. Feed it each event; complete once `finished` is set."""

    started: Started | None = None
    finished: Finished | None = None
    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def add(self, event: AnswerEvent) -> None:
        if isinstance(event, Started):
            self.started = event
        elif isinstance(event, Finished):
            self.finished = event
        else:
            self.token_ids += event.token_ids
            self.origins += event.origins
            self.pieces.append(event.text)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class GenerateClient:
    """A connection to a coordinator: `async with GenerateClient(address) as client`, then any number of requests.

    A coordinator that ends finishes its answers and sends later requests to whoever listens at the address then.
    Given several addresses, of coordinators of one service, an answer whose coordinator is lost goes on at the next:
    asked again with the same request id (made here if there is none) and seed, less what was given out before. An
    address behind which there are several, a Kubernetes Service say, may be given twice for that.

    With `tls` the coordinator is checked by its CA, and shown the certificate if there is one. Entering raises
    ConfigError for files that are not there or not right.
    """

    def __init__(self, address: str | Sequence[str], tls: TlsConfig = NO_TLS) -> None:
        self._addresses = (address,) if isinstance(address, str) else tuple(address)
        self._tls = tls
        self._places: list[_Place] = []
        self._current = 0  # index of the place that is asked first: none was lost since it was found

    async def __aenter__(self) -> Self:
        for address in self._addresses:
            self._places.append(_Place(address, create_channel(address, self._tls)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for place in self._places:
            await place.channel.close(None)
        self._places.clear()

    async def generate(
        self, request: GenerateRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S, traceparent: str = ""
    ) -> AsyncIterator[AnswerEvent]:
        """Stream the events of one answer: Started, Chunks, Finished, in this order.

        Leaving the loop early, or cancelling the task, cancels the request on the service. Raises the error tree of
        `specpipe.errors`; an answer that raised has no Finished. `traceparent` (W3C) says in which span the question is
        asked; without it that is OpenTelemetry's current one, if there is one.

        With several addresses: an answer under the rejection rule at a temperature above 0 is not asked for again once
        a token came. Raises InvariantError or ModelMismatchError if the next coordinator answers otherwise.
        """
        metadata = [(TRACEPARENT, traceparent)] if traceparent else current_context()
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + timeout_s
        if len(self._places) > 1 and not request.request_id:
            request = replace(request, request_id=f"gen-{secrets.token_hex(12)}")
        answer, tries = ResumedAnswer(temperature=request.temperature), Tries(self._addresses, self._current)
        while True:
            asked = request if answer.started is None else replace(request, seed=answer.started.seed)
            call = self._places[tries.index].generate(
                request_to_pb(asked), timeout=give_up_s - loop.time(), metadata=metadata or None
            )
            try:
                async for response in call:
                    event = answer.add(event_from_pb(response))
                    if event is not None:
                        yield event
                return
            except grpc.aio.AioRpcError as error:
                pause_s = tries.pause_after(error, answer)
            finally:
                call.cancel()
            self._current = tries.index
            await asyncio.sleep(min(spread(pause_s), max(0.0, give_up_s - loop.time())))

    async def answer(
        self, request: GenerateRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S, traceparent: str = ""
    ) -> Answer:
        """The whole answer at once. Raises as `generate` does."""
        answer = Answer()
        async for event in self.generate(request, timeout_s=timeout_s, traceparent=traceparent):
            answer.add(event)
        return answer

    async def get_trace(self, request_id: str, *, timeout_s: float = TRACE_TIMEOUT_S) -> KeptTrace:
        """What the service has seen of a request so far. Raises TraceNotFoundError if nothing was kept of it.

        The id of its trace (32 hexadecimal digits) does as well.
        """
        places = self._places[self._current :] + self._places[: self._current]
        errors: list[SpecpipeError] = []
        for place in places:
            try:
                return await place.get_trace(request_id, timeout_s=timeout_s)
            except (TraceNotFoundError, WorkerUnavailableError) as error:
                errors.append(error)
        raise next((error for error in errors if isinstance(error, TraceNotFoundError)), errors[0])


class _Place:
    """One address, and what is asked there."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.generate = generate_pb2_grpc.GenerateServiceStub(channel).Generate
        self._traces = trace_pb2_grpc.TraceServiceStub(channel)

    async def get_trace(self, request_id: str, *, timeout_s: float) -> KeptTrace:
        request_pb = trace_pb2.GetTraceRequest(request_id=request_id)
        try:
            return trace_from_pb(await self._traces.GetTrace(request_pb, timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise SpecpipeError(f"{self.address} keeps no traces: an older version, or no coordinator") from error
            own = own_error(error, self.address)
            raise TraceNotFoundError(str(own)) if own.code is ErrorCode.NOT_FOUND else own from error


def answer_once(
    address: str, request: GenerateRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S, tls: TlsConfig = NO_TLS
) -> Answer:
    """For callers without an event loop: connect, ask one question, disconnect."""

    async def ask() -> Answer:
        async with GenerateClient(address, tls) as client:
            return await client.answer(request, timeout_s=timeout_s)

    return asyncio.run(ask())


def request_to_pb(request: GenerateRequest) -> generate_pb2.GenerateRequest:
    """Raises InvalidRequestError for a number that the wire cannot carry."""
    try:
        request_pb = generate_pb2.GenerateRequest(
            request_id=request.request_id,
            model=request.model,
            sampling=_sampling_to_pb(request),
            speculation=_speculation_to_pb(request),
            trace=request.trace,
        )
        _set_prompt(request_pb, request.prompt)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"the request cannot be sent: {error}") from error
    return request_pb


def _sampling_to_pb(request: GenerateRequest) -> generate_pb2.SamplingOptions:
    return generate_pb2.SamplingOptions(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed,
        max_tokens=request.max_tokens,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
    )


def _speculation_to_pb(request: GenerateRequest) -> generate_pb2.SpeculationOptions:
    return generate_pb2.SpeculationOptions(
        mode=common_pb2.Mode.Value(f"MODE_{request.mode.name if request.mode else 'UNSPECIFIED'}"),
        rule=common_pb2.Rule.Value(f"RULE_{request.rule.name if request.rule else 'UNSPECIFIED'}"),
        num_speculative_tokens=request.num_speculative_tokens,
    )


def _set_prompt(request_pb: generate_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request_pb.prompt = prompt
    elif prompt and isinstance(prompt[0], ChatMessage):
        messages = [m for m in prompt if isinstance(m, ChatMessage)]
        messages_pb = [generate_pb2.ChatMessage(role=m.role, content=m.content) for m in messages]
        request_pb.chat.CopyFrom(generate_pb2.Chat(messages=messages_pb))
    else:
        ids = [i for i in prompt if isinstance(i, int)]
        request_pb.prompt_token_ids.CopyFrom(generate_pb2.TokenIds(ids=ids))


def event_from_pb(response_pb: generate_pb2.GenerateResponse) -> AnswerEvent:
    """Raises SpecpipeError for a message that carries no event."""
    match response_pb.WhichOneof("event"):
        case "started":
            return _started_from_pb(response_pb.started)
        case "chunk":
            return _chunk_from_pb(response_pb.chunk)
        case "finished":
            return _finished_from_pb(response_pb.finished)
    raise SpecpipeError("the service sent a response without an event")


def _started_from_pb(started_pb: generate_pb2.Started) -> Started:
    return Started(
        request_id=started_pb.request_id,
        model=started_pb.model,
        prompt_tokens=started_pb.prompt_tokens,
        seed=started_pb.seed,
        rule=None if not started_pb.rule else Rule[common_pb2.Rule.Name(started_pb.rule).removeprefix("RULE_")],
    )


def _chunk_from_pb(chunk_pb: generate_pb2.Chunk) -> Chunk:
    return Chunk(
        token_ids=tuple(chunk_pb.token_ids),
        text=chunk_pb.text,
        origins=tuple(Origin[common_pb2.Origin.Name(o).removeprefix("ORIGIN_")] for o in chunk_pb.origins),
        round=chunk_pb.round,
        text_lengths=tuple(chunk_pb.text_lengths),
    )


def _finished_from_pb(finished_pb: generate_pb2.Finished) -> Finished:
    timing_pb, usage_pb = finished_pb.timing, finished_pb.usage
    reason = common_pb2.FinishReason.Name(finished_pb.finish_reason)
    return Finished(
        finish_reason=FinishReason[reason.removeprefix("FINISH_REASON_")],
        prompt_tokens=usage_pb.prompt_tokens,
        completion_tokens=usage_pb.completion_tokens,
        timing=Timing(
            ttft_ms=timing_pb.ttft_ms,
            tpot_ms=timing_pb.tpot_ms if timing_pb.HasField("tpot_ms") else None,
            total_ms=timing_pb.total_ms,
        ),
        speculation=_stats_from_pb(finished_pb.speculation),
        cached_prompt_tokens=usage_pb.cached_prompt_tokens if usage_pb.HasField("cached_prompt_tokens") else None,
    )


def _stats_from_pb(stats_pb: generate_pb2.SpeculationStats) -> SpeculationStats:
    values: dict[str, Any] = {}
    set_names = {field_pb.name for field_pb, _ in stats_pb.ListFields()}
    for name in SpeculationStats.__slots__:
        is_unset = stats_pb.DESCRIPTOR.fields_by_name[name].has_presence and name not in set_names
        values[name] = None if is_unset else getattr(stats_pb, name)
    values["mode"] = Mode[common_pb2.Mode.Name(stats_pb.mode).removeprefix("MODE_")]
    values["rule"] = Rule[common_pb2.Rule.Name(stats_pb.rule).removeprefix("RULE_")]
    return SpeculationStats(**values)
