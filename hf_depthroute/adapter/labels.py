"""Where prompts alone are routed, a forward pass that is given labels computes the loss
of what is served.

A prompt and the text behind it then come in one pass: what predicts a label runs in full, as it
does when it is generated. The decoder never sees labels, so a hook of the whole model tells it,
whichever Trainer runs the model.

Shapes: B batch, T positions.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from ..base.contexts import remove_hooks
from ..base.lm_head import has_head, predicting
from ..base.stack import STACK
from ..config.adapter import DepthRouteConfig
from ..data.batches import document_starts
from ..routing.stack import RoutedStack, configs_now, routed_stack
from ..routing.state import RunState
from ..routing.trace import run_in_full
from .call_tokens import by_name, last_tokens_of, seen_by_head, token_mask_of

_DECODER = "_depth_route_decoder"  # the attribute of a hooked model that holds its decoder stack


def hook_labels(model: nn.Module, decoder: nn.Module) -> None:
    """Hook `model`, whose decoder stack is routed; a second call changes nothing."""
    if _begin not in model._forward_pre_hooks.values():
        model.__dict__[_DECODER] = (decoder,)  # in a tuple, so that it is no second child
        model.register_forward_pre_hook(_begin, with_kwargs=True)
        model.register_forward_hook(_end, with_kwargs=True, always_call=True)


def unhook_labels(model: nn.Module) -> None:
    """Undo `hook_labels`."""
    model.__dict__.pop(_DECODER, None)
    remove_hooks(model, _begin, _end)


def has_other_hooks(model: nn.Module) -> bool:
    """Whether there are hooks of a model's forward pass besides those of `hook_labels`."""
    hooks = (*model._forward_pre_hooks.values(), *model._forward_hooks.values())
    return any(hook not in (_begin, _end) for hook in hooks)


def as_served(model: nn.Module, inputs: Any) -> AbstractContextManager[None]:
    """Around a pass on `inputs`: with `phases="prefill"`, `in_full` runs in full.

    Without labels of tokens, as of a classifier, it is the last tokens of every sequence.
    """
    stack = routed_stack(model)
    if stack is None:
        return nullcontext()
    _leave(stack.state)
    labels = None
    if isinstance(inputs, Mapping):
        labels = inputs.get("labels")
    if not isinstance(labels, torch.Tensor):
        return nullcontext()
    if stack.state.settings.in_full is not None:  # a caller has said so
        return nullcontext()
    config = _of_prompts_alone(stack)
    ids = inputs.get("input_ids")
    if ids is None:
        ids = inputs.get("inputs_embeds")
    if config is None or not isinstance(ids, torch.Tensor):
        return nullcontext()
    if labels.shape == ids.shape[:2] and has_head(model):
        return run_in_full(model, in_full(inputs, config.last_in_full))
    given = dict(inputs)
    seen = seen_by_head(stack.decoder, [config], ids, token_mask_of((), given))
    return run_in_full(model, last_tokens_of(ids, seen, given, config.last_in_full))


def in_full(inputs: Mapping[str, Any], tail: int) -> torch.Tensor:
    """The tokens that run in full in training where prompts alone are routed, bool `[B, T]`.

    They are those that predict a label, the last `tail` of the prompt before them, the one that
    predicts the first label included, and what stands behind the last label. A prompt is what has
    no label, as a completion-only collator leaves it; a conversation has several. A row whose every
    token has a label has no prompt: no token of it has to.

    Args:
        inputs: `labels`, as in transformers, and optionally `attention_mask` and `position_ids`,
            each `[B, T]`.
        tail: At least 1.
    """
    labels_BT = inputs["labels"]
    mask = inputs.get("attention_mask")
    starts_BT = document_starts({**inputs, "input_ids": labels_BT})
    if starts_BT is not None:  # what no token predicts: collators leave its label out
        labels_BT = labels_BT.masked_fill(starts_BT, 0)
    behind_BT = F.pad(predicting(labels_BT, mask), (0, 1))
    before_BT = F.pad(behind_BT.cumsum(1), (1, 0))
    length = labels_BT.shape[1]
    ends_T = torch.arange(tail, length + tail, device=labels_BT.device).clamp(max=length)
    soon_BT = before_BT[:, ends_T] > before_BT[:, :-1]
    later_BT = before_BT[:, -1:] > before_BT[:, :-1]
    prompt_BT = (labels_BT == -100) & later_BT
    if mask is not None:
        prompt_BT &= mask.bool().to(labels_BT.device)
    # No token predicts the first one, which may have no label.
    has_prompt_B1 = prompt_BT[:, 1:].any(1, keepdim=True)
    return (soon_BT | ~later_BT) & has_prompt_B1


def _of_prompts_alone(stack: RoutedStack) -> DepthRouteConfig | None:
    """The configuration of an active adapter that routes prompts alone."""
    configs = configs_now(stack.routed)
    return next((config for config in configs if config.phases == "prefill"), None)


class _Entered(threading.local):
    """The contexts of `as_served` that the passes of a thread are in, by their model's settings.

    Passes of one model do not run inside each other. A context that is left when the next one
    begins is of a pass that Ctrl-C ended: PyTorch calls no hook then.
    """

    def __init__(self) -> None:
        self.passes: dict[RunState, AbstractContextManager[None]] = {}


_entered = _Entered()


def _begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _entered.passes or _concerns(model, args, kwargs):
        _enter(model, args, kwargs)


def _end(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if _entered.passes:  # whatever the adapter's phases are by now
        _leave(_stack_in(model).state)


def _concerns(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a pass is given labels and may route prompts alone; a compiler follows it."""
    labels = kwargs.get("labels")
    if labels is None and len(args) > 1:
        labels = by_name(model, args, kwargs).get("labels")
    if labels is None:
        return False
    configs = _stack_in(model).routed[0].peft_configs.values()
    return any(getattr(config, "phases", None) == "prefill" for config in configs)


def _stack_in(model: nn.Module) -> RoutedStack:
    (decoder,) = model.__dict__[_DECODER]
    return cast(RoutedStack, getattr(decoder, STACK))


@torch.compiler.disable
def _enter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    served = as_served(model, by_name(model, args, kwargs))
    served.__enter__()
    _entered.passes[_stack_in(model).state] = served


@torch.compiler.disable
def _leave(state: RunState) -> None:
    served = _entered.passes.pop(state, None)
    if served is not None:
        served.__exit__(None, None, None)
