"""How much a change of the stream behind a layer costs:
the Fisher information of text that was not changed.

With `y` drawn from the model's own distribution `p` of some tokens, and `g_t` the gradient of
`log p(y)` with respect to the stream of token `t` behind a layer, a small change `delta` of that
stream costs

    KL(p || p') = 1/2 E_y (sum_t g_t . delta_t)^2

to second order (Martens, "New insights and perspectives on the natural gradient method",
arXiv:1412.1193). So one backward pass prices every change in every layer, of every token, by what
it does to the tokens that count.

Shapes: B batch, T positions, d model width, V vocabulary, D draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..base.contexts import hooked, of_this_thread
from ..base.distributed import each_of_all, own_rows, raised_by_all, total
from ..base.lm_head import logits_at
from ..base.stack import stack_of
from ..base.sublayers import Kwargs, hidden_of, stream_given
from ..data.batches import token_mask
from ..inference.non_finite import NonFiniteError
from ..routing.trace import full_depth
from .layer_walk import check_finite
from .text import Batches

PRICED = 8192  # held-out tokens whose gradients are kept, at most


def stream_gradients(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    counted_BT: torch.Tensor,
    seeds: list[int],
    draws: int = 1,
) -> list[torch.Tensor]:
    """`g`, float32 `[D, B, T, d]` of every decoder layer, on the CPU; the model runs at full depth.

    In each of `draws`, the tokens behind the positions in `counted_BT`, bool, are drawn, with the
    `seeds` of the rows, for a backward pass of their own.

    Raises:
        NonFiniteError: The stream of a real token is not finite, or the logits are NaN.
    """
    streams: list[torch.Tensor] = []

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> tuple[object, object]:
        h = stream_given(args, kwargs).detach().requires_grad_()
        if args:
            return (h, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": h}

    def leave(layer: nn.Module, args: tuple[object, ...], output: object) -> None:
        streams.append(hidden_of(output))

    layers = list(stack_of(model).layers)
    handles = [layers[0].register_forward_pre_hook(of_this_thread(enter), with_kwargs=True)]
    handles += [layer.register_forward_hook(of_this_thread(leave)) for layer in layers]
    with hooked(handles), full_depth(model), torch.enable_grad():
        log_probs = logits_at(model, batch, counted_BT).float().log_softmax(-1)
        real_BT = token_mask(batch)
        for index, h in enumerate(streams):
            check_finite(index, [h], [real_BT])
        if log_probs.isnan().any():
            raise NonFiniteError(
                "the base's logits are NaN while the stream behind every layer is finite; load it "
                "in float32, or check the weights of its final norm and its LM head"
            )
        gradients: list[list[torch.Tensor]] = []
        for number, drawn in enumerate(_drawn(log_probs.detach(), counted_BT, seeds, draws)):
            likelihood = log_probs.gather(-1, drawn[:, None]).sum()
            again = number + 1 < draws
            found = torch.autograd.grad(likelihood, streams, allow_unused=True, retain_graph=again)
            gradients.append(
                [
                    (torch.zeros_like(h) if g is None else g).float().cpu()
                    for g, h in zip(found, streams)
                ]
            )
    return [torch.stack(of_layer) for of_layer in zip(*gradients, strict=True)]


def text_gradients(
    model: nn.Module, batches: Batches, counted: list[torch.Tensor], seed: int, draws: int
) -> list[list[torch.Tensor]]:
    """`stream_gradients` of each batch, bfloat16; rows' seeds count over all processes.

    `counted` are the positions that count; with several processes, batches hold this one's rows.
    """
    number = seed * 1_000_003 + own_rows(sum(len(batch["input_ids"]) for batch in batches))[0].start
    found = []
    with raised_by_all(NonFiniteError):
        for batch, counted_BT in zip(batches, counted, strict=True):
            rows = []
            for row in range(len(counted_BT)):  # one at a time: logits are large
                one = {name: value[row : row + 1] for name, value in batch.items()}
                gradients = stream_gradients(model, one, counted_BT[row : row + 1], [number], draws)
                rows.append([g.bfloat16() for g in gradients])
                number += 1
            found.append([torch.cat(of_layer, dim=1) for of_layer in zip(*rows, strict=True)])
    return found


def stream_metrics(
    gradients: list[list[torch.Tensor]], real: list[torch.Tensor], width: int
) -> list[torch.Tensor]:
    """`L` of every layer, float32 `[d, d]` on the CPU; a change costs `|delta L|^2` nats.

    `L L^T` is half the mean of `g g^T` over the tokens, each by what it does to all tokens behind
    it. It knows the direction of a change, and neither the token that is changed nor what other
    tokens do. The fewer tokens there are for the width, the more it is drawn towards the same cost
    in all directions. `gradients` are `text_gradients`, `real`, bool `[B, T]`, the real tokens.
    """
    tokens = sum(each_of_all(sum(int(mask.sum()) for mask in real)))
    depth = max(each_of_all(max((len(of_batch) for of_batch in gradients), default=0)))
    metrics = []
    for index in range(depth):
        metric = torch.zeros(width, width, dtype=torch.float64)
        for of_batch, mask in zip(gradients, real, strict=True):
            g_Nd = of_batch[index][:, mask.cpu()].float().flatten(0, 1)
            metric += (g_Nd.T @ g_Nd) / len(of_batch[index])
        metrics.append(_root(total(metric) / 2 / tokens, tokens))
    return metrics


def squared_slopes(
    gradients_DBTd: torch.Tensor, change_BTd: torch.Tensor, changed_BT: torch.Tensor
) -> torch.Tensor:
    """The squares of a change's effects on the likelihood: of a row's tokens together, and of each.

    The first is right on average, and noisy: some samples for each row. The second misses what
    errors do together, and takes its scale from all of them.
    """
    change_BTd = change_BTd.float()
    slopes_DBT = (gradients_DBTd.to(change_BTd.device).float() * change_BTd).sum(-1).double()
    slopes_DBT = slopes_DBT.masked_fill(~changed_BT, 0.0)
    return slopes_DBT.sum(2).square().sum() + slopes_DBT.square().sum()


def _root(metric_dd: torch.Tensor, tokens: int) -> torch.Tensor:
    own = tokens / (tokens + len(metric_dd))
    even = torch.eye(len(metric_dd), dtype=metric_dd.dtype) * metric_dd.diagonal().mean()
    values, vectors = torch.linalg.eigh(own * metric_dd + (1 - own) * even)
    return (vectors * values.clamp(min=0).sqrt()).float()


def _drawn(
    log_probs_NV: torch.Tensor, counted_BT: torch.Tensor, seeds: list[int], draws: int
) -> Iterator[torch.Tensor]:
    """A token from each distribution, `[N]`, for each draw, by its row's own seed."""
    counts = counted_BT.sum(1).tolist()  # not the places: padding may lie before them
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    sums_NV = log_probs_NV.exp().cumsum(-1)
    for _ in range(draws):
        uniform = [
            torch.rand(n, generator=generator)
            for n, generator in zip(counts, generators, strict=True)
        ]
        uniform_N1 = torch.cat(uniform).to(log_probs_NV.device)[:, None]
        tokens_N1 = torch.searchsorted(sums_NV, uniform_N1 * sums_NV[:, -1:])
        yield tokens_N1.squeeze(1).clamp(max=log_probs_NV.shape[1] - 1)
