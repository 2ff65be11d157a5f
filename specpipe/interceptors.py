"""What interceptors of our servers have in common, and those that count calls.

Owns: how a handler is wrapped, how many calls run, and when the last has ended. Must not know: statuses, what a service
does.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from specpipe.errors import CapacityError

if TYPE_CHECKING:
    Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    Interceptor = grpc.aio.ServerInterceptor

Handler = Callable[..., Any]
Wrapper = Callable[[Handler], Handler]


class RunningCallsInterceptor(Interceptor):
    """Knows which calls of some services run: from when gRPC hands them over, to when their last word is sent."""

    def __init__(self, service_names: Sequence[str]) -> None:
        self._prefixes = prefixes_of(service_names)
        self._calls: set[asyncio.Task[Any]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        call = asyncio.current_task()  # gRPC runs each call in a task of its own, from here to its end
        if call is not None and str(handler_call_details.method).startswith(self._prefixes):
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        return await continuation(handler_call_details)

    async def ended(self) -> None:
        """Returns when none runs."""
        while self._calls:
            await asyncio.wait(self._calls)


class CallLimitInterceptor(Interceptor):
    """Counts running calls of some services and refuses more than a number of them, without waiting."""

    def __init__(self, max_calls: int, service_names: Sequence[str]) -> None:
        self._max_calls = max_calls
        self._prefixes = prefixes_of(service_names)
        self.num_calls = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        is_limited = str(handler_call_details.method).startswith(self._prefixes)
        return wrapped(handler, self._limiting) if is_limited else handler

    def _limiting(self, handler: Handler) -> Handler:
        async def answer(request: Any, context: Any) -> Any:
            self._enter()
            try:
                return await handler(request, context)
            finally:
                self.num_calls -= 1

        async def stream(request: Any, context: Any) -> Any:
            self._enter()
            try:
                async with aclosing(handler(request, context)) as responses:
                    async for response in responses:
                        yield response
            finally:
                self.num_calls -= 1

        return stream if inspect.isasyncgenfunction(handler) else answer

    def _enter(self) -> None:
        if self.num_calls >= self._max_calls:
            raise CapacityError(f"{self._max_calls} calls are running, which is the limit; try again later")
        self.num_calls += 1


def prefixes_of(service_names: Sequence[str]) -> tuple[str, ...]:
    """How the methods of these services begin."""
    return tuple(f"/{name}/" for name in service_names)


_KINDS: dict[tuple[bool, bool], tuple[str, Callable[..., grpc.RpcMethodHandler[Any, Any]]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


def wrapped(handler: Any, wrap: Wrapper, wrap_deserializer: Wrapper | None = None) -> Any:
    """The same RPC with its function wrapped, and the deserializer of a single request.

    None (an unknown method) and synchronous handlers stay as they are.
    """
    if handler is None:
        return None
    name, create = _KINDS[handler.request_streaming, handler.response_streaming]
    function = getattr(handler, name)
    if not (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)):
        return handler
    deserialize = handler.request_deserializer
    if wrap_deserializer is not None and deserialize is not None and not handler.request_streaming:
        deserialize = wrap_deserializer(deserialize)
    return create(
        wrap(function),
        request_deserializer=deserialize,
        response_serializer=handler.response_serializer,
    )
