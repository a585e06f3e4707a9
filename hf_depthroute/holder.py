"""`Routing`: the one child of a decoder layer that holds all adapter state, and `RoutePlan`: what it decides with.

Shapes: B batch, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from .branches import LowRankBranch
from .calibration import ScoreQuantiles
from .config import DepthRouteConfig
from .families import Family
from .gates import GATES, TargetProjection
from .selection import threshold_mask, topk_mask
from .trace import RouteCounter, RouteTrace

HOLDER = "routing"  # the attribute of a decoder layer that holds its adapter state


@dataclass(frozen=True)
class RoutePlan:
    """What one forward pass of one layer does, fixed before it runs.

    Attributes:
        adapter: Name of the active adapter, with its `config`.
        rule: `"topk"`, `"threshold"` or `"soft"`.
        budget: The budget in force: the adapter's, or the training schedule's.
        threshold: The score that a token has to reach, for the rules that use one. Read here, because training moves
            the quantile tables between a forward pass and its recomputation.
        temperature: `tau` of `p = sigmoid(u / tau)`.
        replayed: Bool `[B, T]`; decisions to use instead of the rule's.
        recorders: Traces and counters that want to know.
    """

    adapter: str
    config: DepthRouteConfig
    rule: str
    budget: float
    threshold: torch.Tensor | float
    temperature: float
    replayed: torch.Tensor | None
    recorders: tuple[RouteTrace | RouteCounter, ...]


class Routing(nn.Module, BaseTunerLayer):
    """All adapter state of one decoder layer; the PEFT tuner layer. It is not called: the decoder layer reads it.

    Args:
        layer_index: Index of the decoder layer.
        family: The row of the family table.
        layer: The decoder layer, to read sizes from; its FFN norm is the template of the branch's norm, and its device
            the one the adapter belongs on.
        peft_configs: The model's adapter configurations by name, shared by all layers.
    """

    adapter_layer_names = ("depth_route_gate", "depth_route_branch")
    other_param_names = ("depth_route_target", "depth_route_quantiles")

    # BaseTunerLayer's properties look them up on `base_layer`, which does not exist here.
    weight = None  # type: ignore[assignment]
    bias = None  # type: ignore[assignment]

    def __init__(self, layer_index: int, family: Family, layer: nn.Module, peft_configs: dict[str, PeftConfig]) -> None:
        super().__init__()
        norm = getattr(layer, family.ffn_norm)
        ffn_parameters = dict(getattr(layer, family.ffn).named_parameters())
        self.layer_index = layer_index
        self.family = family
        self.width: int = norm.weight.shape[-1]
        self.ffn_bias = any(name.endswith("bias") for name in ffn_parameters)
        self.dense_ffn = all(parameter.ndim < 3 for parameter in ffn_parameters.values())  # not fused experts
        self.peft_configs = peft_configs
        self.merged_adapters: list[str] = []
        self.depth_route_gate = nn.ModuleDict()
        self.depth_route_branch = nn.ModuleDict()
        self.depth_route_target = nn.ModuleDict()  # the frozen projection, only in an adapter's first routed layer
        self.depth_route_quantiles = nn.ModuleDict()
        # Held outside the module tree: owned by the base layer and by the first routed layer.
        self._norm: tuple[Any] = (norm,)
        self._projections: dict[str, tuple[TargetProjection, ...]] = {}
        # Run-time state, never saved.
        self.recorders: list[RouteTrace | RouteCounter] = []
        self.replay: RouteTrace | None = None
        self.selection: str | None = None  # overrides the rule: "topk" or "threshold"
        self.scheduled_budget: float | None = None  # training schedules
        self.scheduled_temperature: float | None = None

    def add_adapter(self, name: str, config: DepthRouteConfig) -> None:
        """Create the seeded, untrained adapter `name` for this layer."""
        gate = GATES[config.gate](self.width, config)
        self._initialise(gate, config, "gate")
        self.depth_route_gate[name] = gate
        if config.branch == "lowrank":
            assert config.branch_rank is not None
            branch = LowRankBranch(self._norm[0], self.width, config.branch_rank, bias=self.ffn_bias)
            self._initialise(branch, config, "branch")
            self.depth_route_branch[name] = branch
        self.depth_route_quantiles[name] = ScoreQuantiles(config.gate_temperature)
        self._move_adapter_to_device_of_base_layer(name)

    def add_projection(self, name: str, config: DepthRouteConfig, owner: Routing) -> None:
        """Create adapter `name`'s target projection in the layer that owns it, or refer to the owner's."""
        if owner is self:
            projection = TargetProjection(self.width, config.summary_dim)
            self._initialise(projection, config, "target")
            self.depth_route_target[name] = projection
            self._move_adapter_to_device_of_base_layer(name)
        self._projections[name] = (cast(TargetProjection, owner.depth_route_target[name]),)

    def adapter(self) -> str | None:
        """Name of the adapter that routes this layer now; None when the layer runs as the base does.

        Raises:
            ValueError: More than one routed adapter is active.
        """
        if self._disable_adapters:
            return None
        names = [name for name in self.active_adapters if name in self.depth_route_gate]
        if len(names) > 1:
            raise ValueError(f"only one depth-routed adapter can be active, not {', '.join(names)}; use set_adapter")
        return names[0] if names else None

    def config(self, name: str) -> DepthRouteConfig:
        return cast(DepthRouteConfig, self.peft_configs[name])

    def active_config(self) -> DepthRouteConfig:
        """The configuration of the adapter that routes this layer now; `ValueError` when there is none."""
        return self.config(self.active_name())

    def active_quantiles(self) -> ScoreQuantiles:
        """The quantile table of the adapter that routes this layer now; `ValueError` when there is none."""
        return cast(ScoreQuantiles, self.depth_route_quantiles[self.active_name()])

    def active_name(self) -> str:
        """Name of the adapter that routes this layer now; `ValueError` when there is none."""
        name = self.adapter()
        if name is None:
            raise ValueError(f"layer {self.layer_index}: no depth-routed adapter is active")
        return name

    def plan(self, training: bool) -> RoutePlan | None:
        """How this forward pass routes; None when it runs as the base does."""
        name = self.adapter()
        if name is None:
            return None
        config = self.config(name)
        scheduled = self.scheduled_budget if training else None
        budget = config.budget if scheduled is None else scheduled
        threshold: torch.Tensor | float = -torch.inf
        if config.threshold is not None:
            threshold = config.threshold
        elif budget < 1.0:
            threshold = self.depth_route_quantiles[name](budget)
        replayed = None if self.replay is None else self.replay.get(self.layer_index)
        return RoutePlan(
            adapter=name,
            config=config,
            rule=self.selection or (config.selection if training else "threshold"),
            budget=budget,
            threshold=threshold,
            temperature=(self.scheduled_temperature if training else None) or config.gate_temperature,
            replayed=None if replayed is None else replayed.mask,
            recorders=tuple(self.recorders),
        )

    def decide(self, plan: RoutePlan, scores: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
        """The bool mask `[B, T]` of the tokens that run full."""
        if plan.replayed is not None:
            if plan.replayed.shape != scores.shape:
                raise ValueError(
                    f"layer {self.layer_index}: the replayed mask has shape {tuple(plan.replayed.shape)}, "
                    f"the input {tuple(scores.shape)}"
                )
            return plan.replayed.to(scores.device)
        scores = scores.detach()
        if plan.rule == "topk":
            return topk_mask(scores, plan.budget, token_mask)
        return threshold_mask(scores, plan.threshold, token_mask)

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Activate routed adapters. Names of other PEFT methods leave the active one as it is."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        ours = [name for name in names if isinstance(self.peft_configs.get(name), DepthRouteConfig)]
        if ours or not names:
            super().set_adapter(ours, inference_mode=inference_mode)

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        self._projections.pop(adapter_name, None)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(
            "a depth-routed adapter cannot be merged: routing depends on the input. "
            "Use unload() to get the base model back"
        )

    def unmerge(self) -> None:
        return None

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        target: torch.device = self._norm[0].weight.device if device is None else device
        for group in self.adapter_layer_names + self.other_param_names:
            modules = getattr(self, group)
            if adapter_name not in modules or target.type == "meta":
                continue
            if not any(parameter.is_meta for parameter in modules[adapter_name].parameters()):
                modules[adapter_name].to(target)

    def _initialise(self, module: Any, config: DepthRouteConfig, part: str) -> None:
        """Draw a part's weights from a generator that depends on the seed, the layer and the part only."""
        if any(parameter.is_meta for parameter in module.parameters()):
            return  # low_cpu_mem_usage: the values come from the adapter file
        salt = {"gate": 1, "branch": 2, "target": 3}[part]
        generator = torch.Generator().manual_seed((config.seed * 1_000_003 + self.layer_index * 7 + salt) % 2**63)
        module.reset_parameters(generator)
