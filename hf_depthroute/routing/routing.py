"""`Routing`: the one child of a decoder layer that holds all adapter state.

Shapes: B batch, T positions.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..base.families import Family
from ..base.sublayers import template_norm, width_of
from ..base.weights import weight_shapes
from ..config.adapter import DepthRouteConfig
from ..data.batches import device_of
from ..parts.branches import Deriving, LowRankBranch, TransientCache
from ..parts.flexidepth import SwiGLUBranch
from ..parts.gate import Gate
from ..parts.gates import GATES, MLPGate, TargetProjection
from ..parts.memory import NgramMemory
from ..parts.neurons import NeuronBranch
from ..parts.targets import TARGETS, TargetTraits
from .description import routing_summary
from .plan import RoutePlan, plan_of
from .state import RunState
from .thresholds import BudgetController, ScoreQuantiles

_COMPUTES = (torch.float32, torch.bfloat16, torch.float16)  # not what weights are only stored in
ROUTING = "routing"  # the attribute of a decoder layer that holds its adapter state


class Routing(nn.Module, BaseTunerLayer):
    """All adapter state of one decoder layer; the PEFT tuner layer.

    It is not called: the decoder layer reads it.

    Sizes are read from the decoder layer; its norms are the templates of the branch's norm, and its
    device is the one the adapter belongs on. All layers share `peft_configs`, the model's adapter
    configurations by name, and `state`.
    """

    adapter_layer_names = (
        "depth_route_gate",
        "depth_route_branch",
        "depth_route_predictor",
        "depth_route_memory",
    )
    other_param_names = ("depth_route_target", "depth_route_quantiles", "depth_route_controller")

    plan = plan_of

    # BaseTunerLayer's properties look them up on `base_layer`, which does not exist here.
    weight = None  # type: ignore[assignment]
    bias = None  # type: ignore[assignment]

    def __init__(
        self,
        layer_index: int,
        family: Family,
        layer: nn.Module,
        peft_configs: dict[str, PeftConfig],
        state: RunState,
    ) -> None:
        super().__init__()
        ffn = getattr(layer, family.ffn)
        norms = {part: template_norm(layer, family, part) for part in ("ffn", "attention")}
        ffn_shapes = dict(weight_shapes(ffn))
        self.layer_index = layer_index
        self.family = family
        self.width = width_of(layer, family)
        self.num_experts = int(getattr(getattr(ffn, family.experts, None), "num_experts", 0))
        self.ffn_bias = any(name.endswith("bias") for name in ffn_shapes)
        # Not fused experts.
        self.dense_ffn = all(len(shape) < 3 for shape in ffn_shapes.values())
        widths = [math.prod(shape) // self.width for shape in ffn_shapes.values()]
        self.ffn_width = max(widths, default=0) or 1
        self.peft_configs = peft_configs
        self.state = state
        self.merged_adapters: list[str] = []
        self.depth_route_gate = nn.ModuleDict()
        self.depth_route_branch = nn.ModuleDict()
        # The frozen projection, only in an adapter's first routed layer.
        self.depth_route_target = nn.ModuleDict()
        self.depth_route_quantiles = nn.ModuleDict()
        self.depth_route_predictor = nn.ModuleDict()  # of causal_rule="predictor"
        self.depth_route_controller = nn.ModuleDict()  # of selection="controller"
        self.depth_route_memory = nn.ModuleDict()  # of target="memory" and branch="memory"
        # Held outside the module tree: owned by the base layer and by other routed layers.
        self._norms: tuple[dict[str, tuple[Any, bool]]] = (norms,)
        self._ffn: tuple[nn.Module] = (ffn,)
        self.projections: dict[str, tuple[TargetProjection, ...]] = {}
        # Run-time state, never saved.
        self.runs: dict[str, Any] = {}  # of each adapter: what its model card is made of
        # Executors by adapter and `shape_class`: `tune_execution`.
        self.tuned: dict[tuple[str, bool, int], str] = {}
        # Plans and decoding steps; making one costs as much as a small layer's arithmetic. Threads
        # share what is in it: each is put there whole, by one assignment, and never changed.
        self.derived = TransientCache()
        self.prompts = 0  # that were read; what is derived serves one of them
        self.trained: frozenset[str] = frozenset()  # parameters that trained when it was disabled

    def extra_repr(self) -> str:
        """Each adapter in one line of `print(model)`, the same in equal layers, which fold."""
        configs = ((name, self.config(name)) for name in self.depth_route_gate)
        return "\n".join(f"{name}: {routing_summary(c, self.layer_index)}" for name, c in configs)

    @property
    def ffn(self) -> nn.Module:
        """The base's FFN."""
        return self._ffn[0]

    def add_adapter(self, name: str, config: DepthRouteConfig) -> None:
        """Create the seeded, untrained adapter `name` for this layer."""
        target = TARGETS[config.target]
        kind_of_branch = config.branch_of(self.layer_index)
        per_expert = target.per_pair and config.expert_gates == "per_expert"
        kind = config.gate_of(self.layer_index)
        gate = GATES[kind](self.width, config, self.num_experts if per_expert else 1)
        self.depth_route_gate[name] = self._initialised(gate, config, "gate")
        if kind_of_branch != "none":
            rank = config.rank_of(self.layer_index)
            assert rank is not None
            branch = self.make_branch(config.target_of(self.layer_index), kind_of_branch, rank)
            self.depth_route_branch[name] = self._initialised(branch, config, "branch")
        if config.has_memory:
            memory = NgramMemory(self.width, config, self.layer_index)
            self.depth_route_memory[name] = self._initialised(memory, config, "memory")
        if config.causal_rule == "predictor":
            predictor = MLPGate(self.width, config)
            self.depth_route_predictor[name] = self._initialised(predictor, config, "predictor")
        if config.selection == "controller" and kind == config.gate:
            self.depth_route_controller[name] = BudgetController()
        self.depth_route_quantiles[name] = ScoreQuantiles(cast(float, config.gate_temperature))
        self._move_adapter_to_device_of_base_layer(name)

    def make_branch(self, target: str, kind: str, rank: int) -> nn.Module:
        """A branch for this layer, not drawn yet; `kind` and `rank` as in the configuration."""
        if kind == "neurons":
            return NeuronBranch(self.norm_in_front("ffn"), self.ffn, self.width, rank)
        small_ffn = kind == "swiglu"
        skipped = TARGETS[target]
        norm, same = self._norms[0]["ffn" if small_ffn and skipped.skips_ffn else skipped.norm_of]
        if small_ffn:
            return SwiGLUBranch(norm, self.width, rank, bias=self.ffn_bias, copy_values=same)
        return LowRankBranch(norm, self.width, rank, bias=self.ffn_bias, copy_values=same)

    def add_projection(self, name: str, config: DepthRouteConfig, owner: Routing) -> None:
        """Create an adapter's target projection in the layer that owns it, or refer to it."""
        if owner is self:
            projection = TargetProjection(self.width, config.summary_dim)
            self.depth_route_target[name] = self._initialised(projection, config, "target")
            self._move_adapter_to_device_of_base_layer(name)
        self.projections[name] = (cast(TargetProjection, owner.depth_route_target[name]),)

    def adapter(self) -> str | None:
        """Name of the adapter that routes this layer now; None when the layer runs as the base.

        Raises:
            ValueError: More than one routed adapter is active.
        """
        layers = self.state.settings.layers
        if self._disable_adapters or (layers is not None and self.layer_index not in layers):
            return None
        return self.chosen()

    def chosen(self) -> str | None:
        """As `adapter`, whether or not routing is turned off."""
        names = [name for name in self.active_adapters if name in self.depth_route_gate]
        if len(names) > 1:
            raise ValueError(
                f"only one depth-routed adapter can be active, not {', '.join(names)}; use "
                "set_adapter"
            )
        return names[0] if names else None

    def norm_in_front(self, part: str) -> nn.Module | None:
        """The base's norm before the `"ffn"` or `"attention"`; None if it norms afterwards."""
        norm, in_front = self._norms[0][part]
        return cast(nn.Module, norm) if in_front else None

    def gate(self, name: str) -> Gate:
        """The gate of adapter `name`."""
        return cast(Gate, self.depth_route_gate[name])

    def config(self, name: str) -> DepthRouteConfig:
        return cast(DepthRouteConfig, self.peft_configs[name])

    def active_config(self) -> DepthRouteConfig:
        """The active adapter's configuration; `ValueError` when there is none."""
        return self.config(self.active_name())

    def budget(self) -> float:
        """The budget of the calling thread's inference; `ValueError` if no adapter is active."""
        return self.state.budget(self.active_config().budget)

    def active_target(self) -> TargetTraits:
        """The target of this layer's active adapter; `ValueError` when there is none."""
        return TARGETS[self.active_config().target_of(self.layer_index)]

    def active_gate(self) -> type[Gate]:
        """The traits of this layer's active gate; `ValueError` if no routed adapter is active."""
        return GATES[self.active_config().gate_of(self.layer_index)]

    def active_quantiles(self) -> ScoreQuantiles:
        """The active adapter's quantile table; `ValueError` when there is none."""
        return cast(ScoreQuantiles, self.depth_route_quantiles[self.active_name()])

    def active_controller(self) -> BudgetController | None:
        """The controller of the adapter that routes this layer now; None if it has none."""
        controller = self.depth_route_controller._modules.get(self.active_name())
        return cast("BudgetController | None", controller)

    def threshold(self, name: str, budget: float) -> torch.Tensor:
        """The score that inference compares with: the controller's, or the table's where there is
        no controller, or where a thread has a budget of its own."""
        if name in self.depth_route_controller and self.state.settings.budget is None:
            return cast(BudgetController, self.depth_route_controller[name]).threshold.clone()
        return cast(ScoreQuantiles, self.depth_route_quantiles[name])(budget)

    def experts_of(self, layer: nn.Module) -> nn.Module:
        """The fused experts of the decoder layer."""
        return cast(nn.Module, getattr(getattr(layer, self.family.ffn), self.family.experts))

    def active_name(self) -> str:
        """Name of the adapter that routes this layer now; `ValueError` when there is none."""
        name = self.adapter()
        if name is None:
            raise ValueError(f"layer {self.layer_index}: no depth-routed adapter is active")
        return name

    def score(self, plan: RoutePlan, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """`scores` `[B, T]` (`[B, T, E]` per expert) of the gate's input, and what the gate adds.

        A gate that is not trained is a given: no gradient goes through its scores into the layers
        before it.
        """
        gate = self.gate(plan.adapter)
        if torch.is_grad_enabled() and not any(p.requires_grad for p in gate.parameters()):
            x = x.detach()
        out: dict[str, torch.Tensor] = gate(x)
        if plan.adapter in self.depth_route_predictor:
            out["predicted"] = self.depth_route_predictor[plan.adapter](x.detach())["scores"]
        return out

    def train(self, mode: bool = True) -> Routing:
        self.derived.clear()
        return super().train(mode)

    def forget_prepared(self) -> None:
        """Drop plans, cast weights and decoding steps; they are made anew from the weights."""
        self.prompts += 1
        for module in self.modules():
            if isinstance(module, Deriving):
                module.forget()

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Activate routed adapters. Names of other PEFT methods leave the active one as it is."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        ours = [name for name in names if isinstance(self.peft_configs.get(name), DepthRouteConfig)]
        if ours or not names:
            super().set_adapter(ours, inference_mode=inference_mode)
            if self._disable_adapters:
                self._stop_training()

    def enable_adapters(self, enabled: bool) -> None:
        """Turn routing on or off; what trained before it was turned off trains afterwards.

        PEFT's own method makes every parameter of the active adapter train, also of a frozen one.
        """
        if enabled is not self._disable_adapters:
            return
        self._disable_adapters = not enabled
        if not enabled:
            self._stop_training()
            return
        for name, parameter in self.named_parameters():
            if name in self.trained:
                parameter.requires_grad_(True)

    def _stop_training(self) -> None:
        """Freeze all parameters, and remember which of them trained."""
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        self.trained = frozenset(trained)
        for parameter in trained.values():
            parameter.requires_grad_(False)

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        self.projections.pop(adapter_name, None)
        self.runs.pop(adapter_name, None)
        self.forget_tuned(adapter_name)

    def forget_tuned(self, adapter_name: str) -> None:
        """Leave the choice of executors for this adapter to the table again."""
        self.tuned = {key: name for key, name in self.tuned.items() if key[0] != adapter_name}

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Nothing to merge here; other methods on the same model call it on every tuner layer."""

    def unmerge(self) -> None:
        """See `merge`."""

    def _move_adapter_to_device_of_base_layer(
        self, adapter_name: str, device: torch.device | None = None
    ) -> None:
        target = device or device_of(self._norms[0]["ffn"][0], *self._ffn)
        names = self.adapter_layer_names + self.other_param_names
        groups = [getattr(self, name) for name in names]
        for part in [group[adapter_name] for group in groups if adapter_name in group]:
            if target.type != "meta" and not any(p.is_meta for p in part.parameters()):
                part.to(target)

    def hold_in_base_dtype(self, name: str) -> None:
        """Give an adapter's weights the dtype of the FFN, or of the norms if that is quantised."""
        modules = *self._ffn, self._norms[0]["ffn"][0]
        held = (parameter.dtype for module in modules for parameter in module.parameters())
        dtype = next((dtype for dtype in held if dtype in _COMPUTES), None)
        if dtype is None:
            return
        for group in self.adapter_layer_names:
            parts: nn.ModuleDict = getattr(self, group)
            if name in parts:
                parts[name].to(dtype)

    def _initialised(self, module: Any, config: DepthRouteConfig, part: str) -> nn.Module:
        """`module`, its weights drawn from a generator by seed, layer and part only."""
        # Else they come from the adapter file.
        if not any(parameter.is_meta for parameter in module.parameters()):
            salt = {"gate": 1, "branch": 2, "target": 3, "predictor": 4, "memory": 5}[part]
            seed = (config.seed * 1_000_003 + self.layer_index * 7 + salt) % 2**63
            module.reset_parameters(torch.Generator().manual_seed(seed))
        return cast(nn.Module, module)
