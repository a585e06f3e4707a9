"""`RoutePlan`: how one forward pass of one layer routes.

Shapes: B batch, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ..config.adapter import DepthRouteConfig
from ..parts.branches import version_key
from ..parts.gate import Gate
from ..parts.gates import GATES
from ..parts.rules import RULES
from ..parts.targets import TARGETS, TargetTraits
from .misuse import warn_of_thresholds
from .thresholds import Expected, ScoreQuantiles

if TYPE_CHECKING:
    from .routing import Routing
    from .state import PathMetric, Recorder

Kept = dict[tuple[str, int], torch.Tensor]
_KEPT_PLANS = 64  # with their steps: of as many budgets of requests as are in use at one time


@dataclass(frozen=True, eq=False)
class RoutePlan:
    """The plan of one forward pass of one layer, made before it runs.

    Attributes:
        layer_index: Index of the decoder layer.
        adapter: Name of the active adapter, with its `config`.
        gate: What the layer's gate says of itself.
        target: What it routes.
        rule: A row of `RULES`, or `"full"`: the base's layer runs, without the gate.
        mix: How the two paths make the output: `"hard"`, `"soft"`, `"scaled"`, `"scaled_sublayers"`
            or `"scaled_ffn"`.
        extras: What is recorded besides mask, scores and probs.
        observed: Those of them that losses asked for, `RunSettings.observed`.
        budget: The budget in force: the adapter's, or the training schedule's; NaN where the gate
            is soft.
        threshold: The score that a token has to reach, for the rules that use one. Read here,
            because training moves the quantile tables between a forward pass and its recomputation.
        temperature: `tau` of `p = sigmoid(u / tau)`.
        replayed: Bool `[B, T]`; decisions to use instead of the rule's. Of a soft gate, float32:
            its `p`.
        last_tokens: Bool `[B, T]`; tokens that run full whatever the rule says
            (`phases="prefill"`), their `p` is 1.
        recorders: Traces and counters that want to know.
        everything: Every token runs full, whatever its score (a budget of 1 at inference, a
            decoding step with `phases="prefill"`), and the host knows it.
        kept: Bool `[B, T]` by adapter and layer index: the tokens that have not left early in this
            forward pass. Layers add theirs.
        earlier: `[B, P]`, the scores of each sequence's earlier tokens, for the rule `"running"`;
            None without any.
        expected: What that rule knows of the layer's scores beforehand.
        executor: How the routed part is run at inference, `"auto"` or a row of
            `execution.executors.EXECUTORS`.
        training: Whether this is a step of training: in training mode, with gradients.
    """

    layer_index: int
    adapter: str
    config: DepthRouteConfig
    gate: type[Gate]
    target: TargetTraits
    rule: str
    mix: str
    extras: tuple[str, ...]
    budget: float
    threshold: torch.Tensor | float
    temperature: float
    replayed: torch.Tensor | None
    recorders: tuple[Recorder, ...]
    observed: Mapping[str, PathMetric] = field(default_factory=dict)
    last_tokens: torch.Tensor | None = None
    everything: bool = False
    kept: Kept | None = None
    earlier: torch.Tensor | None = None
    expected: Expected | None = None
    executor: str = "auto"
    training: bool = False

    @property
    def compared(self) -> torch.Tensor | float | None:
        """The threshold that scores are compared with; None if something else decides."""
        rule = RULES.get(self.rule)
        if rule is None or not rule.compares or self.replayed is not None or self.gate.soft:
            return None
        return self.threshold

    @property
    def by_token(self) -> bool:
        """Whether a token is decided by itself alone, as `Rule.by_token`."""
        rule = RULES.get(self.rule)
        return rule is not None and rule.by_token


class Asked(NamedTuple):
    """The configuration's values for a plan, read once: other threads may change them."""

    budget: float
    fixed_threshold: float | None
    temperature: float
    rule: str  # by which inference decides
    share_shifts: Mapping[int, float] | None


def shape_class(batch: int, length: int) -> tuple[bool, int]:
    """Shapes that cost about the same: decode or not, and the rows to the next power of two."""
    return length == 1, (batch * length - 1).bit_length()


