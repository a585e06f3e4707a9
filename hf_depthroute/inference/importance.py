"""How much each sublayer changes the residual stream, and how much each expert is used:
what static dropping goes by.

Shapes: B batch, T positions, d model width, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..base.contexts import evaluating, hooked, of_this_thread
from ..base.stack import stack_of
from ..base.sublayers import Kwargs, behind, hidden_of, stream_given
from ..data.batches import model_inputs, token_mask
from ..routing.trace import full_depth

Batch = Mapping[str, torch.Tensor]

# Streams to compare.
IMPORTANCE_TARGETS = {"attention": ("h", "a"), "ffn": ("a", "out"), "block": ("h", "out")}


@torch.no_grad()
def layer_importance(model: nn.Module, batches: Iterable[Batch], target: str) -> dict[int, float]:
    """`1 - cos(stream before, stream after)`, mean over real tokens,
    of every decoder layer's attention, FFN or both.

    With `a` the stream after the attention's update: `"attention"` compares `h` with `a`, `"ffn"`
    `a` with `out`, `"block"` `h` with `out`, whatever the layout. A routed model is measured as its
    base.

    Args:
        model: A transformers model of a supported family, or a `PeftModel` around one.
        batches: Dicts with `input_ids` and optionally `attention_mask` and `position_ids`, each
            `[B, T]`.
        target: `"attention"`, `"ffn"` or `"block"`.

    Returns:
        `{layer_index: importance}` of all decoder layers; 0 for a layer that changes nothing, at
        most 2.

    Raises:
        ValueError: `target` is none of the three, or `batches` holds no real token.
        UnsupportedModelError: The model's family is not supported.
    """
    if target not in IMPORTANCE_TARGETS:
        raise ValueError(f"target={target!r} must be one of: {', '.join(IMPORTANCE_TARGETS)}")
    stack = stack_of(model)
    family = stack.family
    layers = {layer: index for index, layer in enumerate(stack.layers)}
    owners = {getattr(layer, family.attention): layer for layer in layers}
    streams: dict[str, torch.Tensor] = {}  # of the layer that runs: h, a, out, each [B, T, d]
    totals = _Totals()

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> None:
        streams["h"] = stream_given(args, kwargs)

    def attend(attention: nn.Module, args: tuple[object, ...], output: Any) -> None:
        streams["a"] = streams["h"] + behind(owners[attention], family, "attention", output[0])

    def leave(layer: nn.Module, args: tuple[object, ...], output: Any) -> None:
        streams["out"] = hidden_of(output)
        before, after = (streams[name] for name in IMPORTANCE_TARGETS[target])
        distance_BT = 1 - F.cosine_similarity(before.double(), after.double(), dim=-1)
        totals.add(layers[layer], distance_BT)

    handles = [
        layer.register_forward_pre_hook(of_this_thread(enter), with_kwargs=True) for layer in layers
    ]
    handles += [attention.register_forward_hook(of_this_thread(attend)) for attention in owners]
    handles += [layer.register_forward_hook(of_this_thread(leave)) for layer in layers]
    means = totals.means(model, batches, handles, "layer_importance")
    return {index: float(mean) for index, mean in means.items()}


@torch.no_grad()
def expert_importance(model: nn.Module, batches: Iterable[Batch]) -> dict[int, torch.Tensor]:
    """The routing weight that each expert of a mixture-of-experts base gets, mean over real tokens.

    A token gives its weight to the K experts that it is assigned to, and nothing to the others; the
    size of their outputs is not looked at, because that would take a second run of every expert. A
    routed model is measured as its base.

    Args:
        model: A transformers model of a supported family with MoE layers, or a `PeftModel` around
            one.
        batches: Dicts with `input_ids` and optionally `attention_mask` and `position_ids`, each
            `[B, T]`.

    Returns:
        `{layer_index: importance [E]}` of the MoE layers, float64 on the CPU. A layer's sum is the
        mean total weight of a token: 1 where the family normalises it.

    Raises:
        ValueError: The model has no MoE layer, or `batches` holds no real token.
        UnsupportedModelError: The model's family is not supported.
    """
    stack = stack_of(model)
    blocks = [getattr(layer, stack.family.ffn) for layer in stack.layers]
    routers = {block.gate: index for index, block in enumerate(blocks) if hasattr(block, "experts")}
    if not routers:
        raise ValueError(f"{type(model).__name__} has no mixture-of-experts layer")
    totals = _Totals()

    def gather(
        router: nn.Module, args: tuple[object, ...], output: tuple[torch.Tensor, ...]
    ) -> None:
        logits_NE, weights_NK, experts_NK = output
        given_NE = torch.zeros(logits_NE.shape, dtype=torch.float64, device=logits_NE.device)
        given_NE.scatter_(1, experts_NK, weights_NK.double())
        totals.add(routers[router], given_NE.view(*totals.real.shape, -1))

    handles = [router.register_forward_hook(of_this_thread(gather)) for router in routers]
    return totals.means(model, batches, handles, "expert_importance")


def least_important(importance: Mapping[int, float], count: int) -> list[int]:
    """The `count` layers of lowest importance, ascending; ties go to the earlier layer.

    Raises:
        ValueError: There are fewer layers, or `count` is negative.
    """
    if not 0 <= count <= len(importance):
        raise ValueError(f"count={count} must be from 0 to {len(importance)}, the number of layers")
    ranked = sorted(importance, key=lambda index: (importance[index], index))
    return sorted(ranked[:count])


class _Totals:
    """Per layer, a sum over real tokens, collected by hooks while the base runs."""

    def __init__(self) -> None:
        self.sums: dict[int, torch.Tensor] = {}
        self.real = torch.empty(0)  # bool [B, T], of the batch that runs

    def add(self, index: int, values_BT: torch.Tensor) -> None:
        found = values_BT[self.real.to(values_BT.device)].sum(0).cpu()
        self.sums[index] = self.sums.get(index, 0) + found

    def means(
        self, model: nn.Module, batches: Iterable[Batch], handles: Any, caller: str
    ) -> dict[int, torch.Tensor]:
        count = 0
        with hooked(handles), evaluating(model), full_depth(model):
            for batch in model_inputs(model, batches):
                self.real = token_mask(batch)
                count += int(self.real.sum())
                model(**batch, use_cache=False)
        if not count:
            raise ValueError(f"{caller}: batches holds no real token")
        return {index: total / count for index, total in sorted(self.sums.items())}
