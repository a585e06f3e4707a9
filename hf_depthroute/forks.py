"""Forks of a forward pass: the layers below the first routed one run once, all forks share the rest as one batch.

Shapes: F streams, the trunk first, B batch, T positions, N predicted tokens, d model width, V vocabulary.

`observe_prefix` watches the model's own forward pass and keeps what it handed to the first routed layer. `run_forks`
sends that stream, and every fork of it, through the remaining layers; `token_losses` takes them through the LM head in
chunks, so that logits of a whole batch never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from .cache import without_cache
from .calibration import active_routings
from .decision import RoutePlan
from .execution import masked_update
from .families import find_decoder, find_family
from .holder import HOLDER, Routing
from .layer import TOKEN_MASK, both_paths
from .readout import ReadOut
from .sites import SITES
from .sublayers import hidden_of

_LOGITS = 2**25  # elements of the logits that exist at one time: 128 MiB in float32

# From the trunk's stream after the full path, after the cheap path, and as the policy has it, each [B, T, d], to new
# streams [K, B, T, d].
Fork = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Prefix:
    """What the decoder layers from the first routed one on were called with; filled by `observe_prefix`.

    Attributes:
        hidden: The stream that enters the first routed layer, `[B, T, d]`, without graph; None before the first pass.
        final: The stream that leaves the last layer, `[B, T, d]`, with graph; None before the first pass.
    """

    def __init__(self, model: nn.Module) -> None:
        family = find_family(model)
        decoder = find_decoder(model, family)
        first = active_routings(model)[0].layer_index
        self.model = model
        self.layers: list[Any] = list(getattr(decoder, family.layers))[first:]
        self.read_out = ReadOut(model)
        _check_whole([*self.layers, self.read_out.norm, self.read_out.head])
        self.hidden: torch.Tensor | None = None
        self.final: torch.Tensor | None = None
        self.training = False
        self._kwargs: list[dict[str, Any]] = []
        self._autocast: tuple[bool, torch.dtype] = (False, torch.float32)

    def observe(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the layers."""
        kwargs = {**kwargs, **dict(zip(layer._argument_names, args[1:]))}
        hidden = kwargs.pop("hidden_states", None) if not args else args[0]
        if layer is self.layers[0]:
            assert hidden is not None
            device = hidden.device.type
            self.hidden, self.training, self._kwargs = hidden.detach(), layer.training, []
            self._autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        self._kwargs.append(without_cache(kwargs))

    def observe_end(self, layer: Any, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the last layer."""
        self.final = hidden_of(output)

    def logits(self) -> torch.Tensor:
        """The observed pass's logits `[B, T, V]`, with graph, for a caller whose loss made none."""
        assert self.final is not None, "no forward pass was observed"
        return cast(torch.Tensor, self.read_out(self.final))

    def forget(self) -> None:
        self.hidden, self.final, self._kwargs = None, None, []

    @property
    def token_mask(self) -> torch.Tensor | None:
        """Bool `[B, T]`, true at real tokens; None when the model was called without a 2D attention mask."""
        return cast(torch.Tensor | None, self._kwargs[0].get(TOKEN_MASK))

    def calls(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The layers with the keyword arguments they were called with, but no KV cache."""
        return zip(self.layers, self._kwargs)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Without graph, without dropout, and under the autocast of the observed pass."""
        assert self.hidden is not None, "no forward pass was observed"
        enabled, dtype = self._autocast
        modes = [(module, module.training) for module in self.model.modules()]
        for module, _ in modes:
            module.training = False
        try:
            with torch.no_grad(), torch.autocast(self.hidden.device.type, dtype=dtype, enabled=enabled):
                yield
        finally:
            for module, training in modes:
                module.training = training


@contextmanager
def observe_prefix(model: nn.Module) -> Iterator[Prefix]:
    """Keep what the last forward pass inside the block handed to the first routed layer; costs and changes nothing.

    Raises:
        ValueError: No depth-routed adapter is active, or the model is split over devices or processes.
    """
    prefix = Prefix(model)
    handles = [layer.register_forward_pre_hook(prefix.observe, with_kwargs=True) for layer in prefix.layers]
    handles.append(prefix.layers[-1].register_forward_hook(prefix.observe_end))
    try:
        yield prefix
    finally:
        for handle in handles:
            handle.remove()
        prefix.forget()


def run_forks(
    prefix: Prefix,
    on_policy: bool,
    fork: Fork | None,
    layers: Collection[int] | None = None,
) -> tuple[torch.Tensor, dict[int, range]]:
    """Send the trunk and its forks through the observed layers, as one batch.

    Args:
        prefix: From `observe_prefix`, after a forward pass, inside `prefix.replaying()`.
        on_policy: Whether routed layers follow the gate; otherwise they run full.
        fork: Makes the new streams of a layer; None for the trunk alone.
        layers: Indices of the layers to fork at; default: all routed ones.

    Returns:
        The final streams `[F, B, T, d]`, the trunk first, and the streams that each layer made.
    """
    assert prefix.hidden is not None
    batch = prefix.hidden.shape[0]
    streams_FBTd = prefix.hidden[None]
    forks: dict[int, range] = {}
    for layer, observed in prefix.calls():
        count = streams_FBTd.shape[0]
        kwargs = {name: _repeat(value, batch, count) for name, value in observed.items()}
        token_mask = kwargs.pop(TOKEN_MASK, None)
        h = streams_FBTd.flatten(0, 1)
        holder: Routing | None = layer._modules.get(HOLDER)
        plan = None if holder is None else holder.plan(prefix.training)
        if holder is None or plan is None or (not on_policy and fork is None):
            streams_FBTd = hidden_of(layer._base_forward(h, **kwargs)).view_as(streams_FBTd)
            continue
        _check_forkable(plan)
        site = SITES[plan.config.target]
        stream = site.enter(layer, holder, h, kwargs)
        normed = site.norm(layer, holder, stream)
        branch: Any = holder.depth_route_branch._modules.get(plan.adapter)
        if on_policy:
            out, after_full, after_cheap = _follow(layer, holder, plan, batch, stream, normed, token_mask, kwargs)
        else:
            out = after_full = site.full(layer, holder, stream, normed, kwargs)
            after_cheap = stream[:batch] if branch is None else stream[:batch] + branch(stream[:batch])
        streams_FBTd = out.unflatten(0, (count, batch))
        if fork is not None and (layers is None or holder.layer_index in layers):
            new_KBTd = fork(after_full[:batch], after_cheap[:batch], streams_FBTd[0])
            forks[holder.layer_index] = range(count, count + len(new_KBTd))
            streams_FBTd = torch.cat([streams_FBTd, new_KBTd])
            if holder.family.parallel:  # what is not routed reads the layer's input, for a new stream the trunk's
                stream = torch.cat([stream, stream[:batch].repeat(len(new_KBTd), 1, 1)])
                kwargs = {name: _repeat(value, batch, len(streams_FBTd)) for name, value in observed.items()}
                kwargs.pop(TOKEN_MASK, None)
        out = site.finish(layer, holder, streams_FBTd.flatten(0, 1), stream, kwargs)
        streams_FBTd = out.unflatten(0, (-1, batch))
    return streams_FBTd, forks


def _follow(
    layer: Any,
    holder: Routing,
    plan: RoutePlan,
    batch: int,
    stream: torch.Tensor,
    normed: torch.Tensor,
    token_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The streams as the gate has them, and the trunk's after the full and the cheap path.

    The forks are made of either path of the trunk, the first `batch` sequences; they themselves need one.
    """
    site = SITES[plan.config.target]
    scores = holder.score(plan, stream if plan.config.gate_input == "residual" else normed)["scores"]
    mask, probs = holder.decide(plan, scores, token_mask)
    alone = plan.mix == "hard" and plan.config.target == "ffn"  # its sparse execution looks at no other token
    both = batch if alone else len(stream)
    after_full, after_cheap = both_paths(layer, holder, plan, stream[:both], normed[:both], probs[:both], kwargs)
    out = masked_update(stream[:both], after_full, after_cheap, mask[:both], probs[:both], plan.mix)
    if both < len(stream):
        branch = holder.depth_route_branch._modules.get(plan.adapter)
        rest = site.sparse(layer, holder, stream[both:], normed[both:], mask[both:], branch, None, kwargs)
        out = torch.cat([out, rest])
    return out, after_full, after_cheap


def _check_forkable(plan: RoutePlan) -> None:
    """Raise `ValueError` for adapters whose two paths are not a choice between two streams at one token."""
    config = plan.config
    fault = next(
        (
            f"{name}={value!r}"
            for name, value, bad in (
                ("target", config.target, config.target == "experts"),
                ("granularity", config.granularity, config.granularity == "sequence"),
                ("gate", config.gate, config.gate in ("halting", "exit", "none")),
            )
            if bad
        ),
        None,
    )
    if fault:
        raise ValueError(f"util, rank and cgs need a choice per token and layer; they do not support {fault}")


def token_losses(
    prefix: Prefix, streams_FBTd: torch.Tensor, labels_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of every position's prediction, float32 `[F, B, T]`, 0 where nothing is predicted, and where."""
    labels_BT = labels_BT.to(streams_FBTd.device)
    counted_BT = counted_positions(prefix, labels_BT)
    rows_Nd = streams_FBTd[:, counted_BT].flatten(0, 1)
    targets_N = labels_BT.roll(-1, dims=1)[counted_BT].repeat(len(streams_FBTd))
    parts = [
        F.cross_entropy(prefix.read_out(rows).float(), targets, reduction="none")
        for rows, targets in zip(rows_Nd.split(_chunk(prefix)), targets_N.split(_chunk(prefix)))
    ]
    losses_FBT = torch.zeros(streams_FBTd.shape[:3], device=streams_FBTd.device)
    losses_FBT[:, counted_BT] = torch.cat(parts).view(len(streams_FBTd), -1)
    return losses_FBT, counted_BT


def divergence_from_dense(prefix: Prefix, logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Mean over predicted tokens of `KL(dense || routed)`, in nats; the gradient reaches `logits_BTV` only.

    The dense model is this one with every routed layer full, so the teacher costs no weights of its own.
    """
    with prefix.replaying():
        trunk_1BTd, _ = run_forks(prefix, on_policy=False, fork=None)
    counted_BT = counted_positions(prefix, labels_BT).to(trunk_1BTd.device)
    rows_Nd, student_NV = trunk_1BTd[0][counted_BT], logits_BTV[counted_BT]
    total = logits_BTV.new_zeros((), dtype=torch.float32)
    for rows, logits in zip(rows_Nd.split(_chunk(prefix)), student_NV.split(_chunk(prefix))):
        with prefix.replaying():
            target = prefix.read_out(rows).float().log_softmax(-1)
        total = total + F.kl_div(logits.float().log_softmax(-1), target, reduction="sum", log_target=True)
    return total / counted_BT.sum().clamp(min=1)


def counted_positions(prefix: Prefix, labels_BT: torch.Tensor) -> torch.Tensor:
    """Bool `[B, T]`: the positions that predict a token."""
    real_BT = (
        torch.ones_like(labels_BT, dtype=torch.bool)
        if prefix.token_mask is None
        else prefix.token_mask.to(labels_BT.device)
    )
    counted_BT = (labels_BT.roll(-1, dims=1) != -100) & real_BT & real_BT.roll(-1, dims=1)
    counted_BT[:, -1] = False
    return counted_BT


def _check_whole(modules: list[nn.Module]) -> None:
    """Forks call parts of layers, past the hooks of whatever moves or gathers weights around a whole layer.

    Raises:
        ValueError: The weights are on several devices, or split by FSDP or ZeRO-3.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    if any(hasattr(parameter, "ds_id") or hasattr(parameter, "placements") for parameter in parameters):
        raise ValueError("oracle and distill losses do not work under FSDP or ZeRO-3; use DDP")
    if len({parameter.device for parameter in parameters}) > 1:
        raise ValueError("oracle and distill losses do not work with a model that is split over several devices")


def _chunk(prefix: Prefix) -> int:
    """Rows that go through the LM head at one time."""
    vocabulary = cast(torch.Tensor, prefix.read_out.head.weight).shape[0]
    return max(1, _LOGITS // vocabulary)


def _repeat(value: Any, batch: int, count: int) -> Any:
    """A layer's argument for `count` times the batch; what broadcasts over the batch stays as it is."""
    if isinstance(value, tuple):
        return tuple(_repeat(part, batch, count) for part in value)
    if hasattr(value, "kv_num_blocks"):
        raise ValueError("the oracle does not support flex attention; use sdpa or eager")
    if count == 1 or not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[0] != batch or batch == 1:
        return value
    return value.repeat(count, *[1] * (value.ndim - 1))
