"""The engine of `transformers serve` with limits: how much a request may compute, and its end when its client leaves.

transformers.cli.serving has no setting for either, so its two generation managers are replaced by these while a server
runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..shown import reason
from .serve_requests import Guard, Limits, error_body


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
    for name in ("num_beams", "num_return_sequences"):
        if (getattr(generation_config, name, None) or 1) > 1:
            raise HTTPException(400, f"{name} is not served; a request has one answer")
    wanted = generation_config.max_new_tokens
    most = min(limits.output_tokens, room)
    generation_config.max_new_tokens = most if wanted is None else max(1, min(wanted, most))
    generation_config.max_length = None


def limited_managers(limits: Limits) -> tuple[type, type]:
    """`GenerateManager` and `CBGenerateManager` of transformers, within `limits`."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList
    from transformers.cli.serving.utils import CBGenerateManager, GenerateManager

    class Gone(StoppingCriteria):
        def __init__(self, gone: threading.Event) -> None:
            self.gone = gone

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full(input_ids.shape[:1], self.gone.is_set(), device=input_ids.device)

    class Stoppable:
        """`generate` of a model, which ends when its client is gone, and does not begin then."""

        def __init__(self, model: Any, gone: threading.Event) -> None:
            self.model, self.gone = model, gone

        def generate(self, **arguments: Any) -> Any:
            if self.gone.is_set():
                return arguments["input_ids"]
            return self.model.generate(**arguments, stopping_criteria=StoppingCriteriaList([Gone(self.gone)]))

    class Checked:
        """Both managers' streamed generation, of a request that is within the limits."""

        def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, **rest: Any) -> Any:
            check_generation(inputs, gen_config, limits)
            manager: Any = super()
            return manager.generate_streaming(model, processor, inputs, gen_config, **rest)

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


@contextmanager
def limited_engine(limits: Limits) -> Iterator[None]:
    """Inside the block, servers of transformers compute within `limits`."""
    from transformers.cli.serving import utils

    kept = utils.GenerateManager, utils.CBGenerateManager
    utils.GenerateManager, utils.CBGenerateManager = limited_managers(limits)  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        utils.GenerateManager, utils.CBGenerateManager = kept  # type: ignore[misc]


def guarded(app: Any, model: str, limits: Limits) -> Any:
    """A server of transformers (a FastAPI app) behind a `Guard`; what a client got wrong is answered with 400."""
    import jinja2
    from fastapi.responses import JSONResponse

    async def wrong(request: Any, error: Exception) -> Any:
        return JSONResponse(error_body(reason(error)[:300]), status_code=400)

    for kind in (ValueError, TypeError, KeyError, AttributeError, jinja2.TemplateError):
        app.add_exception_handler(kind, wrong)
    return Guard(app, model, limits)
