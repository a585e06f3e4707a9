"""Lossless self-speculation: the routed model drafts, the full model verifies, one set of weights.

The draft is a view of the model: its modules are copies with their own flags, its tensors are the model's. transformers
drafts and verifies (`generate(..., assistant_model=...)`): greedy output is the full model's, token for token up to
the rounding of one forward pass over several tokens, and sampling keeps the full model's distribution.

Shapes: B = 1 sequence, T positions, n drafted tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import PeftModel
from torch import nn
from transformers import DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput

from .calibration import set_budget
from .families import find_decoder, find_family
from .holder import Routing
from .trace import overridden
from .views import leave_out, view_of

# What transformers hands to a draft whose tokens `_Draft.generate` can make without its general loop.
_PLAIN_KEYS = {
    *("input_ids", "min_new_tokens", "max_new_tokens", "generation_config", "logits_processor"),
    *("attention_mask", "position_ids", "past_key_values", "logits_to_keep", "use_cache"),
}


@dataclass
class DraftCounter:
    """What drafting achieved, summed over the generations it was given to.

    Attributes:
        new_tokens: Tokens generated.
        target_passes: Forward passes of the full model, each over a draft and one token more.
        drafted: Tokens that the draft proposed.
    """

    new_tokens: int = 0
    target_passes: int = 0
    drafted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the drafted tokens; every pass of the full model adds one token of its own."""
        return (self.new_tokens - self.target_passes) / max(1, self.drafted)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens generated per forward pass of the full model; 1 without a draft."""
        return self.new_tokens / max(1, self.target_passes)


class _Draft:
    """Mixin of a draft view: what transformers' assisted generation asks of it, without the overhead of `generate`.

    Attributes:
        confidence: A draft ends after a token whose probability is lower.
        drafted: Tokens drafted so far.
    """

    confidence = 0.0
    drafted = 0
    _target: Any

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        config: Any = kwargs.get("generation_config")
        if not getattr(config, "is_assistant", None):
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        if kwargs.get("past_key_values") is None:
            self._warn_of_a_routed_target()
        plain = not args and kwargs.keys() <= _PLAIN_KEYS and not kwargs.get("min_new_tokens")
        mask = kwargs.get("attention_mask")
        if plain and (mask is None or bool(mask.all())):
            ids, count, processors = (kwargs[name] for name in ("input_ids", "max_new_tokens", "logits_processor"))
            out = self._continue(ids, count, config, processors, kwargs.get("past_key_values"))
        else:
            config.assistant_confidence_threshold = self.confidence
            out = super().generate(*args, **kwargs)  # type: ignore[misc]
        self.drafted += out.sequences.shape[1] - kwargs["input_ids"].shape[1]
        return out

    def _warn_of_a_routed_target(self) -> None:
        target = self._target()
        if target is not None and any(m.adapter() for m in target.modules() if isinstance(m, Routing)):
            warnings.warn(
                "the model that verifies is routed itself, so the output is not the full model's; use "
                "lossless_generate(), or generate() of the PeftModel",
                stacklevel=2,
            )

    @torch.no_grad()
    def _continue(self, ids: torch.Tensor, count: int, config: Any, processors: Any, cache: Any) -> Any:
        """Up to `count` tokens after `ids` `[1, T]`, and for each the scores `[1, V]` that it was drawn from."""
        if cache is None:
            cache = DynamicCache()  # also of sliding windows it keeps everything, so that it can be cropped
        ends = config.eos_token_id if isinstance(config.eos_token_id, list | tuple) else [config.eos_token_id]
        last_only = {"logits_to_keep": 1} if self._supports_logits_to_keep() else {}  # type: ignore[attr-defined]
        scores: list[torch.Tensor] = []
        new = ids[:, cache.get_seq_length() :]
        while len(scores) < count:
            logits = self(input_ids=new, past_key_values=cache, use_cache=True, **last_only).logits  # type: ignore[operator]
            score = logits[:, -1].float()
            for process in processors:
                score = process(ids, score)
            if config.do_sample:
                new = torch.multinomial(score.softmax(-1), num_samples=1)
            else:
                new = score.argmax(-1, keepdim=True)
            scores.append(score)
            ids = torch.cat([ids, new], dim=1)
            if int(new) in ends or (self.confidence and float(score.softmax(-1)[0, int(new)]) < self.confidence):
                break
        return GenerateDecoderOnlyOutput(sequences=ids, scores=tuple(scores), past_key_values=cache)  # type: ignore


def draft_view(
    model: nn.Module,
    budget: float | None = None,
    drop: Sequence[int] = (),
    num_tokens: int = 5,
    confidence: float = 0.0,
) -> Any:
    """A view of a routed model to draft with: its own modules and flags, the model's tensors.

        draft = draft_view(model, budget=0.25, drop=[8, 9])
        model.generate(**inputs, assistant_model=draft)  # or lossless_generate(model, **inputs, draft=draft)

    Routing is on in the view, whatever the model's state. Training or calibrating the model moves the view along;
    `set_budget` on one of them leaves the other as it is. Moving the model to another device or dtype needs a new view.

    Args:
        model: A transformers model of a supported family, or a `PeftModel` around one. It is not changed.
        budget: The draft's budget in (0, 1], with thresholds from the adapter's quantile tables. Default: the
            adapter's at this moment.
        drop: Indices of decoder layers that the draft leaves out whole, attention and KV cache included. The layers
            that remain are numbered anew.
        num_tokens: Tokens drafted before the full model looks.
        confidence: End a draft early, after a token that the draft gave a lower probability than this.

    Returns:
        A transformers model of the same class name, in eval mode.

    Raises:
        ValueError: Nothing would be skipped (no routed layer is active and `drop` is empty), an index is out of range
            or named twice, every layer is dropped, the adapter has no budget to change, or a number is out of range.
        ConfigError: `budget` is not in (0, 1].
    """
    base = _transformers_model(model)
    family = find_family(base)
    depth = len(getattr(find_decoder(base, family), family.layers))
    drop = sorted(int(index) for index in drop)
    if drop and (len(set(drop)) < len(drop) or drop[0] < 0 or drop[-1] >= depth or len(drop) == depth):
        raise ValueError(f"drop={drop}: name some of the layers 0 to {depth - 1}, each once, and not all of them")
    if num_tokens < 1 or not 0 <= confidence < 1:
        raise ValueError(f"num_tokens={num_tokens} must be at least 1 and confidence={confidence} in [0, 1)")

    draft = view_of(base)
    draft.__class__ = _drafting(base.__class__)
    draft.eval()
    holders = [module for module in draft.modules() if isinstance(module, Routing)]
    for holder in holders:
        holder._disable_adapters = False
        holder.replay = holder.selection = holder.scheduled_budget = holder.scheduled_temperature = None
        holder.observe_similarity, holder.last_mask = False, None
    if not drop and not any(holder.adapter() for holder in holders):
        raise ValueError("the draft would skip nothing: no depth-routed adapter is active and drop is empty")
    if budget is not None and any(holder.adapter() for holder in holders):
        set_budget(draft, budget)
    if drop:
        leave_out(draft, drop)
    draft.confidence, draft._target = confidence, weakref.ref(base)
    draft.generation_config.num_assistant_tokens = num_tokens
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0  # ours is `confidence`, which stays as it is set
    return draft


def is_draft(model: Any) -> bool:
    """Whether `model` is a draft view."""
    return isinstance(model, _Draft)


@contextmanager
def full_depth(model: nn.Module) -> Iterator[None]:
    """Inside the block every layer of `model` runs in full; adapters of other methods stay on. Not its draft views."""
    if not any(isinstance(module, Routing) for module in model.modules()):
        yield
        return
    with overridden(model, "_disable_adapters", True):
        yield


def lossless_generate(
    model: nn.Module, *args: Any, draft: Any, counter: DraftCounter | None = None, **kwargs: Any
) -> Any:
    """`model.generate` at full depth, faster: `draft` proposes tokens, the full model verifies them.

    Greedy output is what the full model generates (in float32; in half precision, two likeliest tokens that are within
    rounding of each other may swap, as between any two batch shapes). With `do_sample=True` it is drawn from the full
    model's distribution.

    Args:
        model: The model that `draft` is a view of.
        *args: For `model.generate`; one sequence, because transformers verifies one at a time.
        draft: From `draft_view`.
        counter: What drafting achieved is added here.
        **kwargs: For `model.generate`.

    Returns:
        What `model.generate` returns.

    Raises:
        ValueError: The input holds several sequences, or the cache cannot be cropped.
    """
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    drafted = draft.drafted
    handle = _transformers_model(model).register_forward_pre_hook(count)
    try:
        with full_depth(model):
            out = cast(Any, model).generate(*args, assistant_model=draft, **kwargs)
    finally:
        handle.remove()
    if counter is not None:
        given = next(x for x in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs")) if x is not None)
        sequences = out if isinstance(out, torch.Tensor) else out.sequences
        counter.new_tokens += sequences.shape[1] - given.shape[1]
        counter.target_passes += passes
        counter.drafted += draft.drafted - drafted
    return out


def _transformers_model(model: Any) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


@functools.cache
def _drafting(base: Any) -> Any:
    """The subclass of a model's class that drafts."""
    return type(base)(base.__name__, (_Draft, base), {"__module__": base.__module__, "__qualname__": base.__qualname__})
