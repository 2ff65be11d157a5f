"""How HTTP answers: errors as JSON, streams as server-sent events.

Owns: statuses of errors, the framing of events, the end of a stream when its reader leaves. Must not know: routes, what
events say.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from specpipe.errors import ErrorCode, SpecpipeError

STATUSES: Final = {
    ErrorCode.INVALID_ARGUMENT: 400,
    ErrorCode.FAILED_PRECONDITION: 400,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.ALREADY_EXISTS: 409,
    ErrorCode.RESOURCE_EXHAUSTED: 429,
    ErrorCode.CANCELLED: 499,
    ErrorCode.INTERNAL: 500,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.DEADLINE_EXCEEDED: 504,
}
INTERNAL_ERROR: Final = "internal error; the server's log has the details"
NO_STORE: Final = {"cache-control": "no-store"}
COMMENT: Final = b": nothing to tell yet\n\n"
COMMENT_EVERY_S: Final = 15.0  # of silence: proxies cut streams that say nothing, many after 60 s


def refusal(status: int, code: str, message: str) -> Response:
    """The same object that `generate --json` prints for an error."""
    return JSONResponse(error_json(code, message), status, headers=NO_STORE)


def refusal_of(error: SpecpipeError) -> Response:
    """Whom there is no room for keeps no connection either: those are few, too."""
    answer = refusal(STATUSES[error.code], error.code.value, str(error))
    if error.code is ErrorCode.RESOURCE_EXHAUSTED:
        answer.headers["connection"] = "close"
    return answer


def error_json(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


def frame(event: str, data: Any) -> bytes:
    """One server-sent event."""
    return f"event: {event}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class EventStream(Response):
    """Sends frames as they come, until they end or the reader leaves; then the generator is closed, at once.

    A SpecpipeError before the first frame becomes a status, a later one a last event `error`. While no frame comes
    there are comments, the first of which is a first frame too.
    """

    media_type = "text/event-stream"
    comment_every_s = COMMENT_EVERY_S

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={**NO_STORE, "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(scope, receive, send))
        leaving = asyncio.ensure_future(_reader_left(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(leaving, writing)
        if not writing.cancelled():
            writing.result()

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(_with_comments(self._frames, self.comment_every_s)) as frames:
            try:
                first = await anext(frames, b"")
            except SpecpipeError as error:
                await refusal_of(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send(_part(first))
            try:
                async for data in frames:
                    await send(_part(data))
            except SpecpipeError as error:
                await send(_part(frame("error", error_json(error.code.value, str(error)))))
            except Exception:
                await send(_part(frame("error", error_json("INTERNAL", INTERNAL_ERROR)), is_last=True))
                raise
            await send(_part(b"", is_last=True))


async def _with_comments(frames: AsyncGenerator[bytes, None], every_s: float) -> AsyncGenerator[bytes, None]:
    """The frames, and a comment for each time that none has come for so long."""
    async with aclosing(frames):
        while True:
            coming = asyncio.ensure_future(_next(frames))
            try:
                while not (await asyncio.wait({coming}, timeout=every_s))[0]:
                    yield COMMENT
            finally:
                await _end(coming)
            data = coming.result()
            if data is None:
                return
            yield data


async def _next(frames: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(frames, None)


def _part(body: bytes, *, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not is_last}


async def _reader_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
