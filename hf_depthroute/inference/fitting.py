"""Cheap branches by least squares: a start that already imitates the path it stands in for.

Shapes: B batch, T positions, N tokens, d model width, r branch rank (one more with a bias), O
longest n-gram, w width of a memory's slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..base.cache import without_cache
from ..base.contexts import evaluating, of_this_thread
from ..base.distributed import each_of_all, total
from ..base.stack import stack_of
from ..base.sublayers import Kwargs, arguments_given
from ..data.batches import model_inputs, token_mask
from ..execution.context import unpack
from ..execution.layer import routed_call
from ..parts.branches import LowRankBranch
from ..parts.flexidepth import SwiGLUBranch, has_swiglu
from ..parts.memory import NgramMemory
from ..parts.neurons import NeuronBranch, neurons_of
from ..parts.regression import (
    leading_directions,
    moments,
    norms_and_sinks,
    ridge_weights,
    sizes_of,
)
from ..parts.targets import TARGETS
from ..routing.routing import Routing
from ..routing.stack import in_turn
from ..routing.trace import record_routes
from .calibration import active_routings
from .restoring import weights_restored_on_error

# On 4 layers of SmolLM2-135M and 13,000 tokens, held-out text is explained best at these, and
# hardly worse at a fifth or five times as much.
_RIDGE = 0.02
_RIDGE_OF_NEURONS = 0.1
_SHRINK = (1.0, 4.0, 16.0)
# Of the branch's inputs to SiLU, which is nearly linear there: far inputs are not blown up.
_SPREAD = 0.1


@torch.no_grad()
def fit_branch(
    branch: Any,
    x_Nd: torch.Tensor,
    y_Nd: torch.Tensor,
    ridge: float,
    norms_N: torch.Tensor | None = None,
    energy_m: torch.Tensor | None = None,
    metric_dd: torch.Tensor | None = None,
    neurons: NeuronBranch | None = None,
) -> float:
    """Set a branch so that its output comes close to `y`.

    A branch of neurons takes those with the most energy (`NeuronBranch.choose`), and a SwiGLU
    branch copies them; without `neurons` it keeps the input weights that it has. A low-rank
    branch's `up` gets the directions of `x` from which `y` is predicted best by a linear map of the
    branch's rank; it stays as it is where there are fewer than two tokens for each of its inputs.
    What is best is told by `metric`. `down` is then the ridge solution, whatever the metric; of
    neurons, the penalty is on what is added to the FFN's own output.

    Args:
        branch: A `LowRankBranch`, a `SwiGLUBranch` or a `NeuronBranch`.
        x_Nd: The output of its norm, float32.
        y_Nd: The update that it stands in for, float32.
        ridge: Penalty on the weights, as a fraction of the mean squared feature.
        norms_N: How large the stream behind the full path is; the next norm divides by it, and so
            the squared error of a row is divided by its square. None: all rows alike.
        energy_m: `NeuronBranch.energy` of these rows, where it is known.
        metric_dd: `L`, where an error `e` costs `|e L|^2`: a branch is too narrow for all of `y`,
            so it gets what matters. None: all directions alike.
        neurons: The FFN's, as many as a SwiGLU branch is wide (`neurons_to_copy`).

    Returns:
        `sum |y - branch(x)|^2 / sum |y|^2`, both divided so; 0 where there is nothing to imitate.
    """
    scale_N1 = x_Nd.new_ones(len(x_Nd), 1)
    if norms_N is not None:
        scale_N1 = 1 / norms_N[:, None]
    y_Nd = y_Nd * scale_N1
    rank = branch.down.in_features
    count = sum(each_of_all(len(x_Nd)))
    if isinstance(branch, NeuronBranch):
        neurons = branch
    if neurons is not None:
        if energy_m is None:
            energy_m = neurons.energy(x_Nd, scale_N1.squeeze(1).square(), metric_dd)
        neurons.choose(energy_m)
        if isinstance(branch, SwiGLUBranch):
            branch.copy_neurons(neurons)
    elif type(branch) is LowRankBranch and count >= 2 * max(rank, x_Nd.shape[1]):
        gram, cross = moments(x_Nd * scale_N1, y_Nd)
        if metric_dd is not None:
            cross = cross @ metric_dd.to(cross)
        directions = leading_directions(gram, cross, min(rank, len(cross.T)), ridge)
        weight = total(scale_N1.double().square().sum())
        sizes = sizes_of(directions.T, gram, weight)
        branch.up.weight[: len(directions)].copy_(directions / sizes[:, None] * _SPREAD)
        if branch.up.bias is not None:
            branch.up.bias.zero_()
    features = branch.features(x_Nd).float()
    if branch.down.bias is not None:
        features = F.pad(features, (0, 1), value=1.0)
    gram, cross = moments(features * scale_N1, y_Nd)
    start = _start(neurons, gram, cross)
    weights = start + ridge_weights(gram, cross - gram @ start, ridge)
    branch.down.weight.copy_(weights[:rank].T)
    if branch.down.bias is not None:
        branch.down.bias.copy_(weights[rank])
    square = total(y_Nd.double().square().sum())
    missed = square + (weights * (gram @ weights - 2 * cross)).sum()
    if square > 0:
        return float((missed / square).clamp(min=0))
    return 0.0


def ridge_of(of_neurons: bool, tokens: int, width: int) -> float:
    """The penalty of `fit_branch` on `tokens` tokens of `width` features, for other text."""
    least = _RIDGE
    if of_neurons:
        least = _RIDGE_OF_NEURONS
    return max(least, 0.1 * width / tokens)


def neurons_to_copy(routing: Routing, name: str) -> NeuronBranch | None:
    """The FFN's neurons that an adapter's SwiGLU branch in this layer may begin as.

    It may not if it reads or computes other than the FFN: in place of attention alone, without a
    norm before the FFN, with another activation, or wider than the FFN. Then, and of another
    branch, it is None.
    """
    branch = routing.depth_route_branch[name]
    target = routing.config(name).target_of(routing.layer_index)
    if not isinstance(branch, SwiGLUBranch) or not TARGETS[target].skips_ffn:
        return None
    if routing.norm_in_front("ffn") is None or not has_swiglu(routing.ffn):
        return None
    count = branch.down.in_features
    if count > (neurons_of(routing.ffn) or 0):
        return None
    found = routing.make_branch(target, "neurons", count)
    assert isinstance(found, NeuronBranch)
    return found.to(branch.down.weight.device)


def _start(neurons: NeuronBranch | None, gram: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
    """The start of least squares: of neurons the FFN's own output, scaled; otherwise zero."""
    if neurons is None:
        return torch.zeros_like(cross)
    own_rd = neurons.outputs(neurons.neurons)
    own = F.pad(own_rd.to(cross), (0, 0, 0, len(cross) - len(own_rd)))  # of the bias nothing
    agreeing = (own * cross).sum()
    square = (own * (gram @ own)).sum()
    return own * (agreeing / square.clamp(min=1e-30))


