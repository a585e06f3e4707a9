"""Generation behind `hf-depthroute serve`: within limits, ended when its client leaves,
and as the request asks for.

`limited_managers` replaces the two generation managers of `transformers serve` while a server runs.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import threading
from contextvars import ContextVar
from typing import Any

from fastapi import HTTPException

from .serve_settings import Limits

_GRACE = 5.0  # seconds, at the end of the process, for what is still computed
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
# What continuous batching has once, for all requests: fields of a generation config, what requests
# call them, and the value that does nothing.
_SHARED: dict[str, tuple[str, object]] = {
    "stop_strings": ("stop (stop_strings)", None),
    "repetition_penalty": ("repetition_penalty (frequency_penalty + 1)", 1.0),
    "min_new_tokens": ("min_new_tokens", 0),
    "sequence_bias": ("logit_bias", None),
    "do_sample": ("do_sample (true where temperature is above 0, false where it is 0)", False),
    "temperature": ("temperature", 1.0),
    "top_p": ("top_p", 1.0),
    "top_k": ("top_k", 0),
    "min_p": ("min_p", 0.0),
}


# The streamers of the request that is running. An answer whose client left before its first word
# was sent is never begun, and only an answer that was begun ends its generation.
STREAMERS: ContextVar[list[object]] = ContextVar("streamers")
# Whether the request that is running is to be sampled, where it says so without `do_sample`.
SAMPLED: ContextVar[bool] = ContextVar("sampled", default=False)


def check_generation(inputs: Any, generation_config: Any, limits: Limits) -> None:
    """Refuse, with 400, a prompt or settings that cost too much; cut the answer to what may follow
    the prompt, and sample where that is asked for."""
    as_asked(generation_config)
    ids = inputs["input_ids"]
    length = len(ids) if isinstance(ids, list) else ids.shape[-1]
    room = limits.output_tokens
    if limits.positions is not None:
        room = limits.positions - length
    if length == 0:
        raise HTTPException(400, "the prompt has no tokens")
    if length > limits.prompt_tokens:
        raise HTTPException(
            400, f"the prompt has {length} tokens; this server takes {limits.prompt_tokens}"
        )
    if room < 1:
        raise HTTPException(
            400, f"the prompt has {length} tokens; the model has {limits.positions} positions"
        )
    # Of the model's own settings: a request's were checked.
    for name in ("num_beams", "num_return_sequences"):
        if (getattr(generation_config, name, None) or 1) > 1:
            raise HTTPException(400, f"{name} is not served; a request has one answer")
    wanted = generation_config.max_new_tokens
    most = min(limits.output_tokens, room)
    generation_config.max_new_tokens = most
    if wanted is not None:
        generation_config.max_new_tokens = max(1, min(wanted, most))
    generation_config.max_length = None


def as_asked(generation_config: Any) -> None:
    """Sample where the request says so: of it, transformers sets the temperature alone."""
    if SAMPLED.get():
        generation_config.do_sample = True


def check_shared(wanted: Any, shared: Any) -> None:
    """Refuse, with 400, settings of a request that continuous batching would not look at: it has
    one set of them for all, the model's generation config."""
    sampled = wanted.do_sample or shared.do_sample
    for name, (said, nothing) in _SHARED.items():
        asked = getattr(wanted, name, None)
        held = getattr(shared, name, None)
        held = nothing if held is None else held
        if asked is None or asked == held or (name in _SAMPLING and not sampled):
            continue
        why = (
            f"{said} is {asked!r}; with --continuous-batching all requests share the model's own, "
            f"{held!r}"
        )
        raise HTTPException(
            400, f"{why[:200]}; leave it out, or serve without --continuous-batching"
        )


def limited_managers(limits: Limits) -> tuple[type, type]:
    """`GenerateManager` and `CBGenerateManager` of transformers, within `limits`.

    transformers.cli.serving has no setting for what a request may compute, nor for its end when its
    client leaves.
    """
    import torch
    from transformers import StoppingCriteriaList
    from transformers.cli.serving.utils import CBGenerateManager, GenerateManager

    class Stoppable:
        """`generate` of a model, which ends when its client is gone, and does not begin then."""

        def __init__(self, model: Any, gone: threading.Event) -> None:
            self.model = model
            self.gone = gone

        def stop(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
            return torch.full(input_ids.shape[:1], self.gone.is_set(), device=input_ids.device)

        def generate(self, **arguments: Any) -> Any:
            if self.gone.is_set():
                return arguments["input_ids"]
            return self.model.generate(
                **arguments, stopping_criteria=StoppingCriteriaList([self.stop])
            )

    class Checked:
        """Both managers' streamed generation, of a request that is within the limits."""

        def generate_streaming(
            self,
            model: torch.nn.Module,
            processor: object,
            inputs: object,
            gen_config: object,
            **rest: object,
        ) -> Any:
            check_generation(inputs, gen_config, limits)
            manager: Any = super()
            queue, streamer = manager.generate_streaming(
                model, processor, inputs, gen_config, **rest
            )
            STREAMERS.get().append(streamer)
            return queue, streamer

    class OneAtATime(Checked, GenerateManager):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            atexit.register(self.finish)

        def finish(self) -> None:
            """Wait for what the thread computes: Python aborts if it computes while Python ends."""
            with contextlib.suppress(TimeoutError):
                self.submit(int).result(_GRACE)

        async def generate_non_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
        ) -> Any:
            check_generation(inputs, gen_config, limits)
            gone = threading.Event()
            try:
                stoppable: Any = Stoppable(model, gone)
                return await super().generate_non_streaming(
                    stoppable, processor, inputs, gen_config, request_id
                )
            except asyncio.CancelledError:
                gone.set()
                raise

        def async_submit(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
            # The thread sets the result of a future whose client has left, or whose loop is closed.
            return asyncio.shield(asyncio.wrap_future(self.submit(fn, *args, **kwargs)))

    class Continuous(Checked, CBGenerateManager):  # type: ignore[misc]
        def init_cb(self, model: Any, gen_config: Any) -> None:
            as_asked(gen_config)
            check_shared(gen_config, model.generation_config)
            shared = copy.deepcopy(model.generation_config)  # not the first request's
            shared.use_cache = False  # it has its own
            super().init_cb(model, shared)

        async def generate_non_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
        ) -> Any:
            check_generation(inputs, gen_config, limits)
            try:
                return await super().generate_non_streaming(
                    model, processor, inputs, gen_config, request_id
                )
            except asyncio.CancelledError:
                self._cb.cancel_request(request_id)  # type: ignore[union-attr]
                raise

    return OneAtATime, Continuous
