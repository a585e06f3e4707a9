"""How much a change of the stream behind a layer costs: the Fisher information of text that was not changed.

With `y` drawn from the model's own distribution `p` of some tokens, and `g_t` the gradient of `log p(y)` with respect
to the stream of token `t` behind a layer, a small change `delta` of that stream costs

    KL(p || p') = 1/2 E_y (sum_t g_t . delta_t)^2

to second order (Martens, "New insights and perspectives on the natural gradient method", arXiv:1412.1193). So one
backward pass prices every change in every layer, of every token, by what it does to the tokens that count.

Shapes: B batch, T positions, d model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..base.contexts import hooked, of_this_thread
from ..base.families import find_layers
from ..base.sublayers import hidden_of
from ..routing.trace import full_depth


def stream_gradients(
    model: nn.Module, batch: dict[str, torch.Tensor], counted_BT: torch.Tensor, seeds: list[int]
) -> list[torch.Tensor]:
    """`g`, float32 `[B, T, d]` of every decoder layer, on the CPU; the model runs at full depth.

    Args:
        model: A causal language model, in eval mode.
        batch: From `model_inputs`.
        counted_BT: Bool: the positions whose next token is drawn and counts.
        seeds: A seed for each row, for the tokens that are drawn.
    """
    streams: list[torch.Tensor] = []

    def enter(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        h = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_()
        return ((h, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": h})

    def leave(layer: Any, args: tuple[Any, ...], output: Any) -> None:
        streams.append(hidden_of(output))

    layers = list(find_layers(model))
    handles = [layers[0].register_forward_pre_hook(of_this_thread(enter), with_kwargs=True)]
    handles += [layer.register_forward_hook(of_this_thread(leave)) for layer in layers]
    with hooked(handles), full_depth(model), torch.enable_grad():
        logits = model(**batch, use_cache=False).logits[counted_BT].float()
        log_probs = logits.log_softmax(-1)
        drawn = _drawn(log_probs.detach(), counted_BT, seeds)
        likelihood = log_probs.gather(-1, drawn[:, None]).sum()
        gradients = torch.autograd.grad(likelihood, streams, allow_unused=True)
    return [torch.zeros_like(h).float().cpu() if g is None else g.float().cpu() for g, h in zip(gradients, streams)]


def _drawn(log_probs_NV: torch.Tensor, counted_BT: torch.Tensor, seeds: list[int]) -> torch.Tensor:
    """A token from each distribution, `[N]`; those of a row depend on its own seed alone."""
    counts = counted_BT.sum(1).tolist()  # not the places: padding may lie before them
    uniform = [
        torch.rand(n, generator=torch.Generator().manual_seed(seed)) for n, seed in zip(counts, seeds, strict=True)
    ]
    uniform_N1 = torch.cat(uniform).to(log_probs_NV.device)[:, None]
    sums_NV = log_probs_NV.exp().cumsum(-1)
    return torch.searchsorted(sums_NV, uniform_N1 * sums_NV[:, -1:]).squeeze(1).clamp(max=log_probs_NV.shape[1] - 1)
