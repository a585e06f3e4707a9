"""The limits of `hf-depthroute serve`: what a request may be and compute,
and its end when its client leaves.

`transformers serve` takes every request, computes for clients that have left, and answers 500 to
what a client got wrong. `limited` gives its app other POST routes, and its two generation managers
are replaced by `serve_generation.limited_managers` while a server runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import jinja2
from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse, Response
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ..files.shown import reason
from .serve_generation import SAMPLED, STREAMERS
from .serve_settings import Limits, is_sampled, wrong_settings

GENERATION = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
_LOAD = "/load_model"
_BODY_SECONDS = 30.0
_CLIENTS_FAULTS = (ValueError, TypeError, KeyError, AttributeError, jinja2.TemplateError)


def limited(app: FastAPI, model: str, limits: Limits) -> ASGIApp:
    """The `app` of `transformers serve`, which is changed: it has no POST routes but those of
    generation and of loading, for the one model that is served, and each within limits."""
    running = 0

    async def admitted(request: Request) -> AsyncIterator[dict[str, Any]]:
        """A request's content; it has a place among those that run or wait until its end."""
        nonlocal running
        content = _parsed(await _read(request, limits.body_bytes))
        _check(content, request.url.path, model, limits)
        if running >= limits.requests:
            why = f"{running} requests are running or waiting; try again later"
            raise HTTPException(429, why, {"Retry-After": "1"})
        running += 1
        streamers: list[Any] = []
        STREAMERS.set(streamers)
        SAMPLED.set(is_sampled(content))
        try:
            yield content
        finally:
            running -= 1
            for streamer in streamers:
                streamer.cancel()

    content_of = Depends(admitted)

    def generates(endpoint: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Response]]:
        async def answer(request: Request, content: dict[str, Any] = content_of) -> Response:
            # An id that a client chose could be another's, and answers are delivered by it.
            request.state.request_id = str(uuid.uuid4())
            return await _while_connected(request, endpoint(request, content))

        return answer

    def loads(endpoint: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Response]]:
        async def answer(content: dict[str, Any] = content_of) -> Response:
            return await endpoint(content)

        return answer

    routes: list[Any] = [r for r in app.routes if "POST" in getattr(r, "methods", ())]
    app.router.routes[:] = [route for route in app.routes if route not in routes]
    kinds = {**dict.fromkeys(GENERATION, generates), _LOAD: loads}
    for route in routes:
        if route.path in kinds:
            answer = kinds[route.path](route.endpoint)
            app.post(route.path, response_model=None)(answer)
    app.add_exception_handler(HTTPException, _refused)
    for kind in _CLIENTS_FAULTS:
        app.add_exception_handler(kind, _wrong)

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        # A client has left, or the server ends and the time that it gave its answers is over.
        with contextlib.suppress(ClientDisconnect, asyncio.CancelledError):
            await app(scope, receive, send)

    return served


async def _read(request: Request, most: int) -> bytes:
    """The body of a request."""
    body = bytearray()
    closed = {"Connection": "close"}  # the rest is not read
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise HTTPException(413, f"the body is larger than {most:,} bytes", closed)
    except TimeoutError:
        why = f"the body did not arrive within {_BODY_SECONDS:g} s"
        raise HTTPException(408, why, closed) from None
    return bytes(body)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise HTTPException(400, f"the body is not JSON in UTF-8: {error}") from error
    if not isinstance(content, dict):
        raise HTTPException(400, "the body is not a JSON object")
    return content


def _check(content: Mapping[str, Any], path: str, model: str, limits: Limits) -> None:
    """Refuse another model, and settings out of range."""
    wanted = content.get("model")
    if wanted != model and (wanted is not None or path == _LOAD):
        raise HTTPException(400, f"this server has one model, {model!r}; name it")
    wrong = wrong_settings(content, limits.output_tokens, path)
    if wrong is not None:
        raise HTTPException(400, wrong)


async def _while_connected(request: Request, answering: Awaitable[Any]) -> Any:
    """The answer; it is cancelled when the client leaves."""
    answer = asyncio.ensure_future(answering)
    leaving = asyncio.ensure_future(request.receive())  # nothing else comes after the body
    try:
        await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        answer.cancel()
        leaving.cancel()


async def _refused(request: Request, error: Any) -> JSONResponse:
    return _error(error.status_code, str(error.detail), error.headers)


async def _wrong(request: Request, error: Exception) -> JSONResponse:
    return _error(400, reason(error)[:300])


def _error(status: int, why: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error as OpenAI's API says it."""
    return JSONResponse(
        {"error": {"message": why, "type": "invalid_request_error"}}, status, headers
    )
