"""Forks of a forward pass: the layers below the first routed one run once,
all forks share the rest as one batch.

Shapes: F streams, the trunk first, B batch, T positions, N predicted tokens, d model width, V
vocabulary.

`observe_prefix` watches the model's own forward pass and keeps what it handed to the first routed
layer. `run_forks` sends that stream, and every fork of it, through the remaining layers;
`fork_losses` takes them through the LM head in chunks, so that logits of a whole batch never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..base.cache import without_cache
from ..base.contexts import evaluating, hooked, of_this_thread
from ..base.lm_head import LMHead, predicting
from ..base.stack import stack_of
from ..base.sublayers import Kwargs, arguments_given, hidden_of
from ..config.adapter import DepthRouteConfig
from ..config.rules import ConfigError
from ..data.batches import breaks_of
from ..execution.call import RoutedCall
from ..execution.context import ForwardContext, unpack
from ..execution.layer import routed_call
from ..execution.sequences import by_sequence
from ..inference.calibration import active_routings
from ..parts.gates import GATES
from ..parts.targets import TARGETS
from ..routing.routing import ROUTING, Routing
from .trace_statistics import mean_of_all

# From the trunk's stream after the full path, the cheap path and the policy's, each [B, T, d], to
# streams [K, B, T, d].
Fork = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Prefix:
    """The arguments of the decoder layers from the first routed one on; filled by `observe_prefix`.

    Attributes:
        hidden: The stream that enters the first routed layer, `[B, T, d]`, without graph; None
            before the first pass.
        final: The stream that leaves the last layer, `[B, T, d]`, with graph; None before the first
            pass.
        kwargs: The layers' keyword arguments, without a KV cache.
        context: What the stack told the layers.
    """

    def __init__(self, model: nn.Module) -> None:
        first = active_routings(model)[0].layer_index
        self.model = model
        self.layers: list[Any] = list(stack_of(model).layers)[first:]
        self.lm_head = LMHead(model)
        # Forks call parts of layers, past the hooks of whatever moves or gathers weights around a
        # whole layer.
        modules = [*self.layers, self.lm_head.norm, self.lm_head.head]
        parameters = [parameter for module in modules for parameter in module.parameters()]
        if any(hasattr(part, "ds_id") or hasattr(part, "placements") for part in parameters):
            raise ValueError("oracle and distill losses do not work under FSDP or ZeRO-3; use DDP")
        if len({parameter.device for parameter in parameters}) > 1:
            raise ValueError(
                "oracle and distill losses do not work with a model that is split over several "
                "devices"
            )
        self.hidden: torch.Tensor | None = None
        self.final: torch.Tensor | None = None
        self.training = False
        self.kwargs: list[dict[str, Any]] = []
        self.context = ForwardContext()
        self._autocast: tuple[bool, torch.dtype] = (False, torch.float32)
        self._with_graph = False

    def observe(self, layer: Any, args: tuple[Any, ...], kwargs: Kwargs) -> None:
        """Pre-hook of the layers; a pass without gradients replaces none with them."""
        if self.passed_over():
            return
        hidden, kwargs = arguments_given(layer, args, kwargs)
        context = unpack(kwargs)
        if layer is self.layers[0]:
            self._with_graph = torch.is_grad_enabled()
            device = hidden.device.type
            self.hidden = hidden.detach()
            self.training = layer.training
            self.kwargs = []
            self.context = context
            self._autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        self.kwargs.append(without_cache(kwargs))

    def passed_over(self) -> bool:
        """Whether this pass, as of a reference, has no gradients, and one that is kept has."""
        return self._with_graph and not torch.is_grad_enabled()

    @property
    def documents(self) -> torch.Tensor | None:
        """The packed document of each position, int64 `[1 or B, T]`; None if layers get none."""
        positions = self.kwargs[0].get("position_ids")
        if positions is None or positions.ndim != 2:
            return None
        return breaks_of(positions).cumsum(1)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Without graph, without dropout, and under the autocast of the observed pass."""
        assert self.hidden is not None, "no forward pass was observed"
        enabled, dtype = self._autocast
        autocast = torch.autocast(self.hidden.device.type, dtype=dtype, enabled=enabled)
        with evaluating(self.model), torch.no_grad(), autocast:
            yield


