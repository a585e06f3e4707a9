"""The routed part in one operator, which a compiler does not look into: skipped rows stay skipped.

vLLM's attention reads and writes its paged cache in one call for all rows. So where a layer skips
its attention, that is computed for every row before the operator, which leaves the update out of
the rows that are skipped.

Shapes: N rows of all requests of a batch, d model width. Streams are `[1, N, d]`, as vLLM's
Transformers backend has them: one sequence as far as the layer can see, so decisions are about
tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from ..base.sublayers import attended, attention_update, ffn_map, norm_of, normed_for_ffn
from ..execution.call import RoutedCall
from ..execution.decode import DECODE_ROWS, supports_decode
from ..execution.executors import executor_of
from ..execution.layer import call_on_stream
from ..execution.target import Target, target_of
from ..execution.targets.attention import AttentionTarget
from ..parts.branches import rms_of
from ..parts.fused import FusedGateBranch, fuse
from ..parts.rules import tail_mask
from ..parts.targets import TargetTraits
from ..routing.plan import RoutePlan
from ..routing.routing import ROUTING, Routing
from .budgets import RequestBudgets
from .counts import RowCount
from .lora import LoraRows

OPERATOR = "hf_depthroute::routed"
NAME = "depth_route_name"  # the attribute of a routed layer that the operator finds it by
_KEPT = 64  # thresholds

_library = torch.library.Library("hf_depthroute", "FRAGMENT")


class RoutedStep:
    """The operator's work for `layer`, a decoder layer that holds adapter state.

    Its rows go to `count`, unless another process counts them. `budgets` and `loras` are those of
    requests.
    """

    def __init__(
        self,
        layer: nn.Module,
        count: RowCount | None,
        budgets: RequestBudgets | None,
        loras: LoraRows,
    ) -> None:
        self.layer = layer
        self.count = count
        self._budgets = budgets
        self._loras = loras
        routing = cast(Routing, layer._modules[ROUTING])
        self._generates_in_full = routing.active_config().phases == "prefill"
        self._prompts = -1  # of the routing, that what is below was made for
        self._joints: dict[str, FusedGateBranch | None] = {}
        self._thresholds: dict[RoutePlan, float] = {}

    def __call__(self, stream: Tensor, given: Tensor, batch: Any) -> Tensor:
        """The stream after the routed part, or after the cheap branch, `[1, N, d]`.

        `stream`, before it, is not changed; `given` is what the FFN reads or, where the attention
        is routed, its update. `batch`, None in a trial run, is what vLLM's attention is told.
        """
        routing = cast(Routing, self.layer._modules[ROUTING])
        rows = stream.shape[1]
        real = None
        if batch is not None:
            real = batch.num_actual_tokens
        generates = batch is not None and batch.max_query_len == 1
        if generates and self._generates_in_full:
            out = self._in_full(routing, routing.active_target(), stream, given)
            return self._counted(out, real, real)
        if generates:  # every request's next token: a batch of sequences
            shape = (rows, 1)
            last_rows = None
        else:
            routing.forget_prepared()  # there is a prompt among the rows
            shape = (1, rows)
            last_rows = _last_rows(batch, rows, routing.active_config().last_in_full)
        asked: list[float | None] = []
        if batch is not None and self._budgets is not None:
            asked = self._budgets.of_batch(batch)
        plans = {b: _plan_at(routing, b, shape, last_rows) for b in set(asked) or {None}}
        # One that skips, if any does.
        plan = min(plans.values(), key=lambda plan: plan.rule == "full")
        if plan.rule == "full":
            return self._counted(self._in_full(routing, plan.target, stream, given), real, real)
        bars = []
        if len(plans) != 1:
            bars = [self._threshold_of(routing, plans[budget]) for budget in asked]
        groups = self._loras.groups(getattr(self.layer, routing.family.ffn), rows)
        joint = None
        few = generates and rows == real and rows <= DECODE_ROWS
        if few and plan.target.row_wise and len(groups) == 1:
            joint = self._joint_of(routing, plan)
        if joint is not None:
            bar = bars or self._threshold_of(routing, plan)
            # To a layer, rows of one sequence are what one row of each of as many sequences is:
            # `[N, 1, d]`.
            own = stream.transpose(0, 1).clone()
            ffn = ffn_map(self.layer, routing.family)
            with self._loras.of(*groups):
                after, chosen = joint.run(own, bar, ffn, given.transpose(0, 1))
            return self._counted(after.transpose(0, 1), len(chosen), real)
        if bars:
            plan = replace(plan, threshold=_of_rows(bars, batch, rows, stream.device))
        out, ran = self._by_plan(routing, plan, stream, given, real, groups)
        return self._counted(out, ran, real)

    def _by_plan(
        self,
        routing: Routing,
        plan: RoutePlan,
        stream: Tensor,
        given: Tensor,
        real: int | None,
        groups: Mapping[int, Sequence[range]],
    ) -> tuple[Tensor, Tensor]:
        """The stream as the library's executors compute it, and the rows in full, int64 `[]`."""
        rows = stream.shape[1]
        token_mask = None
        if real is not None and real < rows:  # what a graph of a fixed size is filled up with
            token_mask = (torch.arange(rows, device=stream.device) < real)[None]
        target = target_of(plan)
        normed = None if isinstance(target, AttentionTarget) else given
        call = call_on_stream(self.layer, plan, target, stream, token_mask, {}, normed=normed)
        call = replace(call, finishes=False)  # the layer runs what is parallel to the FFN
        if len(groups) == 1:
            with self._loras.of(*groups):
                return self._run(call, given), call.mask.sum()
        out = torch.empty_like(stream)
        for slot, spans in groups.items():
            index = torch.cat([torch.arange(s.start, s.stop, device=out.device) for s in spans])
            with self._loras.of(slot):
                part = call.of((slice(None), index), {})
                out[:, index] = self._run(part, given[:, index])
        return out, call.mask.sum()

    def _run(self, call: RoutedCall, given: Tensor) -> Tensor:
        """The stream after the routed part, from what was decided, each `[1, n, d]`."""
        if isinstance(call.target, AttentionTarget):
            return call.target.from_update(call, given[call.mask])
        if not call.family.parallel:
            call = replace(call, stream=call.stream.clone())  # an executor may overwrite it
        return executor_of(call).run(call)

    def _counted(self, out: Tensor, ran: Tensor | int | None, real: int | None) -> Tensor:
        """`out`, after `real` rows were given, of which `ran` ran in full."""
        if self.count is not None and ran is not None and real is not None:
            self.count.add(ran, real)
        return out

    def _in_full(
        self, routing: Routing, target: TargetTraits, stream: Tensor, given: Tensor
    ) -> Tensor:
        """The stream as the base computes it, `[1, N, d]`."""
        layer = self.layer
        family = routing.family
        ffn = ffn_map(layer, family)
        if not target.skips_attention:
            return stream + ffn(given)
        after = stream + given
        if not target.skips_ffn:
            return after
        return after + ffn(normed_for_ffn(layer, family, stream, after))

    def _joint_of(self, routing: Routing, plan: RoutePlan) -> FusedGateBranch | None:
        """Gate and branch as one product, where the library's own decoding has them so."""
        self._follow(routing)
        if plan.adapter not in self._joints:
            norm = routing.norm_in_front("ffn")
            joint = rms = None
            if norm is not None and plan.config.gate_input == "normed":
                rms = rms_of(norm)
            supported = supports_decode(plan, routing.family) and current_platform.is_cpu()
            if rms is not None and supported:
                # vLLM has put its own norm of the kind there.
                norm_here: Any = norm_of(self.layer, routing.family, "ffn")
                weight = norm_here.weight
                branch = routing.depth_route_branch._modules.get(plan.adapter)
                joint = fuse((weight, rms[1]), routing.gate(plan.adapter), branch, weight.dtype)
            self._joints[plan.adapter] = joint
        return self._joints[plan.adapter]

    def _threshold_of(self, routing: Routing, plan: RoutePlan) -> float:
        """The score that a row has to reach, float32; a table is slower to read than a gate."""
        self._follow(routing)
        if plan not in self._thresholds:
            if len(self._thresholds) >= _KEPT:
                self._thresholds.clear()
            self._thresholds[plan] = torch.as_tensor(plan.threshold, dtype=torch.float32).item()
        return self._thresholds[plan]

    def _follow(self, routing: Routing) -> None:
        """Forget what was made before the last prompt; weights may have changed since."""
        if self._prompts != routing.prompts:
            self._prompts = routing.prompts
            self._joints.clear()
            self._thresholds.clear()


