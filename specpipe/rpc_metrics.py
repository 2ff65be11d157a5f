"""Sizes and latencies of the calls that a server answers.

Owns: the interceptor that measures, and its numbers (docs/metrics.md). Must not know: what a service does.

The names are those of https://opentelemetry.io/docs/specs/semconv/rpc/rpc-metrics/, which has none for sizes.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from specpipe.telemetry.instruments import Description, Histogram, Instruments

OUR_CALLS = "/specpipe."
"""How the methods begin that are measured: health and reflection are not."""
DURATION_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
SIZE_BOUNDS_BYTES = tuple(float(4**i) for i in range(2, 14))  # 16 bytes to 64 MiB

Handler = Callable[..., Any]


class RpcMetrics:
    """Of one process."""

    def __init__(self, instruments: Instruments) -> None:
        duration = Description(
            name="rpc.server.call.duration",
            unit="s",
            text="From the start of a call to its end.",
            labels=("rpc.system.name", "rpc.method", "rpc.response.status_code"),
        )
        size = Description(
            name="specpipe.rpc.message.size",
            unit="By",
            text="Serialized messages.",
            labels=("rpc.method", "direction"),
        )
        self.durations = instruments.histogram(duration, DURATION_BOUNDS_S)
        self.sizes = instruments.histogram(size, SIZE_BOUNDS_BYTES)


if TYPE_CHECKING:
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor


class MeasuringInterceptor(_Interceptor):
    """The first of a server's interceptors, so that it sees the status that the others settle on."""

    def __init__(self, metrics: RpcMetrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not method.startswith(OUR_CALLS):
            return handler
        return _Measured(handler, method.removeprefix("/"), self._metrics)


class _Measured(grpc.RpcMethodHandler):  # type: ignore[type-arg]
    """The same handler; its calls are timed and its messages weighed."""

    def __init__(self, handler: Any, method: str, metrics: RpcMetrics) -> None:
        self.request_streaming = handler.request_streaming
        self.response_streaming = handler.response_streaming
        self.request_deserializer = _weighing_bytes(handler.request_deserializer, metrics.sizes, method)
        self.response_serializer = _weighing_result(handler.response_serializer, metrics.sizes, method)
        for shape in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            function = getattr(handler, shape)
            setattr(self, shape, None if function is None else _timing(function, metrics.durations, method))


def _weighing_bytes(deserialize: Handler, sizes: Histogram, method: str) -> Handler:
    def weigh(message: bytes) -> Any:
        sizes.record(len(message), method, "received")
        return deserialize(message)

    return weigh


def _weighing_result(serialize: Handler, sizes: Histogram, method: str) -> Handler:
    def weigh(message: Any) -> bytes:
        written: bytes = serialize(message)
        sizes.record(len(written), method, "sent")
        return written

    return weigh


def _timing(function: Handler, durations: Histogram, method: str) -> Handler:
    def end(started_s: float, context: Any, error: BaseException | None) -> None:
        durations.record(time.perf_counter() - started_s, "grpc", method, _status(context, error))

    async def answer(request: Any, context: Any) -> Any:
        started_s, error = time.perf_counter(), None
        try:
            return await function(request, context)
        except BaseException as raised:
            error = raised
            raise
        finally:
            end(started_s, context, error)

    async def stream(request: Any, context: Any) -> Any:
        started_s, error = time.perf_counter(), None
        try:
            async with aclosing(function(request, context)) as responses:
                async for response in responses:
                    yield response
        except BaseException as raised:
            error = raised
            raise
        finally:
            end(started_s, context, error)

    return stream if inspect.isasyncgenfunction(function) else answer


def _status(context: Any, error: BaseException | None) -> str:
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return grpc.StatusCode.CANCELLED.name
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return grpc.StatusCode.OK.name if error is None else grpc.StatusCode.UNKNOWN.name
