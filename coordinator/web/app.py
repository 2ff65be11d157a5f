"""The routes.

Owns: paths, what each takes and answers. Must not know: sockets, workers.

`/ui` is the page, `/ui/api/state` and `/ui/api/events` say how the service is, `/ui/api/generate` answers a question as
GenerateService does: the same checks, limits and sentences. Errors are JSON objects with a code of gRPC's names.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from coordinator.answer_stream import AnswerStream
from coordinator.requests import Question
from coordinator.web.answers import INTERNAL_ERROR, NO_STORE, EventStream, frame, refusal, refusal_of
from coordinator.web.assets import Assets
from coordinator.web.feed import Feed
from coordinator.web.guard import Guard
from coordinator.web.messages import event_json
from coordinator.web.questions import question_from_json
from specpipe.errors import SpecpipeError

MAX_BODY_BYTES: Final = 8 * 1024 * 1024
MAX_BODY_S: Final = 30.0  # for a question to arrive
FOR_EVER: Final = {"cache-control": "public, max-age=31536000, immutable"}
TRACE_HEADERS: Final = ("traceparent", "tracestate")
Metadata = Iterable[tuple[str, str]]


class Begin(Protocol):
    async def __call__(self, question: Question, *, metadata: Metadata) -> AnswerStream:
        """See `coordinator.service.GenerateService.begin`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """What the routes show."""

    begin: Begin
    service: Callable[[], dict[str, Any]]  # what does not change
    state: Callable[[], dict[str, Any]]  # what does
    feed: Feed
    interface: str  # where the server listens


def create_app(views: Views) -> ASGIApp:
    assets = Assets()
    routes = _Routes(views, assets)
    app = Starlette(
        routes=[
            Route("/", routes.root),
            Route("/ui", routes.page),
            Route("/ui/assets/{version}/{path:path}", routes.asset),
            Route("/ui/api/state", routes.state),
            Route("/ui/api/events", routes.events),
            Route("/ui/api/generate", routes.generate, methods=["POST"]),
            Route("/healthz", routes.health),
        ],
        exception_handlers={SpecpipeError: _refuse, HTTPException: _refuse_http, Exception: _refuse_unknown},
    )
    return Guard(app, policy=assets.policy, interface=views.interface)


class _Routes:
    def __init__(self, views: Views, assets: Assets) -> None:
        self._views = views
        self._assets = assets

    async def root(self, _request: Request) -> Response:
        return RedirectResponse("/ui", headers=NO_STORE)

    async def page(self, _request: Request) -> Response:
        return HTMLResponse(self._assets.page, headers={"cache-control": "no-cache"})

    async def asset(self, request: Request) -> Response:
        asset = self._assets.get(request.path_params["version"], request.path_params["path"])
        if asset is None:
            raise HTTPException(404)
        return Response(asset.body, media_type=asset.media_type, headers=FOR_EVER)

    async def state(self, _request: Request) -> Response:
        return JSONResponse({**self._views.service(), **self._views.state()}, headers=NO_STORE)

    async def events(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type=EventStream.media_type, headers=NO_STORE)
        return EventStream(self._views.feed.watch())

    async def generate(self, request: Request) -> Response:
        question = question_from_json(await _read_body(request))
        metadata = [(name, value) for name, value in request.headers.items() if name in TRACE_HEADERS]
        return EventStream(self._answer(question, metadata))

    async def health(self, _request: Request) -> Response:
        is_ready = self._views.state()["is_ready"]
        status = "serving" if is_ready else "not serving"
        return JSONResponse({"status": status}, 200 if is_ready else 503, headers=NO_STORE)

    async def _answer(self, question: Question, metadata: Metadata) -> AsyncGenerator[bytes, None]:
        """The request ends with this generator, whatever ends it."""
        stream = await self._views.begin(question, metadata=metadata)
        try:
            async for event in stream:
                yield frame(*event_json(event))
        finally:
            stream.close()


async def _read_body(request: Request) -> bytes:
    """Raises HTTPException for one that is no JSON, too large or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "the request must be sent as application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(MAX_BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise HTTPException(413, f"the request is larger than {MAX_BODY_BYTES // 2**20} MiB")
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive in {MAX_BODY_S:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the request was not completed") from None
    return bytes(body)


_HTTP_CODES: Final = {404: "NOT_FOUND", 405: "UNIMPLEMENTED", 408: "DEADLINE_EXCEEDED"}


async def _refuse(_request: Request, error: Exception) -> Response:
    assert isinstance(error, SpecpipeError)
    return refusal_of(error)


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentences = {404: f"nothing is at {request.url.path}", 405: f"{request.method} is not for {request.url.path}"}
    message = sentences.get(error.status_code, error.detail)
    answer = refusal(error.status_code, _HTTP_CODES.get(error.status_code, "INVALID_ARGUMENT"), message)
    answer.headers.update(error.headers or {})
    if error.status_code not in sentences:  # the body was not read to its end
        answer.headers["connection"] = "close"
    return answer


async def _refuse_unknown(_request: Request, _error: Exception) -> Response:
    """The server logs it, once."""
    return refusal(500, "INTERNAL", INTERNAL_ERROR)