@torch.no_grad()
def fit_memory(
    memory: NgramMemory,
    ngrams_NO: torch.Tensor,
    missed_Nd: torch.Tensor,
    chosen_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Set a branch's memory so that its update comes close to what the low-rank part misses.

    A slot gets the mean of what is missing where it is hit, shrunk towards nothing: divided by the
    hits and a constant of `_SHRINK`. One hash after the other takes what the ones before have left,
    from the shortest n-grams on. All share one projection, the `w` directions in which most is
    missing.

    Args:
        memory: Its table and `value` are overwritten.
        ngrams_NO: Int64, the n-grams that end at each token.
        missed_Nd: The update less what the low-rank part gives, float32.
        chosen_N: Bool, the tokens to fit to; None for all.

    Returns:
        What is still missing, `[N, d]`, where each token is predicted from the others alone: an
        n-gram that the text holds once is not known because of it.
    """
    slots_NS = memory.slots(ngrams_NO)
    count, width = memory.table.shape
    if chosen_N is None:
        chosen_N = torch.ones(len(missed_Nd), dtype=torch.bool, device=missed_Nd.device)
    counted_N1 = chosen_N[:, None].to(missed_Nd)
    moment_dd, _ = moments(missed_Nd[chosen_N], missed_Nd[chosen_N][:, :1])
    basis_dw = torch.linalg.eigh(moment_dd).eigenvectors.flip(1)[:, :width].to(missed_Nd)
    basis_dw = F.pad(basis_dw, (0, width - basis_dw.shape[1]))
    memory.value.weight.copy_(basis_dw.repeat(1, slots_NS.shape[1]))
    memory.table.zero_()
    before_Nw = left_Nw = missed_Nd @ basis_dw
    for slots_N in slots_NS.T:
        none = torch.zeros(count, 1, device=left_Nw.device)
        hits = total(none.index_add_(0, slots_N, counted_N1))
        sums = total(left_Nw.new_zeros(count, width).index_add_(0, slots_N, left_Nw * counted_N1))
        others_N1 = hits[slots_N] - counted_N1
        others_Nw = sums[slots_N] - left_Nw * counted_N1
        results = [left_Nw - others_Nw / (others_N1 + constant) for constant in _SHRINK]
        squares = [(result * counted_N1).double().square().sum() for result in results]
        best = int(total(torch.stack(squares)).argmin())
        memory.table.add_(sums / (hits + _SHRINK[best]))
        left_Nw = results[best]
    return missed_Nd - (before_Nw - left_Nw) @ basis_dw.T


@in_turn
@torch.no_grad()
def fit_branches(
    model: nn.Module, batches: Iterable[Mapping[str, torch.Tensor]], ridge: float = 1e-3
) -> dict[int, float]:
    """Set every branch so that `down(silu(up(norm(a))))` comes close to the full path's update.

    Least squares in float64 on calibration tokens, see `fit_branch`; `norm` stays as it is. Errors
    are relative to the stream behind the full path, as the next norm sees them. Layers are fitted
    in order, on the stream that the layers before, already fitted, really produce: one pass over
    the batches per layer. A layer that has been calibrated or trained, or has no gate, is fitted on
    the tokens that take its cheap path; any other, and one where fewer tokens than the branch has
    parameters per output do, on all of them. Attention sinks (`norms_and_sinks`) are left out where
    a gate may run them in full. Nothing is random.

    Args:
        model: A model with one active adapter with a branch and target ffn, attention or block. A
            memory is fitted to what the low-rank part misses, see `fit_memory`; it is worth more
            text.
        batches: Dicts with `input_ids` and optionally `attention_mask` and `position_ids`, each
            `[B, T]`; a few thousand tokens suffice. They are kept in memory.
        ridge: Penalty on the weights, as a fraction of the mean squared feature.

    Returns:
        `{layer_index: sum |update - branch|^2 / sum |update|^2}`, relative errors, on the tokens it
        was fitted on; a branch that adds nothing has 1. Of a memory, what each token would miss had
        the text not held it counts.

    Raises:
        ValueError: No adapter is active, it routes experts, has no branch or one that its gate
            scales, `ridge` is negative, or `batches` holds no real token.
    """
    routings = active_routings(model)
    config = routings[0].active_config()
    if TARGETS[config.target].per_pair:
        known = ", ".join(name for name, target in TARGETS.items() if not target.per_pair)
        raise ValueError(
            f"fit_branches: target={config.target!r} has no update to imitate; use {known}"
        )
    if config.branch == "none":
        raise ValueError("fit_branches: branch='none' has nothing to fit; use another branch")
    if routings[0].active_gate().scales_ffn:
        raise ValueError(
            f"fit_branches: gate={config.gate!r} multiplies the branch by 1 - p; train it instead"
        )
    if not ridge >= 0:
        raise ValueError(f"fit_branches: ridge={ridge!r} must be at least 0")
    kept = list(model_inputs(model, batches))
    if not any(bool(token_mask(batch).any()) for batch in kept):
        raise ValueError("fit_branches: batches holds no real token")
    name = routings[0].active_name()
    groups = [group for h in routings for group in (h.depth_route_branch, h.depth_route_memory)]
    parts = [group[name] for group in groups if name in group]
    with weights_restored_on_error(parts), evaluating(model):
        return {h.layer_index: _fit_layer(model, h, kept, ridge) for h in routings}


def _fit_layer(
    model: nn.Module, routing: Routing, batches: list[dict[str, torch.Tensor]], ridge: float
) -> float:
    name = routing.active_name()
    branch: Any = routing.depth_route_branch[name]
    seen: list[torch.Tensor] = []

    def look(layer: Any, args: tuple[Any, ...], kwargs: Kwargs) -> None:
        h, kwargs = arguments_given(layer, args, kwargs)
        context = unpack(kwargs)
        plan = routing.plan(layer.training)
        assert plan is not None
        call = routed_call(layer, plan, h, context, without_cache(kwargs), decides=False)
        grams = call.stream[..., :0]
        if call.ngrams is not None:
            grams = call.ngrams.to(call.stream.device)
        full = call.full()
        seen[:] = (
            branch.normed(call.stream).float(),
            (full - call.stream).float(),
            full.float(),
            grams,
        )

    rows = []
    layer = stack_of(model).layers[routing.layer_index]
    with layer.register_forward_pre_hook(of_this_thread(look), with_kwargs=True):
        for batch in batches:
            with record_routes(model) as trace:
                model(**batch, use_cache=False, logits_to_keep=1)
            real = token_mask(batch).to(seen[0].device)
            cheap = ~trace[routing.layer_index].mask.to(real.device)
            rows.append([part[real] for part in seen] + [cheap[real]])
    x_Nd, y_Nd, after_Nd, ngrams_NO, cheap_N = (torch.cat(parts) for parts in zip(*rows))
    norms_N, sinks_N = norms_and_sinks(after_Nd)
    taken_N = ~sinks_N
    if routing.active_gate().static:
        taken_N = torch.ones_like(sinks_N)
    fixed = routing.active_gate().static or routing.config(name).fixed_threshold is not None
    decided = fixed or routing.active_quantiles().fitted()
    parameters = branch.down.in_features + (branch.down.bias is not None)  # for each output
    if decided and int((cheap_N & taken_N).sum()) >= parameters:
        taken_N &= cheap_N
    x_Nd, y_Nd, norms_N, ngrams_NO = (part[taken_N] for part in (x_Nd, y_Nd, norms_N, ngrams_NO))
    missed = fit_branch(branch, x_Nd, y_Nd, ridge, norms_N, neurons=neurons_to_copy(routing, name))
    memory: Any = routing.depth_route_memory._modules.get(name)
    if memory is None:
        return missed
    missed_Nd = y_Nd - branch.down(branch.features(x_Nd))
    left_Nd = fit_memory(memory, ngrams_NO, missed_Nd)
    left, square = ((part / norms_N[:, None]).double().square().sum() for part in (left_Nd, y_Nd))
    return float(left / square) if square > 0 else 0.0
