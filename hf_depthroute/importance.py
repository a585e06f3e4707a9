"""How much each sublayer changes the residual stream, and how much each expert is used: what static dropping goes by.

Shapes: B batch, T positions, d model width, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .batches import model_inputs
from .families import find_decoder, find_family
from .holder import Routing
from .sublayers import behind
from .trace import overridden

Batch = Mapping[str, torch.Tensor]

IMPORTANCE_TARGETS = ("attention", "ffn", "block")


@torch.no_grad()
def layer_importance(model: nn.Module, batches: Iterable[Batch], target: str) -> dict[int, float]:
    """`1 - cos(stream before, stream after)`, mean over real tokens, of every decoder layer's attention, FFN or both.

    With `a` the stream after the attention's update: `"attention"` compares `h` with `a`, `"ffn"` `a` with `out`,
    `"block"` `h` with `out`, whatever the layout. A routed model is measured as its base.

    Args:
        model: A transformers model of a supported family, or a `PeftModel` around one.
        batches: Dicts with `input_ids` and optionally `attention_mask`, each `[B, T]`.
        target: `"attention"`, `"ffn"` or `"block"`.

    Returns:
        `{layer_index: importance}` of all decoder layers; 0 for a layer that changes nothing, at most 2.

    Raises:
        ValueError: `target` is none of the three, or `batches` holds no real token.
        UnsupportedModelError: The model's family is not supported.
    """
    if target not in IMPORTANCE_TARGETS:
        raise ValueError(f"target={target!r} must be one of: {', '.join(IMPORTANCE_TARGETS)}")
    family = find_family(model)
    layers: Any = getattr(find_decoder(model, family), family.layers)
    owners = {getattr(layer, family.attention): layer for layer in layers}
    streams: dict[str, torch.Tensor] = {}  # of the layer that runs: h, a, out, each [B, T, d]
    distances: dict[int, torch.Tensor] = {}
    real = torch.empty(0)

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        streams["h"] = args[0] if args else kwargs["hidden_states"]

    def attend(attention: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        streams["a"] = streams["h"] + behind(owners[attention], family, "attention", output[0])

    def leave(index: int) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            streams["out"] = output[0] if isinstance(output, tuple) else output
            before = streams["a" if target == "ffn" else "h"]
            after = streams["a" if target == "attention" else "out"]
            distance_BT = 1 - F.cosine_similarity(before.double(), after.double(), dim=-1)
            distances[index] = distances.get(index, 0) + distance_BT[real.to(distance_BT.device)].sum().cpu()

        return hook

    count = 0
    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            for handle in (
                layer.register_forward_pre_hook(enter, with_kwargs=True),
                getattr(layer, family.attention).register_forward_hook(attend),
                layer.register_forward_hook(leave(index)),
            ):
                hooks.callback(handle.remove)
        for batch in _dense_forwards(model, batches):
            real = real_tokens(batch)
            count += int(real.sum())
            model(**batch, use_cache=False)
    if not count:
        raise ValueError("layer_importance: batches holds no real token")
    return {index: float(total) / count for index, total in sorted(distances.items())}


@torch.no_grad()
def expert_importance(model: nn.Module, batches: Iterable[Batch]) -> dict[int, torch.Tensor]:
    """The routing weight that each expert of a mixture-of-experts base gets, mean over real tokens.

    A token gives its weight to the K experts that it is assigned to, and nothing to the others; the size of their
    outputs is not looked at, because that would take a second run of every expert. A routed model is measured as its
    base.

    Args:
        model: A transformers model of a supported family with MoE layers, or a `PeftModel` around one.
        batches: Dicts with `input_ids` and optionally `attention_mask`, each `[B, T]`.

    Returns:
        `{layer_index: importance [E]}` of the MoE layers, float64 on the CPU. A layer's sum is the mean total weight
        of a token: 1 where the family normalises it.

    Raises:
        ValueError: The model has no MoE layer, or `batches` holds no real token.
        UnsupportedModelError: The model's family is not supported.
    """
    family = find_family(model)
    layers: Any = getattr(find_decoder(model, family), family.layers)
    routers = {i: layer for i, layer in enumerate(layers) if hasattr(getattr(layer, family.ffn), "experts")}
    if not routers:
        raise ValueError(f"{type(model).__name__} has no mixture-of-experts layer")
    totals: dict[int, torch.Tensor] = {}
    real = torch.empty(0)

    def gather(index: int) -> Any:
        def hook(router: nn.Module, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
            logits_NE, weights_NK, experts_NK = output
            given_NE = torch.zeros(logits_NE.shape, dtype=torch.float64, device=logits_NE.device)
            given_NE.scatter_(1, experts_NK, weights_NK.double())
            given_E = given_NE[real.reshape(-1).to(given_NE.device)].sum(0).cpu()
            totals[index] = totals.get(index, 0) + given_E

        return hook

    count = 0
    with ExitStack() as hooks:
        for index, layer in routers.items():
            hooks.callback(getattr(layer, family.ffn).gate.register_forward_hook(gather(index)).remove)
        for batch in _dense_forwards(model, batches):
            real = real_tokens(batch)
            count += int(real.sum())
            model(**batch, use_cache=False)
    if not count:
        raise ValueError("expert_importance: batches holds no real token")
    return {index: total / count for index, total in sorted(totals.items())}


def least_important(importance: Mapping[int, float], count: int) -> list[int]:
    """The `count` layers with the lowest importance, in ascending layer order; ties go to the earlier layer.

    Raises:
        ValueError: There are fewer layers, or `count` is negative.
    """
    if not 0 <= count <= len(importance):
        raise ValueError(f"count={count} must be from 0 to {len(importance)}, the number of layers")
    ranked = sorted(importance, key=lambda index: (importance[index], index))
    return sorted(ranked[:count])


def real_tokens(batch: Batch) -> torch.Tensor:
    """Bool `[B, T]`: where `attention_mask` is set; everywhere without one."""
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask is None else mask.bool()


def _dense_forwards(model: nn.Module, batches: Iterable[Batch]) -> Iterator[dict[str, torch.Tensor]]:
    """The inputs of each batch; in between, the model is in eval mode and runs as its base."""
    with evaluating(model), _as_base(model):
        yield from model_inputs(model, batches)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside the block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def _as_base(model: nn.Module) -> Iterator[None]:
    if not any(isinstance(module, Routing) for module in model.modules()):
        yield
        return
    with overridden(model, "_disable_adapters", True):
        yield