def _plan_at(
    routing: Routing, budget: float | None, shape: tuple[int, int], last_rows: Tensor | None
) -> RoutePlan:
    """How rows of one budget are routed; None: that of the server."""
    if budget is None:
        plan = routing.plan(False, shape, last_rows)
    else:
        with routing.state.override(budget=budget):
            plan = routing.plan(False, shape, last_rows)
    assert plan is not None
    return plan


def _of_rows(bars: list[float], batch: Any, rows: int, device: torch.device) -> Tensor:
    """The threshold of each row, float32 `[1, N]`, from that of each request."""
    place_N = torch.arange(rows, device=device)
    request_N = torch.searchsorted(batch.query_start_loc[1:].long(), place_N, right=True).clamp(
        max=len(bars) - 1
    )
    return torch.tensor(bars, device=device)[request_N][None]


def _routed(stream: Tensor, given: Tensor, layer_name: str) -> Tensor:
    context = get_forward_context()
    # One for each layer's attention, all of the same rows.
    batch = next(iter((context.attn_metadata or {}).values()), None)
    step: RoutedStep = context.no_compile_layers[layer_name]
    return step(stream, given, batch)


def _last_rows(batch: Any, rows: int, count: int) -> Tensor | None:
    """Bool `[1, N]`: the last `count` rows of every request; None in a trial run."""
    if batch is None:
        return None
    ends = batch.query_start_loc[1:].long()
    last = torch.zeros(1, rows, dtype=torch.bool, device=ends.device).index_fill_(1, ends - 1, True)
    if count == 1:
        return last
    return tail_mask(last, count)


def _shape_only(stream: Tensor, given: Tensor, layer_name: str) -> Tensor:
    return torch.empty_like(stream)


direct_register_custom_op("routed", _routed, fake_impl=_shape_only, target_lib=_library)


def served_forward(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`forward` of every swapped layer: the base's parts in its order, around the operator."""
    kwargs.update(zip(layer._argument_names, args))
    routing: Routing | None = layer._modules.get(ROUTING)
    if routing is None:
        return layer._base_forward(hidden_states, **kwargs)
    family = routing.family
    h = hidden_states
    target = cast(Target, routing.active_target())
    if target.skips_attention:
        update = attention_update(layer, family, target.norm(layer, family, h), kwargs)
        out = torch.ops.hf_depthroute.routed(h, update, getattr(layer, NAME))
        if not target.skips_ffn:
            out = out + ffn_map(layer, family)(normed_for_ffn(layer, family, h, out))
    else:
        stream = target.enter(layer, family, h, kwargs)
        normed = target.norm(layer, family, stream)  # here a compiler joins it to what is around it
        out = torch.ops.hf_depthroute.routed(stream, normed, getattr(layer, NAME))
        if family.parallel:
            out = attended(layer, family, out, h, kwargs)
    if family.returns_weights:
        return out, None
    return out
