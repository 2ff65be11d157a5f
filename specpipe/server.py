"""What every gRPC server and channel of specpipe has in common.

Owns: sizes, keepalive and limits (one set of numbers for both sides), health, reflection, the port, and the mapping
between errors and statuses. Must not know: what a service does.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specpipe.causes import cause_of
from specpipe.config import ServerConfig, TlsConfig
from specpipe.errors import ERROR_BY_CODE, ConfigError, ErrorCode, InvalidRequestError, SpecpipeError
from specpipe.interceptors import CallLimitInterceptor, Handler, Interceptor, RunningCallsInterceptor, wrapped
from specpipe.ports import check_port, join_address
from specpipe.rpc_metrics import MeasuringInterceptor, RpcMetrics
from specpipe.tls import NO_TLS, channel_credentials, server_credentials
from specpipe.transport_errors import CODES, sentence_of

logger = logging.getLogger(__name__)

Options = list[tuple[str, Any]]

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Both sides, both directions. A batch is far below it (see specpipe.link); a prompt of 200 KB is well within."""
KEEPALIVE_TIME_MS = 20_000
"""A silent connection is pinged this often, with calls or without."""
KEEPALIVE_TIMEOUT_MS = 10_000
MIN_PING_INTERVAL_MS = 10_000
"""What a peer may do at most; smaller than KEEPALIVE_TIME_MS so that nobody is dropped for pings."""
CONNECT_TIMEOUT_MS = 5_000
"""A busy or starting peer may need seconds to accept; nobody should wait longer to hear that nobody is there."""
MAX_DETAILS_BYTES = 2048
"""Of a status. It travels as a header, percent-encoded (three times as long at worst), and peers refuse headers of
more than 8 KB: the client would see that refusal instead of the status."""
LIVENESS = "liveness"
"""The service name under which health says whether the process goes on, whether or not it is ready."""
HAND_OVER_S = 0.2
"""A call that gRPC has taken is known to us by then."""
FOREVER_S = 1e9
"""A grace that nobody outlives."""
MAX_CONCURRENT_STREAMS = 4096
"""Calls on one connection, an HTTP/2 setting; more wait in the client."""

_SHARED_OPTIONS: Options = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def server_options() -> Options:
    return [
        *_SHARED_OPTIONS,
        ("grpc.so_reuseport", 0),  # a second server on the port fails instead of taking half the calls
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
    ]


def channel_options() -> Options:
    return [
        *_SHARED_OPTIONS,
        ("grpc.enable_http_proxy", 0),  # proxy variables are for the web, not for calls between our processes
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),  # of one attempt; after a refusal the next comes sooner
        ("grpc.max_reconnect_backoff_ms", 5_000),
    ]


def create_channel(address: str, tls: TlsConfig = NO_TLS, *, name: str = "") -> grpc.aio.Channel:
    """A channel inside the cluster: no proxy, the numbers that servers expect.

    `name` is what the server's certificate must have instead of the host's name. Raises ConfigError for TLS whose files
    are not there or not right.
    """
    if not tls.is_on:
        return grpc.aio.insecure_channel(address, options=channel_options())
    named = [("grpc.ssl_target_name_override", name)] if name else []
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=[*channel_options(), *named])


