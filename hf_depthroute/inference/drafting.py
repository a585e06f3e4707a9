"""Lossless self-speculation: the routed model drafts, the full model verifies, one set of weights.

The draft is a view of the model: its modules are copies with their own flags, its tensors are the
model's. transformers drafts and verifies (`generate(..., assistant_model=...)`): greedy output is
the full model's, token for token up to the rounding of one forward pass over several tokens, and
sampling keeps the full model's distribution.

Shapes: B = 1 sequence, T positions, n drafted tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from transformers import Cache, DynamicCache, GenerationConfig, LogitsProcessorList
from transformers.generation import GenerateDecoderOnlyOutput

from ..base.contexts import of_this_thread
from ..base.stack import stack_of, unwrapped
from ..config.adapter import ConfigError, DepthRouteConfig, renumber
from ..parts.gates import GATES
from ..routing.routing import ROUTING, Routing
from ..routing.stack import RoutedStack, routed_layers
from ..routing.thresholds import BudgetController
from ..routing.trace import full_depth
from .calibration import set_budget

# What transformers hands to a draft whose tokens `_Draft.generate` can make without its general
# loop.
_PLAIN_KEYS = {
    *("input_ids", "min_new_tokens", "max_new_tokens", "generation_config", "logits_processor"),
    *("attention_mask", "position_ids", "past_key_values", "logits_to_keep", "use_cache"),
}


@dataclass
class DraftCounter:
    """Counts of drafted and accepted tokens, summed over generations.

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
        """Accepted share of the drafted tokens; every pass adds one of the full model's own."""
        return (self.new_tokens - self.target_passes) / max(1, self.drafted)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens generated per forward pass of the full model; 1 without a draft."""
        return self.new_tokens / max(1, self.target_passes)


class _Draft:
    """Mixin of a draft view: assisted generation without the overhead of `generate`.

    Attributes:
        confidence: A draft ends after a token whose probability is lower.
        drafted: Tokens drafted so far.
        verified_at_full_depth: For `generate` of a `PeftModel` with a routed adapter.
    """

    verified_at_full_depth = True
    confidence = 0.0
    drafted = 0
    _target: Any

    def generate(self, *args: object, **kwargs: Any) -> Any:
        config: Any = kwargs.get("generation_config")
        if not getattr(config, "is_assistant", None):
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        if kwargs.get("past_key_values") is None:
            target = self._target()
            if target is not None and any(routing.adapter() for routing in routed_layers(target)):
                warnings.warn(
                    "the model that verifies is routed itself, so the output is not the full "
                    "model's; use lossless_generate(), or generate() of the PeftModel",
                    stacklevel=2,
                )
        plain = not args and kwargs.keys() <= _PLAIN_KEYS and not kwargs.get("min_new_tokens")
        mask = kwargs.get("attention_mask")
        if plain and (mask is None or bool(mask.all())):
            out = self._continue(
                kwargs["input_ids"],
                kwargs["max_new_tokens"],
                config,
                kwargs["logits_processor"],
                kwargs.get("past_key_values"),
            )
        else:
            config.assistant_confidence_threshold = self.confidence
            out = super().generate(*args, **kwargs)  # type: ignore[misc]
        self.drafted += out.sequences.shape[1] - kwargs["input_ids"].shape[1]
        return out

    @torch.no_grad()
    def _continue(
        self,
        ids: torch.Tensor,
        count: int,
        config: GenerationConfig,
        processors: LogitsProcessorList,
        cache: Cache | None,
    ) -> GenerateDecoderOnlyOutput:
        """Up to `count` tokens after `ids` `[1, T]`, and the scores `[1, V]` of each."""
        if cache is None:
            # Also of sliding windows it keeps everything, so that it can be cropped.
            cache = DynamicCache()
        ends = config.eos_token_id
        if not isinstance(ends, list | tuple):
            ends = [ends]
        last_only = {"logits_to_keep": 1} if self._supports_logits_to_keep() else {}  # type: ignore[attr-defined]
        scores: list[torch.Tensor] = []
        new = ids[:, cache.get_seq_length() :]
        while len(scores) < count:
            logits = self(input_ids=new, past_key_values=cache, use_cache=True, **last_only).logits  # type: ignore[operator]
            score = logits[:, -1].float()
            for process in processors:
                score = process(ids, score)
            if config.do_sample:
                new = torch.multinomial(score.softmax(-1), 1)
            else:
                new = score.argmax(-1, keepdim=True)
            scores.append(score)
            ids = torch.cat([ids, new], dim=1)
            if int(new) in ends:
                break
            if self.confidence and float(score.softmax(-1)[0, int(new)]) < self.confidence:
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
        model.generate(**inputs, assistant_model=draft)
        # or lossless_generate(model, **inputs, draft=draft)

    Routing is on in the view, whatever the model's state. Training or calibrating the model moves
    the view along; `set_budget` on one of them leaves the other as it is. Moving the model to
    another device or dtype needs a new view.

    Args:
        model: A transformers model of a supported family, or a `PeftModel` around one. It is not
            changed.
        budget: The draft's budget in (0, 1], with thresholds from the adapter's quantile tables.
            Default: the adapter's at this moment.
        drop: Indices of decoder layers that the draft leaves out whole, attention and KV cache
            included. The layers that remain are numbered anew.
        num_tokens: Tokens drafted before the full model looks.
        confidence: End a draft early, after a token that the draft gave a lower probability than
            this.

    Returns:
        A transformers model of the same class name, in eval mode.

    Raises:
        ValueError: Nothing would be skipped (no routed layer is active and `drop` is empty), an
            index is out of range or named twice, every layer is dropped, the adapter has no budget
            to change, or a number is out of range.
        ConfigError: `budget` is not in (0, 1], or the adapter routes prompts only or adds a memory.
    """
    base = unwrapped(model)
    depth = len(stack_of(base).layers)
    drop = sorted(int(index) for index in drop)
    known = set(drop) < set(range(depth)) and len(set(drop)) == len(drop)
    if drop and not known:
        raise ValueError(
            f"drop={drop}: name some of the layers 0 to {depth - 1}, each once, and not all of them"
        )
    if num_tokens < 1 or not 0 <= confidence < 1:
        raise ValueError(
            f"num_tokens={num_tokens} must be at least 1 and confidence={confidence} in [0, 1)"
        )

    draft = _view_of(base)
    draft.__class__ = _drafting(base.__class__)
    draft.eval()
    routings = routed_layers(draft)
    for routing in routings:
        routing._disable_adapters = False
    configs = [routing.active_config() for routing in routings if routing.adapter()]
    if not drop and not configs:
        raise ValueError(
            "the draft would skip nothing: no depth-routed adapter is active and drop is empty"
        )
    if any(GATES[config.gate].soft for config in configs):
        raise ConfigError(
            "target='memory' skips nothing of the base, so that a draft by it would save nothing"
        )
    if any(config.phases == "prefill" for config in configs):
        raise ConfigError(
            "phases='prefill' would draft every token in full; call set_phases(model, 'all') first"
        )
    if budget is not None and configs:
        set_budget(draft, budget)
    if drop:
        _leave_out(draft, drop)
    draft.confidence = confidence
    draft._target = weakref.ref(base)
    draft.generation_config.num_assistant_tokens = num_tokens
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    # Ours is `confidence`, which stays as it is set.
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft


