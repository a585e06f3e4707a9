"""How much the loss feels an error in a token's update: gradients of the model's own predictions.

An error `e` in the stream after a routed part changes the prediction by a divergence of about `1/2 e^T F e` nats, with
`F` the Fisher information of the predictions of this and all later tokens. With `g` the gradient of the log-likelihood
of targets that are drawn from the model itself, `F = E[g g^T]` (Martens, "New Insights and Perspectives on the Natural
Gradient Method", arXiv:1412.1193, section 5). One `F` stands for all tokens of a layer: a token's own, from one draw,
is mostly noise, and a gate that is regressed on it learns the noise.

Shapes: B batch, T positions, N real tokens, d model width, V vocabulary.
"""

from __future__ import annotations

import torch

from ..base.readout import ReadOut
from ..data.batches import device_of
from .layer_walk import LayerWalk

_ISOTROPIC = 0.1  # share of the metric that is the same in all directions: of few tokens, many are not seen


def sensitivities(walk: LayerWalk, read_out: ReadOut, seed: int) -> dict[int, torch.Tensor]:
    """For every routed layer `R`, float32 `[d, d]` on the CPU, such that an error `e` costs about `|e R|^2` nats.

    A forward pass and a backward pass, recomputed layer by layer: no more than one layer's graph exists at a time.

    Args:
        walk: The text; some thousand tokens.
        read_out: From the last layer's output to logits.
        seed: Seed of the targets that are drawn.
    """
    gradients: dict[int, list[torch.Tensor]] = {}
    for batch, h in enumerate(walk.first()):
        inputs, real = [], walk.real[batch]
        with torch.no_grad():
            for index in range(len(walk.layers)):
                inputs.append(h)
                h = _full(walk, index, batch, h)
        gradient = _gradient_of_own_predictions(h, real.to(h.device), read_out, seed + batch)
        for index in reversed(range(len(walk.layers))):
            gradient, at_update = _backward(walk, index, batch, inputs.pop(), gradient)
            if at_update is not None:
                gradients.setdefault(index, []).append(at_update[real.to(at_update.device)].float().cpu())
    return {index: _root(torch.cat(parts)) for index, parts in sorted(gradients.items())}


def _root(g_Nd: torch.Tensor) -> torch.Tensor:
    """A root `[d, d]` of half the mean of `g g^T`; the longest hundredth of the `g` is shortened to the rest."""
    lengths = g_Nd.norm(dim=1)
    longest = lengths.kthvalue(max(1, int(0.99 * len(lengths)))).values
    g = g_Nd * (longest / lengths.clamp(min=1e-30)).clamp(max=1)[:, None]
    metric_dd = (g.T @ g).double() / (2 * len(g))
    mean = metric_dd.diagonal().mean().clamp(min=1e-30)
    isotropic_dd = mean * torch.eye(len(metric_dd)).to(metric_dd)
    return torch.linalg.cholesky(torch.lerp(metric_dd, isotropic_dd, _ISOTROPIC)).to(g_Nd)


def _full(walk: LayerWalk, index: int, batch: int, h: torch.Tensor) -> torch.Tensor:
    holder = walk.holder(index)
    plan = None if holder is None else holder.plan(False)
    if plan is None:
        return walk.run(index, batch, h)
    call = walk.call(index, batch, h, plan)
    return call.finish(call.full())


def _backward(
    walk: LayerWalk, index: int, batch: int, h: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradient `[B, T, d]` at the layer's input and, where the layer is routed, after its routed part."""
    holder = walk.holder(index)
    plan = None if holder is None else holder.plan(False)
    with torch.enable_grad():
        h = h.detach().requires_grad_(True)
        if plan is None:
            out = walk.run(index, batch, h)
            return torch.autograd.grad(out, h, gradient.to(out))[0], None
        call = walk.call(index, batch, h, plan)
        after = call.full()
        below, at_update = torch.autograd.grad(call.finish(after), (h, after), gradient.to(after))
    return below, at_update


def _gradient_of_own_predictions(
    stream: torch.Tensor, real: torch.Tensor, read_out: ReadOut, seed: int
) -> torch.Tensor:
    """The gradient `[B, T, d]` of the summed log-likelihood of one target per real token, drawn from the model."""
    rows, generator = stream[real], torch.Generator(device_of(read_out.head)).manual_seed(seed)
    parts = []
    for (chunk,) in read_out.chunks(rows):
        with torch.enable_grad():
            x = chunk.detach().requires_grad_(True)
            log_probs = read_out(x).float().log_softmax(-1)
            drawn = torch.multinomial(log_probs.detach().exp(), 1, generator=generator)
            parts.append(torch.autograd.grad(log_probs.gather(-1, drawn).sum(), x)[0])
    gradient = torch.zeros_like(stream)
    gradient[real] = torch.cat(parts).to(gradient.dtype)
    return gradient