def plan_of(
    routing: Routing,
    training: bool,
    rows: tuple[int, int] = (0, 0),
    last_tokens: torch.Tensor | None = None,
    kept: Kept | None = None,
    adapters: Mapping[int, str] | None = None,
) -> RoutePlan | None:
    """How a forward pass routes; None when it runs as the base does.

    It is the plan made for the same settings and thresholds before, or a new one.

    Args:
        routing: The layer's adapter state.
        training: Whether the layer trains.
        rows: Batch size and positions of the input; `tune_execution` may have chosen an executor
            for them.
        last_tokens: Bool `[B, T]`, the last tokens of every sequence. With `phases="prefill"` they
            run in full.
        kept: The tokens that have not left early in this forward pass.
        adapters: The adapter of each layer that is routed in this pass, by layer index; None: those
            that are active now.
    """
    name = routing.adapter() if adapters is None else adapters.get(routing.layer_index)
    if name is None:
        return None
    config = routing.config(name)
    settings = routing.state.settings
    temperature = cast(float, config.gate_temperature)
    asked = Asked(
        config.budget,
        config.fixed_threshold,
        temperature,
        config.inference_rule,
        config.share_shifts,
    )
    executor = settings.executor
    tuned = routing.tuned and executor == "auto"
    if tuned and not GATES[config.gate_of(routing.layer_index)].static:
        executor = routing.tuned.get((name, *shape_class(*rows)), executor)
    told = settings.in_full is not None
    as_served = told or (not training and settings.selection is None)
    prompts_only = config.phases == "prefill" and as_served
    if not prompts_only:
        last_tokens = None
    only_last = prompts_only and not told and rows[1] <= config.last_in_full
    now = None
    if not (training or settings.recorders or settings.replay is not None):
        controller: Any = routing.depth_route_controller._modules.get(name)
        table = cast(ScoreQuantiles, routing.depth_route_quantiles[name]).values
        now = version_key(table, None if controller is None else controller.threshold)
    given = routing, name, config, asked, training, executor, only_last
    if now is None:
        plan = make_plan(*given)
    else:
        stamped = asked, now
        prompts = routing.prompts  # before anything is read for the plan: another one may begin
        key = (name, executor, only_last, settings.budget, settings.selection)
        held: Any = routing.derived.get(key)
        same = held is not None and held[0] == stamped
        if not same or held[1].config is not config or held[2] != prompts:
            if len(routing.derived) > _KEPT_PLANS:
                routing.derived.clear()
            plan = make_plan(*given)
            if held is not None:
                routing.derived.pop(held[1], None)  # its step
            if not same:
                warn_of_thresholds(routing, plan)
            held = routing.derived[key] = stamped, plan, prompts
        plan = held[1]
    if plan.gate.exits:
        plan = replace(plan, kept=kept)
    if last_tokens is None:
        return plan
    return replace(plan, last_tokens=last_tokens)


def make_plan(
    routing: Routing,
    name: str,
    config: DepthRouteConfig,
    asked: Asked,
    training: bool,
    executor: str,
    only_last: bool,
) -> RoutePlan:
    """The next plan of adapter `name`, under the settings of the calling thread.

    `only_last`: the pass has no tokens but last ones, which run in full whatever the rule says.
    """
    state = routing.state
    settings = state.settings
    budget = state.budget(asked.budget, training)
    threshold = _threshold_of(routing, name, asked, budget)
    gate = GATES[config.gate_of(routing.layer_index)]
    target = TARGETS[config.target_of(routing.layer_index)]
    replayed = None
    if settings.replay is not None and (record := settings.replay.get(routing.layer_index)):
        replayed = record.mask
        if gate.soft:
            replayed = record.probs
    trained = cast(str, config.selection) if training else None
    rule = _rule_of(gate, settings.selection or trained or asked.rule)
    if rule == "running" and budget >= 1.0:
        rule = "threshold"
    mix = _mix_of(gate, config.scale_by_gate, rule)
    unasked = asked.fixed_threshold is None and not gate.exits and replayed is None
    chosen = rule == "threshold" and mix == "hard" and budget >= 1.0
    everything = not training and chosen and unasked
    if only_last:
        mix = "hard"
        if replayed is None:  # as with a budget of 1, whatever decides elsewhere
            rule = "threshold"
            threshold = -torch.inf
            everything = True
    if (executor == "full" and not training) or (everything and not settings.recorders):
        rule = "full"
    expected = None
    if rule == "running":
        table = cast(ScoreQuantiles, routing.depth_route_quantiles[name])
        expected = Expected(table.values, config.share_shift(routing.layer_index))
    return RoutePlan(
        layer_index=routing.layer_index,
        adapter=name,
        config=config,
        gate=gate,
        target=target,
        rule=rule,
        mix=mix,
        extras=_extras(routing, name, gate, target, training),
        budget=math.nan if gate.soft else budget,
        threshold=threshold,
        temperature=state.temperature(asked.temperature, training),
        replayed=replayed,
        recorders=settings.recorders,
        observed=settings.observed if training else {},
        everything=everything,
        expected=expected,
        executor=executor,
        training=training,
    )


def _threshold_of(routing: Routing, name: str, asked: Asked, budget: float) -> torch.Tensor | float:
    """The score that inference compares with: fixed, the controller's or the table's."""
    if asked.fixed_threshold is not None:
        return asked.fixed_threshold
    if budget >= 1.0:
        return -torch.inf
    return routing.threshold(name, budget)


def _rule_of(gate: type[Gate], asked: str) -> str:
    """The rule of a layer with such a gate, where `asked` is that of the others."""
    if gate.static:
        return "static"
    if gate.soft:
        return "soft"
    return asked


def _mix_of(gate: type[Gate], scale_by_gate: bool, rule: str) -> str:
    if gate.scales_sublayers:
        return "scaled_sublayers"
    if gate.scales_ffn:
        return "scaled_ffn"
    if scale_by_gate:
        return "scaled"
    if rule == "soft":
        return "soft"
    return "hard"


def _extras(
    routing: Routing, name: str, gate: type[Gate], target: TargetTraits, training: bool
) -> tuple[str, ...]:
    extras = gate.outputs
    if name in routing.depth_route_predictor:
        extras += ("predicted",)
    if target.per_pair:
        return (*extras, "expert_index")
    if training and name in routing.projections:
        extras += ("z_full", "z_cheap")
    if training:
        extras += tuple(routing.state.settings.observed)
    return extras
