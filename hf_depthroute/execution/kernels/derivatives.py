"""Gradients of the row ops, in PyTorch that a compiler can trace.

They are computed for every row, with zeros in the place of skipped ones: the row ops serve inference, where gradients
are the exception, and training runs both paths for every token anyway.

Legend: as in `plain`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

Gradient = torch.Tensor | None


def keep_linear(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.with_bias = inputs[3] is not None


def linear(ctx: Any, grad: torch.Tensor) -> tuple[Gradient, ...]:
    x, mask, weight = ctx.saved_tensors
    grad = _chosen(grad, mask)
    grad_x = grad @ weight if ctx.needs_input_grad[0] else None
    grad_weight = grad.T @ _chosen(x, mask) if ctx.needs_input_grad[2] else None
    grad_bias = grad.sum(0) if ctx.with_bias and ctx.needs_input_grad[3] else None
    return grad_x, None, grad_weight, grad_bias


def keep_swiglu(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, x, mask, scale, *weights = inputs
    ctx.save_for_backward(x, mask, scale, *weights)


def swiglu(ctx: Any, grad: torch.Tensor) -> tuple[Gradient, ...]:
    x, mask, scale, w_gate, w_up, w_down = ctx.saved_tensors
    needs = ctx.needs_input_grad
    x, grad_full = _chosen(x, mask), _chosen(grad, mask)
    gate, up = F.linear(x, w_gate), F.linear(x, w_up)  # [N, f]
    sigmoid = torch.sigmoid(gate)
    hidden = gate * sigmoid * up
    grad_scale = None
    if scale is not None:
        if needs[3]:
            grad_scale = (grad_full * F.linear(hidden, w_down)).sum(-1).to(scale.dtype)
        grad_full = grad_full * scale.masked_fill(~mask, 0)[:, None].to(grad.dtype)
    grad_hidden = grad_full @ w_down  # [N, f]
    grad_up = grad_hidden * gate * sigmoid
    grad_gate = grad_hidden * up * sigmoid * (1 + gate * (1 - sigmoid))
    return (
        grad.clone(),  # the output is the stream plus the update
        grad_gate @ w_gate + grad_up @ w_up if needs[1] else None,
        None,
        grad_scale,
        grad_gate.T @ x if needs[4] else None,
        grad_up.T @ x if needs[5] else None,
        grad_full.T @ hidden if needs[6] else None,
    )


def keep_attend(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.past, ctx.scaling = inputs
    ctx.save_for_backward(*tensors)


def attend(ctx: Any, grad: torch.Tensor) -> tuple[Gradient, ...]:
    q, keys, values, mask, allowed = ctx.saved_tensors
    groups, length = keys.shape[1], keys.shape[2]
    chosen = mask[:, None, None, :, None]  # over [B, G, H/G, T, k]

    def by_group(x: torch.Tensor) -> torch.Tensor:  # [B, T, H, k] -> [B, G, H/G, T, k]
        return x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).float().masked_fill(~chosen, 0)

    q_, grad_ = by_group(q), by_group(grad)
    keys_, values_ = keys[:, :, None].float(), values[:, :, None].float()  # [B, G, 1, S, k]
    scores = q_ @ keys_.transpose(-1, -2) * ctx.scaling  # [B, G, H/G, T, S]
    if allowed is None:
        time = torch.arange(q.shape[1], device=q.device)[:, None] + ctx.past
        scores = scores.masked_fill(torch.arange(length, device=q.device) > time, -torch.inf)
    elif allowed.dtype == torch.bool:
        scores = scores.masked_fill(~allowed[:, :, None], -torch.inf)
    else:
        scores = scores + allowed[:, :, None].float()
    probs = scores.softmax(-1).nan_to_num(0.0)  # a query that may look at nothing gets zeros
    grad_values = probs.transpose(-1, -2) @ grad_
    grad_probs = grad_ @ values_.transpose(-1, -2)
    grad_scores = probs * (grad_probs - (grad_probs * probs).sum(-1, keepdim=True)) * ctx.scaling
    grad_q = (grad_scores @ keys_).permute(0, 3, 1, 2, 4).flatten(2, 3)
    grad_keys = grad_scores.transpose(-1, -2) @ q_
    return (
        grad_q.to(q.dtype),
        grad_keys.sum(2).to(keys.dtype),
        grad_values.sum(2).to(values.dtype),
        None,
        None,
        None,
        None,
    )


def _chosen(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`x` `[N, ...]` with zeros in the skipped rows, whatever stands there."""
    return x.masked_fill(~mask[:, None], 0)
