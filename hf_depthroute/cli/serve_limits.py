"""The limits of `hf-depthroute serve`: what a request may be and compute, and its end when its client leaves.

`transformers serve` takes every request, computes for clients that have left, loads any model it is asked for, and
answers 500 to what a client got wrong. `Guard` wraps it, and its two generation managers are replaced by
`limited_managers` while a server runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..files.shown import shown
from .serve_settings import wrong_settings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

GENERATION = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
_LOAD = "/load_model"
_COUNTS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_BODY_SECONDS = 30.0

# The streamers of the request that is running. An answer whose client left before its first word was sent is never
# begun, and only an answer that was begun ends its generation.
_streamers: ContextVar[list[Any]] = ContextVar("streamers")


@dataclass(frozen=True)
class Limits:
    """Limits of one server.

    Attributes:
        prompt_tokens: In one request.
        output_tokens: In one answer.
        requests: At one time, running and waiting; one more is answered with 429.
        positions: How many the model has, for prompt and answer together.
    """

    prompt_tokens: int
    output_tokens: int
    requests: int
    positions: int | None = None

    @property
    def body_bytes(self) -> int:
        """No prompt within the limit needs more: tokens are words, and chats have roles and tools."""
        return (1 << 20) + 32 * self.prompt_tokens


class BadRequest(Exception):
    """A request that is refused: an HTTP status and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Guard:
    """ASGI middleware: checks requests, bounds how many there are, and ends those that no client waits for.

    Args:
        app: The server that it wraps.
        model: The name of the one model that is served.
        limits: What a request may ask for.
    """

    def __init__(self, app: Any, model: str, limits: Limits) -> None:
        self.app, self.model, self.limits = app, model, limits
        self.requests = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        try:
            body = await self._checked_body(scope["path"], receive)
            if body is None:  # the client has left
                return
            if self.requests >= self.limits.requests:
                raise BadRequest(429, f"{self.requests} requests are running or waiting; try again later")
        except BadRequest as refused:
            await _answer(send, refused)
            return
        self.requests += 1
        try:
            await self._run(scope, body, receive, send)
        finally:
            self.requests -= 1

    async def _checked_body(self, path: str, receive: Receive) -> bytes | None:
        if path not in (*GENERATION, _LOAD):
            raise BadRequest(404, f"{shown(path)[:100]} is not served; use one of: {', '.join(GENERATION)}")
        try:
            body = await asyncio.wait_for(_read(receive, self.limits.body_bytes), _BODY_SECONDS)
        except TimeoutError:
            raise BadRequest(408, f"the body did not arrive within {_BODY_SECONDS:.0f} s") from None
        if body is None:
            return None
        try:
            content = json.loads(body.decode("utf-8"))
            text = json.dumps(content, ensure_ascii=False)
        except (ValueError, RecursionError) as error:
            raise BadRequest(400, "the body is not JSON in UTF-8") from error
        if not isinstance(content, dict):
            raise BadRequest(400, "the body is not a JSON object")
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise BadRequest(400, "a string holds half of a surrogate pair, which is no character")
        wanted = content.get("model")
        if wanted != self.model and (wanted is not None or path == _LOAD):
            raise BadRequest(400, f"this server has one model, {self.model!r}; name it")
        for name in _COUNTS:
            value, most = content.get(name), self.limits.output_tokens
            if value is not None and not (isinstance(value, int) and value is not True and 1 <= value <= most):
                raise BadRequest(400, f"{name} must be a whole number from 1 to {most}")
        wrong = wrong_settings(content, self.limits.output_tokens)
        if wrong is not None:
            raise BadRequest(400, wrong)
        return body

    async def _run(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        """The app on the body that was read, until it is done or the client has left."""
        # An id that a client chose could be another's, and answers are delivered by it.
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"x-request-id"]
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
        _streamers.set(streamers)
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
            if left.is_set():
                for streamer in streamers:
                    streamer.cancel()