def _view_of(base: nn.Module) -> Any:
    """A copy of `base` with modules, flags and configurations of its own, and the same tensors."""
    # What the copy keeps: every tensor, and where accelerate offloads them to.
    memo: dict[int, object] = {}
    for module in base.modules():
        if isinstance(module, BudgetController):
            continue  # `set_budget` writes its threshold: each view has its own
        kept: list[object] = [*module._parameters.values(), *module._buffers.values()]
        hook = module.__dict__.get("_hf_hook")
        for part in getattr(hook, "hooks", [hook]):
            values = getattr(part, "__dict__", {}).values()
            kept += [value for value in values if isinstance(value, Mapping)]
        memo.update({id(value): value for value in kept if value is not None})
    return copy.deepcopy(base, memo)


def _leave_out(model: nn.Module, drop: Sequence[int]) -> None:
    """Take layers out of a view, and number the others, their caches and adapters anew."""
    stack = stack_of(model)
    family = stack.family
    layers = stack.layers
    decoder = cast(Any, stack.decoder)
    kept = [index for index in range(len(layers)) if index not in drop]
    setattr(decoder, family.layers, nn.ModuleList(layers[index] for index in kept))
    config = decoder.config
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[index] for index in kept]

    adapters: dict[int, DepthRouteConfig] = {}
    routed: list[Routing] = []
    for place, layer in enumerate(stack.layers):
        getattr(layer, family.attention).layer_idx = place
        routing = cast("Routing | None", layer._modules.get(ROUTING))
        if routing is None:
            continue
        routed.append(routing)
        routing.layer_index = place
        configs = routing.peft_configs.values()
        adapters |= {id(c): c for c in configs if isinstance(c, DepthRouteConfig)}
    if isinstance(stack, RoutedStack):
        replace(stack, routed=tuple(routed)).keep()
    for adapter in adapters.values():
        renumber(adapter, {index: place for place, index in enumerate(kept)})


def lossless_generate(
    model: nn.Module, *args: Any, draft: Any, counter: DraftCounter | None = None, **kwargs: Any
) -> Any:
    """`model.generate` at full depth, faster: `draft` proposes tokens,
    the full model verifies them.

    Greedy output is what the full model generates (in float32; in half precision, two likeliest
    tokens that are within rounding of each other may swap, as between any two batch shapes). With
    `do_sample=True` it is drawn from the full model's distribution.

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

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    drafted = draft.drafted
    with full_depth(model), unwrapped(model).register_forward_pre_hook(of_this_thread(count)):
        out = cast(Any, model).generate(*args, assistant_model=draft, **kwargs)
    if counter is not None:
        inputs = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs"))
        given = next(x for x in inputs if x is not None)
        sequences = out
        if not isinstance(out, torch.Tensor):
            sequences = out.sequences
        counter.new_tokens += sequences.shape[1] - given.shape[1]
        counter.target_passes += passes
        counter.drafted += draft.drafted - drafted
    return out


@functools.cache
def _drafting(base: nn.Module) -> Any:
    """The subclass of a model's class that drafts."""
    return type(base)(
        base.__name__,
        (_Draft, base),
        {"__module__": base.__module__, "__qualname__": base.__qualname__},
    )
