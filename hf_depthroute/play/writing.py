"""Texts that grow by one greedy token a step, with the time of each step and the layers that
ran for each token.

Shapes: T tokens of a text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel
from transformers import Cache

from ..base.stack import stack_of
from ..evaluation.served import as_base
from ..routing.trace import RouteTrace, record_routes


@dataclass
class Text:
    """A text so far.

    `layers` are those that ran in full, for each token that the model has read: all but the last
    one. Where experts are routed, a layer counts by the share of a token's experts that ran.
    """

    ids: list[int]  # [T], those of the prompt and those that were written
    prompt: int  # tokens of the prompt
    depth: int  # layers of the model
    layers: list[float] = field(default_factory=list)
    prompt_seconds: float = 0.0  # of the pass over the prompt
    seconds: float = 0.0  # of all steps after it
    ended: bool = False  # the last token is one that ends a text

    @property
    def written(self) -> int:
        """Tokens after the prompt."""
        return len(self.ids) - self.prompt

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the steps after the pass over the prompt; None before the first of them."""
        if self.seconds:
            return (self.written - 1) / self.seconds
        return None

    @property
    def share(self) -> float:
        """Share of the layers that ran in full, over the tokens that were read."""
        return sum(self.layers) / (self.depth * len(self.layers))


def write(model: PeftModel, ids: Sequence[int], new_tokens: int) -> Iterator[tuple[Text, Text]]:
    """Yield the texts of the routed model and of its base after each step: the same two objects.

    The two take turns, so that their times can be compared, and each reads the prompt once before,
    because a first pass takes longer. What the routers decide is seen in a second, equal step,
    because recording takes time. A text ends after `new_tokens`, or where `generate` ends it.

    The model is in eval mode; nothing else may use it while a step runs.
    """
    depth = len(stack_of(model).layers)
    routed = Text(list(ids), len(ids), depth)
    dense = Text(list(ids), len(ids), depth)
    timed = _Reader(model)
    seen = _Reader(model)
    plain = _Reader(model)
    with torch.no_grad():
        _Reader(model).read(ids)
        with as_base(model):
            _Reader(model).read(ids)
    while any(text.written < new_tokens and not text.ended for text in (routed, dense)):
        with torch.no_grad():
            if not routed.ended:
                before = list(routed.ids)
                timed.extend(routed)
                with record_routes(model) as trace:
                    seen.read(before)
                routed.layers += layers_run(trace, depth)
            if not dense.ended:
                dense.layers += [float(depth)] * (len(dense.ids) - plain.done)
                plain.extend(dense, as_base(model))
        yield routed, dense


def layers_run(trace: RouteTrace, depth: int) -> list[float]:
    """How many of `depth` layers ran in full for each token of a pass over one text, `[T]`."""
    runs = [record.mask[0].float().cpu() for record in trace.values()]
    shares = torch.stack([run if run.ndim == 1 else run.mean(-1) for run in runs])
    full: list[float] = (depth - len(runs) + shares.sum(0)).tolist()
    return full


class _Reader:
    """A model's passes over a text that grows."""

    def __init__(self, model: Any) -> None:
        self.done = 0  # tokens that the cache holds
        self._model = model
        self._cache: Cache | None = None

    def read(self, ids: Sequence[int]) -> int:
        """The likeliest next token, after what is new in `ids`."""
        new = torch.tensor([ids[self.done :]], device=self._model.device)
        out = self._model(
            input_ids=new, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        self._cache = out.past_key_values
        self.done = len(ids)
        return int(out.logits[0, -1].argmax())

    def extend(self, text: Text, how: AbstractContextManager[Any] | None = None) -> None:
        """Add a token to `text`, and the time of its step."""
        with how or nullcontext():
            start = time.perf_counter()
            token = self.read(text.ids)
            took = time.perf_counter() - start
        if text.written:
            text.seconds += took
        else:
            text.prompt_seconds = took
        text.ids.append(token)
        ends = self._model.generation_config.eos_token_id
        text.ended = token in (ends if isinstance(ends, list) else [ends])
