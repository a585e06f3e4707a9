"""How much the loss feels an error in a token's update: gradients of the model's own predictions.

An error `e` in the stream after a routed part changes the prediction by a divergence of `1/2 e^T F e` nats, with `F`
the Fisher information of the predictions of this and all later tokens. With `g` the gradient of the log-likelihood of
targets that are drawn from the model itself, `F = E[g g^T]` (Martens, "New Insights and Perspectives on the Natural
Gradient Method", arXiv:1412.1193, section 5), so `1/2 (g . e)^2` is an unbiased estimate from one draw.

Shapes: B batch, T positions, N real tokens, d model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..base.readout import ReadOut
from ..data.batches import device_of
from .layer_walk import LayerWalk


@dataclass
class Sensitivity:
    """What was measured for one layer, over the real tokens of all batches, each float32 `[N]`.

    Attributes:
        weights: `|g|^2`: how much a token's update matters. Mean 1, the highest hundredth cut.
        errors: `|e|^2`, what the branch missed.
        effects: `1/2 (g . e)^2`, nats.
    """

    weights: torch.Tensor
    errors: torch.Tensor
    effects: torch.Tensor

    def nats(self, cheap_N: torch.Tensor) -> float:
        """Nats per unit of `weights * errors`, over the tokens that take the cheap path."""
        products = self.weights * self.errors
        return float(self.effects[cheap_N].sum() / products[cheap_N].sum().clamp(min=1e-30))


def sensitivities(walk: LayerWalk, read_out: ReadOut, seed: int) -> dict[int, Sensitivity]:
    """The sensitivity of every routed layer: a forward pass and a backward pass, recomputed layer by layer.

    No more than one layer's graph exists at a time. The branches are those that the layers hold now.

    Args:
        walk: The text.
        read_out: From the last layer's output to logits.
        seed: Seed of the targets that are drawn.
    """
    found: dict[int, list[list[torch.Tensor]]] = {}
    for batch, h in enumerate(walk.first()):
        inputs, real = [], walk.real[batch]
        with torch.no_grad():
            for index in range(len(walk.layers)):
                inputs.append(h)
                h = _full(walk, index, batch, h)
        gradient = _gradient_of_own_predictions(h, real.to(h.device), read_out, seed + batch)
        for index in reversed(range(len(walk.layers))):
            gradient, parts = _backward(walk, index, batch, inputs.pop(), gradient)
            if parts is not None:
                found.setdefault(index, []).append([part[real.to(part.device)] for part in parts])
    return {index: _joined([torch.cat(part) for part in zip(*parts)]) for index, parts in sorted(found.items())}


def _joined(parts: list[torch.Tensor]) -> Sensitivity:
    weights, errors, effects = parts
    weights = weights / weights.mean().clamp(min=1e-30)
    highest = weights.kthvalue(max(1, int(0.99 * len(weights)))).values
    return Sensitivity(weights.clamp(max=highest), errors, effects)


def _full(walk: LayerWalk, index: int, batch: int, h: torch.Tensor) -> torch.Tensor:
    holder = walk.holder(index)
    plan = None if holder is None else holder.plan(False)
    if plan is None:
        return walk.run(index, batch, h)
    call = walk.call(index, batch, h, plan)
    return call.finish(call.full())


def _backward(
    walk: LayerWalk, index: int, batch: int, h: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
    """The gradient at the layer's input, and `|g|^2`, `|e|^2`, `1/2 (g . e)^2` where it is routed, each `[B, T]`."""
    holder = walk.holder(index)
    plan = None if holder is None else holder.plan(False)
    with torch.enable_grad():
        h = h.detach().requires_grad_(True)
        if plan is None:
            out = walk.run(index, batch, h)
            return torch.autograd.grad(out, h, gradient.to(out))[0], None
        call = walk.call(index, batch, h, plan)
        after = call.full()
        out = call.finish(after)
        below, at = torch.autograd.grad(out, (h, after), gradient.to(out))
    with torch.no_grad():
        error, at = (after - call.cheap()).float(), at.float()
        return below, (at.square().sum(-1), error.square().sum(-1), 0.5 * (at * error).sum(-1).square())


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