class Server:
    """A grpc.aio server with health and reflection. Made by `create_server`, inside the event loop."""

    def __init__(
        self,
        grpc_server: grpc.aio.Server,
        address: str,
        service_names: Sequence[str],
        *,
        running: RunningCallsInterceptor,
        health_server: grpc.aio.Server | None = None,
    ) -> None:
        self.grpc_server = grpc_server
        """Where services are added, before `start`."""
        self.address = address
        """HOST:PORT, with the port that was taken."""
        self.is_serving = False
        self.is_alive = True
        self._running = running
        self._closing: asyncio.Task[None] | None = None
        self._health_server = health_server
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._service_names = tuple(service_names)
        for server in (grpc_server, health_server):
            if server is not None:
                health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        known = (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(known, grpc_server)

    async def start(self) -> None:
        """Answer calls. Health says NOT_SERVING until `set_serving(True)`."""
        await self._report(False)
        await self._report_alive(True)
        await self.grpc_server.start()
        if self._health_server is not None:
            await self._health_server.start()

    async def set_serving(self, is_serving: bool) -> None:
        if is_serving != self.is_serving:
            logger.info("%s is %s", self.address, "serving" if is_serving else "not serving")
            await self._report(is_serving)

    async def set_alive(self, is_alive: bool) -> None:
        """False: it hangs and will not get well by itself. Supervisors ask for the health of LIVENESS."""
        if is_alive != self.is_alive:
            logger.warning("%s %s", self.address, "goes on" if is_alive else "hangs")
            await self._report_alive(is_alive)

    async def close(self) -> None:
        """Take no more connections and calls; returns when the last call has ended, health and reflection apart.

        Clients are told (GOAWAY): their next call makes another connection, to whoever listens there then. The health
        port stays open.

        NOTE: a call that arrives in this very moment is dropped by gRPC as CANCELLED, before anything was begun for it:
        `specpipe.client` asks again.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self.grpc_server.stop(FOREVER_S), name="close")
        await asyncio.wait([self._closing], timeout=HAND_OVER_S)
        await self._running.ended()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new calls, let running ones end for `grace_s`, then cancel them."""
        await self._report(False)
        await self.grpc_server.stop(grace_s)
        if self._closing is not None:
            await self._closing
        if self._health_server is not None:
            await self._health_server.stop(None)

    async def _report(self, is_serving: bool) -> None:
        self.is_serving = is_serving
        for name in ("", *self._service_names):
            await self._health.set(name, _health_status(is_serving))

    async def _report_alive(self, is_alive: bool) -> None:
        self.is_alive = is_alive
        await self._health.set(LIVENESS, _health_status(is_alive))


def _health_status(is_well: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    return health_pb2.HealthCheckResponse.SERVING if is_well else health_pb2.HealthCheckResponse.NOT_SERVING


def create_server(
    config: ServerConfig,
    service_names: Sequence[str],
    *,
    max_concurrent_calls: int | None = None,
    metrics: RpcMetrics | None = None,
) -> Server:
    """Take the port and prepare a server for services with these full names.

    Add services to `Server.grpc_server`, then `await Server.start()`. More than `max_concurrent_calls` calls at once
    (health and reflection apart) are refused with RESOURCE_EXHAUSTED. `metrics` measures calls. Raises ConfigError if
    a port cannot be had, or a certificate is not there or not right.
    """
    limits = [] if max_concurrent_calls is None else [CallLimitInterceptor(max_concurrent_calls, service_names)]
    measuring = [] if metrics is None else [MeasuringInterceptor(metrics)]  # before errors: it sees how a call ends
    running = RunningCallsInterceptor(service_names)
    interceptors = [running, *measuring, ErrorInterceptor(), *limits]
    grpc_server = grpc.aio.server(interceptors=interceptors, options=server_options())
    port = _take_port(grpc_server, config.host, config.port, config.tls)
    health_server = None if config.health_port is None else grpc.aio.server(options=server_options())
    if health_server is not None:
        health_port = _take_port(health_server, config.host, config.health_port or 0)
        logger.info("health on %s", join_address(config.host, health_port))
    address = join_address(config.host, port)
    return Server(grpc_server, address, service_names, running=running, health_server=health_server)


def _take_port(grpc_server: grpc.aio.Server, host: str, port: int, tls: TlsConfig = NO_TLS) -> int:
    check_port(host, port)
    try:
        if tls.is_on:
            return grpc_server.add_secure_port(join_address(host, port), server_credentials(tls))
        return grpc_server.add_insecure_port(join_address(host, port))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {error}") from None


# Errors and statuses

ORIGIN_KEY = "specpipe-status"
OF_SPECPIPE = ((ORIGIN_KEY, "1"),)
"""Trailing metadata of every status that a service of ours sends on purpose: its text is meant for people."""


def status_of(code: ErrorCode) -> grpc.StatusCode:
    return grpc.StatusCode[code.name]


def details_of(error: SpecpipeError) -> str:
    """The error's sentence, cut where it would not fit into a status."""
    details = str(error)
    encoded = details.encode(errors="replace")
    if len(encoded) <= MAX_DETAILS_BYTES:
        return details
    return encoded[:MAX_DETAILS_BYTES].decode(errors="ignore") + " ..."


def error_from_status(error: grpc.aio.AioRpcError) -> SpecpipeError:
    """What a client raises for a status: the error that the server raised, or the nearest one of our tree.

    A status that no server of ours has sent carries gRPC's own text: that goes to the log, a sentence into the error.
    """
    code, details = error.code(), error.details() or ""
    kind = ERROR_BY_CODE[ErrorCode.__members__.get(code.name, ErrorCode.INTERNAL)]
    if not is_of_transport(error):
        return kind(details or code.name)
    logger.debug("gRPC: %s: %s", code.name, details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return InvalidRequestError(
            f"a message is larger than {MAX_MESSAGE_BYTES // 2**20} MiB, the most that may be sent"
        )
    if code is grpc.StatusCode.CANCELLED:  # not the caller's doing: a server that stops cancels what it has accepted
        kind = ERROR_BY_CODE[ErrorCode.UNAVAILABLE]
    return kind(sentence_of(code.name, details))


def is_of_transport(error: grpc.aio.AioRpcError) -> bool:
    """Whether gRPC made this status, on either side: then no service of ours has spoken."""
    return error.code().name in CODES and ORIGIN_KEY not in error.trailing_metadata()  # type: ignore[comparison-overlap]


@asynccontextmanager
async def status_errors() -> AsyncIterator[None]:
    """Inside, a status that comes back from a call is raised as an error of our tree."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_status(error) from error


class ErrorInterceptor(Interceptor):
    """Turns what a handler raises into one terminal status.

    SpecpipeError: its code and message. Anything else: INTERNAL, logged here once, its text not given away.
    Cancellation and statuses set by `context.abort` pass. A single request whose bytes are no message never reaches
    its handler: INVALID_ARGUMENT (gRPC itself would say UNKNOWN). Handlers of streams find that out as they read.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        return wrapped(handler, functools.partial(_mapping_errors, str(handler_call_details.method)), _or_malformed)


def _or_malformed(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Like `deserialize`, but where that fails the error is the request: an answer to it must wait for the handler."""

    def deserialize_or_fail(message: bytes) -> Any:
        try:
            return deserialize(message)
        except DecodeError as error:
            return InvalidRequestError(f"the request cannot be read: {error}")

    return deserialize_or_fail


def _raise_if_malformed(request: Any) -> None:
    if isinstance(request, InvalidRequestError):
        raise request


def _mapping_errors(method: str, handler: Handler) -> Handler:
    async def answer(request: Any, context: Any) -> Any:
        try:
            _raise_if_malformed(request)
            return await handler(request, context)
        except Exception as error:
            await _abort(context, method, error)

    async def stream(request: Any, context: Any) -> Any:
        try:
            _raise_if_malformed(request)
            async with aclosing(handler(request, context)) as responses:  # ends with its call, not when it is collected
                async for response in responses:
                    yield response
        except Exception as error:
            await _abort(context, method, error)

    return stream if inspect.isasyncgenfunction(handler) else answer


async def _abort(context: Any, method: str, error: Exception) -> None:
    cause = cause_of(error)
    if isinstance(cause, grpc.aio.AbortError):
        raise cause
    if isinstance(cause, SpecpipeError):
        await context.abort(status_of(cause.code), details_of(cause), OF_SPECPIPE)
    logger.error("%s failed", method, exc_info=cause)
    await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details", OF_SPECPIPE)