async def _read(receive: Receive, most: int) -> bytes | None:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise BadRequest(413, f"the body is larger than {most:,} bytes")
        if not message.get("more_body", False):
            return b"".join(parts)


async def _answer(send: Send, refused: BadRequest) -> None:
    body = json.dumps(error_body(str(refused))).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.status == 429:
        headers.append((b"retry-after", b"1"))
    if refused.status in (408, 413):  # what is left of the body is not read
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_body(why: str) -> dict[str, Any]:
    """An error as OpenAI's API says it."""
    return {"error": {"message": why, "type": "invalid_request_error"}}


def check_generation(inputs: Any, generation_config: Any, limits: Limits) -> None:
    """Refuse a prompt or settings that cost too much, and cut the answer to what may follow the prompt.

    Raises:
        HTTPException: 400, with what is too large.
    """
    from fastapi import HTTPException

    ids = inputs["input_ids"]
    length = len(ids) if isinstance(ids, list) else ids.shape[-1]
    room = limits.output_tokens if limits.positions is None else limits.positions - length
    if length == 0:
        raise HTTPException(400, "the prompt has no tokens")
    if length > limits.prompt_tokens:
        raise HTTPException(400, f"the prompt has {length} tokens; this server takes {limits.prompt_tokens}")
    if room < 1:
        raise HTTPException(400, f"the prompt has {length} tokens; the model has {limits.positions} positions")
    for name in ("num_beams", "num_return_sequences"):  # of the model's own settings: a request's were checked
        if (getattr(generation_config, name, None) or 1) > 1:
            raise HTTPException(400, f"{name} is not served; a request has one answer")
    wanted = generation_config.max_new_tokens
    most = min(limits.output_tokens, room)
    generation_config.max_new_tokens = most if wanted is None else max(1, min(wanted, most))
    generation_config.max_length = None


def limited_managers(limits: Limits) -> tuple[type, type]:
    """`GenerateManager` and `CBGenerateManager` of transformers, within `limits`.

    transformers.cli.serving has no setting for what a request may compute, nor for its end when its client leaves.
    """
    import torch
    from transformers import StoppingCriteriaList
    from transformers.cli.serving.utils import CBGenerateManager, GenerateManager

    class Stoppable:
        """`generate` of a model, which ends when its client is gone, and does not begin then."""

        def __init__(self, model: Any, gone: threading.Event) -> None:
            self.model, self.gone = model, gone

        def stop(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full(input_ids.shape[:1], self.gone.is_set(), device=input_ids.device)

        def generate(self, **arguments: Any) -> Any:
            if self.gone.is_set():
                return arguments["input_ids"]
            return self.model.generate(**arguments, stopping_criteria=StoppingCriteriaList([self.stop]))

    class Checked:
        """Both managers' streamed generation, of a request that is within the limits."""

        def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, **rest: Any) -> Any:
            check_generation(inputs, gen_config, limits)
            manager: Any = super()
            queue, streamer = manager.generate_streaming(model, processor, inputs, gen_config, **rest)
            _streamers.get().append(streamer)
            return queue, streamer

    class OneAtATime(Checked, GenerateManager):  # type: ignore[misc]
        async def generate_non_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
        ) -> Any:
            check_generation(inputs, gen_config, limits)
            gone = threading.Event()
            try:
                stoppable: Any = Stoppable(model, gone)
                return await super().generate_non_streaming(stoppable, processor, inputs, gen_config, request_id)
            except asyncio.CancelledError:
                gone.set()
                raise

        def async_submit(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
            # The thread sets the result of a future whose client has left, too.
            return asyncio.shield(super().async_submit(fn, *args, **kwargs))

    class Continuous(Checked, CBGenerateManager):  # type: ignore[misc]
        async def generate_non_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
        ) -> Any:
            check_generation(inputs, gen_config, limits)
            try:
                return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)
            except asyncio.CancelledError:
                self._cb.cancel_request(request_id)  # type: ignore[union-attr]
                raise

    return OneAtATime, Continuous