@contextmanager
def observe_prefix(model: nn.Module) -> Iterator[Prefix]:
    """Keep what the block's last forward pass handed to the first routed layer.

    Raises:
        ValueError: No depth-routed adapter is active, or the model is split over devices or
            processes.
    """
    prefix = Prefix(model)
    observe = of_this_thread(prefix.observe)

    @of_this_thread
    def keep_end(layer: nn.Module, args: object, output: object) -> None:
        if not prefix.passed_over():
            prefix.final = hidden_of(output)

    handles = [
        layer.register_forward_pre_hook(observe, with_kwargs=True) for layer in prefix.layers
    ]
    with hooked([*handles, prefix.layers[-1].register_forward_hook(keep_end)]):
        try:
            yield prefix
        finally:
            prefix.hidden = None
            prefix.final = None
            prefix.kwargs = []
            prefix.context = ForwardContext()


def run_forks(
    prefix: Prefix, on_policy: bool, fork: Fork | None, layers: Collection[int] | None = None
) -> tuple[torch.Tensor, dict[int, range]]:
    """Send the trunk and its forks through the observed layers, as one batch, in inference.

    Args:
        prefix: From `observe_prefix`, after a forward pass, inside `prefix.replaying()`.
        on_policy: Whether routed layers follow the gate; otherwise they run full. Static layers
            take the cheap path in either case, unless nothing is forked: then all is dense.
        fork: Makes the new streams of a layer; None for the trunk alone.
        layers: Indices of the layers to fork at; default: all routed ones.

    Returns:
        The final streams `[F, B, T, d]`, the trunk first, and the streams that each layer made.
    """
    assert prefix.hidden is not None
    batch = prefix.hidden.shape[0]
    streams_FBTd = prefix.hidden[None]
    forks: dict[int, range] = {}
    for layer, observed in zip(prefix.layers, prefix.kwargs):
        count = streams_FBTd.shape[0]
        kwargs = _repeated(observed, batch, count)
        h = streams_FBTd.flatten(0, 1)
        context = prefix.context.each(partial(_repeat_rows, batch=batch, count=count))
        routing: Routing | None = layer._modules.get(ROUTING)
        plan = None
        if routing is not None:
            plan = routing.plan(prefix.training)
        if routing is None or plan is None or (not on_policy and fork is None):
            streams_FBTd = hidden_of(layer._base_forward(h, **kwargs)).view_as(streams_FBTd)
            continue
        check_forkable(plan.config)
        plan = replace(plan, training=False)
        call = routed_call(layer, plan, h, context, kwargs, decides=on_policy)
        if plan.gate.static:  # there is one path
            streams_FBTd = call.finish(call.cheap()).view_as(streams_FBTd)
            continue
        if on_policy:
            out, after_full, after_cheap = _follow(call, batch)
        else:
            out = after_full = call.full()
            after_cheap = call.of(slice(batch), kwargs).cheap()
        streams_FBTd = out.unflatten(0, (count, batch))
        if fork is not None and (layers is None or routing.layer_index in layers):
            new_KBTd = fork(after_full[:batch], after_cheap[:batch], streams_FBTd[0])
            forks[routing.layer_index] = range(count, count + len(new_KBTd))
            streams_FBTd = torch.cat([streams_FBTd, new_KBTd])
            # What is not routed reads the layer's input, for a new stream the trunk's.
            if routing.family.parallel:
                trunks = call.stream[:batch].repeat(len(new_KBTd), 1, 1)
                call = replace(call, stream=torch.cat([call.stream, trunks]))
            if routing.family.parallel or call.target.finish_attends:
                call = replace(call, kwargs=_repeated(observed, batch, len(streams_FBTd)))
        streams_FBTd = call.finish(streams_FBTd.flatten(0, 1)).unflatten(0, (-1, batch))
    return streams_FBTd, forks


