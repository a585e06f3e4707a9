"""Gradients of the row ops: autograd through the operation computed for every row,
in PyTorch that a compiler traces.

Skipped rows are zeros there. The row ops serve inference, where gradients are the exception, and
training runs both paths for every token anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def keep(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
    """Keep the inputs of an operator, of which the first ones may be tensors."""
    tensors = [part if isinstance(part, Tensor) else None for part in inputs]
    ctx.save_for_backward(*tensors)
    ctx.others = [None if isinstance(part, Tensor) else part for part in inputs]


def through(dense: Callable[..., Tensor]) -> Callable[..., tuple[Tensor | None, ...]]:
    """The backward pass of an operator whose inputs `keep` kept, from the same on all rows."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [number for number, needs in enumerate(ctx.needs_input_grad) if needs]
        inputs = [
            other if kept is None else kept.detach()
            for kept, other in zip(ctx.saved_tensors, ctx.others)
        ]
        with torch.enable_grad():
            for number in wanted:
                inputs[number].requires_grad_()
            out = dense(*inputs)
            found = torch.autograd.grad(out, [inputs[number] for number in wanted], grad)
        gradients = dict(zip(wanted, found))
        return tuple(gradients.get(number) for number in range(len(inputs)))

    return backward


def linear(x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`plain.linear`, for every row."""
    return _chosen(F.linear(_chosen(x, mask), weight, bias), mask)


def swiglu(
    stream: Tensor,
    x: Tensor,
    mask: Tensor,
    scale: Tensor | None,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
) -> Tensor:
    """`plain.swiglu`, for every row."""
    x = _chosen(x, mask)
    update = F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)
    if scale is not None:
        update = update * _chosen(scale[:, None], mask).to(update.dtype)
    return stream + update


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    allowed: Tensor | None,
    past: int,
    scaling: float,
) -> Tensor:
    """`plain.attend`, for every query, in float32."""
    # [B, G, H/G, T, k]
    grouped = _chosen(q.float(), mask).unflatten(2, (keys.shape[1], -1)).permute(0, 2, 3, 1, 4)
    scores = grouped @ keys[:, :, None].float().transpose(-1, -2) * scaling  # [B, G, H/G, T, S]
    if allowed is None:
        time = torch.arange(q.shape[1], device=q.device)[:, None] + past
        scores = scores.masked_fill(torch.arange(keys.shape[2], device=q.device) > time, -torch.inf)
    elif allowed.dtype == torch.bool:
        scores = scores.masked_fill(~allowed[:, :, None], -torch.inf)
    else:
        scores = scores + allowed[:, :, None].float()
    blind = scores.isneginf().all(-1, keepdim=True)  # a query that may look at nothing gets zeros
    probs = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    out = (probs @ values[:, :, None].float()).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return _chosen(out, mask).to(q.dtype)


def _chosen(x: Tensor, mask: Tensor) -> Tensor:
    """`x` with zeros in the rows that `mask`, its first dimensions, skips, whatever they hold."""
    return x.masked_fill(~mask.view(*mask.shape, *[1] * (x.ndim - mask.ndim)), 0)
