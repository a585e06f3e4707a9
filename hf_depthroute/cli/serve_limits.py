"""The limits of `hf-depthroute serve`: what a request may be and compute,
and its end when its client leaves.

`transformers serve` takes every request, computes for clients that have left, loads any model it is
asked for, and answers 500 to what a client got wrong. `Guard` wraps it, and its two generation
managers are replaced by `serve_generation.limited_managers` while a server runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from ..files.shown import shown
from .serve_generation import STREAMERS
from .serve_prompts import fault_of_prompt
from .serve_settings import Limits, wrong_settings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

GENERATION = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
_LOAD = "/load_model"
_BODY_SECONDS = 30.0


class BadRequest(Exception):
    """A request that is refused: an HTTP status and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Guard:
    """ASGI middleware: checks requests, bounds how many there are,
    and ends those that no client waits for.

    Args:
        app: The server that it wraps.
        model: The name of the one model that is served.
        limits: What a request may ask for.
        tokenizer: Gives the model's, with which prompts are counted first; None: only the app
            counts them.
    """

    def __init__(
        self, app: Any, model: str, limits: Limits, tokenizer: Callable[[], Any] | None = None
    ) -> None:
        self.app = app
        self.model = model
        self.limits = limits
        self.tokenizer = tokenizer
        self.requests = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        try:
            self._check_path(scope["path"])
            body = await _read(Request(scope, receive), self.limits.body_bytes)
            if body is None:  # the client has left
                return
            content = self._checked(scope["path"], body)
            if self.requests >= self.limits.requests:
                raise BadRequest(
                    429, f"{self.requests} requests are running or waiting; try again later"
                )
            self.requests += 1
            try:
                await self._check_prompt(content)
                await self._run(scope, body, receive, send)
            finally:
                self.requests -= 1
        except BadRequest as refused:
            await _answer(refused)(scope, receive, send)
        except asyncio.CancelledError:
            # The server ends, and the time that it gave its answers is over. Their clients see a
            # broken connection.
            return

    def _check_path(self, path: str) -> None:
        if path not in (*GENERATION, _LOAD):
            raise BadRequest(
                404, f"{shown(path)[:100]} is not served; use one of: {', '.join(GENERATION)}"
            )

    async def _check_prompt(self, content: Mapping[str, Any]) -> None:
        """Refuse a prompt that is too long, in a thread:
        tokenising one of a megabyte takes seconds."""
        if self.tokenizer is not None:
            most = self.limits.prompt_tokens
            fault = await asyncio.to_thread(fault_of_prompt, content, most, self.tokenizer())
            if fault is not None:
                raise BadRequest(400, fault)

    def _checked(self, path: str, body: bytes) -> dict[str, Any]:
        """The content of a body that may be run."""
        try:
            content = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise BadRequest(400, f"the body is not JSON in UTF-8: {error}") from error
        if not isinstance(content, dict):
            raise BadRequest(400, "the body is not a JSON object")
        wanted = content.get("model")
        if wanted != self.model and (wanted is not None or path == _LOAD):
            raise BadRequest(400, f"this server has one model, {self.model!r}; name it")
        wrong = wrong_settings(content, self.limits.output_tokens, path)
        if wrong is not None:
            raise BadRequest(400, wrong)
        return content

    async def _run(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        """The app on the body that was read, until it is done or the client has left."""
        # An id that a client chose could be another's, and answers are delivered by it.
        headers = [
            (name, value) for name, value in scope["headers"] if name.lower() != b"x-request-id"
        ]
        left, sent = asyncio.Event(), False

        async def replay() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def wait_for_the_end() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()

        streamers: list[Any] = []
        STREAMERS.set(streamers)
        running = asyncio.ensure_future(self.app({**scope, "headers": headers}, replay, send))
        listening = asyncio.ensure_future(wait_for_the_end())
        try:
            await asyncio.wait({running, listening}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            listening.cancel()
            if not running.done():
                running.cancel()
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await running
        finally:
            # The client has gone, or the server is about to.
            if left.is_set() or running.cancelled():
                for streamer in streamers:
                    streamer.cancel()


async def _read(request: Request, most: int) -> bytes | None:
    """The body of a request; None if its client leaves before it has arrived."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise BadRequest(413, f"the body is larger than {most:,} bytes")
    except TimeoutError:
        raise BadRequest(408, f"the body did not arrive within {_BODY_SECONDS:.0f} s") from None
    except ClientDisconnect:
        return None
    return bytes(body)


def _answer(refused: BadRequest) -> JSONResponse:
    # What is left of a body that is too large, or late, is not read.
    headers = {
        429: {"Retry-After": "1"},
        408: {"Connection": "close"},
        413: {"Connection": "close"},
    }
    return JSONResponse(error_body(str(refused)), refused.status, headers.get(refused.status))


def error_body(why: str) -> dict[str, Any]:
    """An error as OpenAI's API says it."""
    return {"error": {"message": why, "type": "invalid_request_error"}}