def _follow(call: RoutedCall, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The streams as the gate has them, and the trunk's after the full and the cheap path.

    The forks are made of either path of the trunk, the first `batch` sequences; they themselves
    need one.
    """
    # Without attention, sparse execution looks at no other token.
    alone = call.plan.mix == "hard" and not call.plan.target.skips_attention
    trunk = call
    if alone:
        trunk = call.of(slice(batch), call.kwargs)
    after_full, after_cheap = call.target.both(trunk)
    out = call.target.mixed(trunk, after_full, after_cheap)
    if alone and batch < len(call.stream):
        out = torch.cat([out, call.target.gathered(call.of(slice(batch, None), call.kwargs))])
    return out, after_full, after_cheap


def check_forkable(config: DepthRouteConfig) -> None:
    """Raise `ConfigError` for adapters whose two paths are not two streams of one token."""
    gate = GATES[config.gate]
    refused = {
        "target": TARGETS[config.target].per_pair,
        "granularity": config.granularity == "sequence",
        "gate": gate.scales_sublayers or gate.scales_ffn or gate.exits or gate.static,
    }
    for name, bad in refused.items():
        if bad:
            fault = f"{name}={getattr(config, name)!r}"
            raise ConfigError(
                f"util, rank and cgs need a choice per token and layer; they do not support {fault}"
            )


def fork_losses(
    prefix: Prefix, streams_FBTd: torch.Tensor, labels_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of every prediction, float32 `[F, B, T]`, 0 where there is none, and where."""
    labels_BT = labels_BT.to(streams_FBTd.device)
    counted_BT = _counted(prefix, labels_BT)
    targets_N = labels_BT.roll(-1, dims=1)[counted_BT].repeat(len(streams_FBTd))
    losses_N = prefix.lm_head.token_losses(streams_FBTd[:, counted_BT].flatten(0, 1), targets_N)
    losses_FBT = torch.zeros(streams_FBTd.shape[:3], device=streams_FBTd.device)
    losses_FBT[:, counted_BT] = losses_N.view(len(streams_FBTd), -1)
    return losses_FBT, counted_BT


def divergence_from_dense(
    prefix: Prefix, logits_BTV: torch.Tensor, labels_BT: torch.Tensor
) -> torch.Tensor:
    """Mean `KL(dense || routed)` over all predicted tokens, nats, differentiable in the logits.

    The dense model is this one with every routed layer full, so the teacher costs no weights of its
    own.
    """
    with prefix.replaying():
        trunk_1BTd, _ = run_forks(prefix, on_policy=False, fork=None)
    counted_BT = _counted(prefix, labels_BT).to(trunk_1BTd.device)
    rows_Nd = trunk_1BTd[0][counted_BT]
    student_NV = logits_BTV[counted_BT]
    total = logits_BTV.new_zeros((), dtype=torch.float32)
    for rows, logits in prefix.lm_head.chunks(rows_Nd, student_NV):
        with prefix.replaying():
            target = prefix.lm_head(rows).float().log_softmax(-1)
        student = logits.float().log_softmax(-1)
        total = total + F.kl_div(student, target, reduction="sum", log_target=True)
    return mean_of_all(total[None], counted_BT.sum()[None].to(total.dtype))[0]


def _counted(prefix: Prefix, labels_BT: torch.Tensor) -> torch.Tensor:
    """Bool `[B, T]`: the positions that predict a token."""
    return F.pad(predicting(labels_BT, prefix.context.token_mask), (0, 1))


def _repeated(kwargs: Kwargs, batch: int, count: int) -> Kwargs:
    """A layer's arguments for `count` times the batch."""
    if any(hasattr(value, "kv_num_blocks") for value in kwargs.values()):
        raise ValueError("the oracle does not support flex attention; use sdpa or eager")
    if count == 1:
        return dict(kwargs)
    again = partial(_repeat_rows, batch=batch, count=count)
    repeated = {name: by_sequence(value, batch, again) for name, value in kwargs.items()}
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):  # where documents end, over all rows in a line
        ends = kwargs.get(name)
        if ends is not None:
            before = ends[-1] * torch.arange(count, dtype=ends.dtype, device=ends.device)
            repeated[name] = torch.cat([ends[:1], (before[:, None] + ends[1:]).flatten()])
    return repeated


def _repeat_rows(value_B: torch.Tensor, batch: int, count: int) -> torch.Tensor:
    """`[B or 1, ...]` for `count` times the batch, `[count * B, ...]`."""
    return value_B.expand(batch, *value_B.shape[1:]).repeat(count, *[1] * (value_B.ndim - 1))
