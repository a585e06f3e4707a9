"""The training objective: loss weights and schedules, when labels are refreshed, and what is logged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .calibration import active_routings, quantile_tables
from .config import ConfigError, check_budget
from .forks import Prefix, observe_prefix
from .losses import JEPA_TARGETS, LOSSES, diagnostics, routing_losses
from .oracle import ORACLES, UtilityLabels, prefix_utility
from .trace import RouteTrace, record_routes, routings

_TEMPERATURE_DECAY = 0.99  # of the counterfactual temperature's moving average


@dataclass
class RoutingArguments:
    """Loss weights and schedules of a routed training run.

    Args:
        lm_weight: Weight of the language-model loss.
        jepa_weight: Weight of the JEPA alignment loss (JEPA gate only).
        jepa_targets: `"paired"`, or `"deranged"`: every token is aligned with the outcome of another one.
        util_weight: Weight of the regression of scores on the oracle's labels; applies when there is an `oracle`.
        rank_weight: Weight of the pairwise ranking by the oracle's labels; applies when there is an `oracle`.
        budget_weight: Weight of the budget loss.
        alive_weight: Weight of the alive loss.
        alive_min: `p_min` of the alive loss.
        cgs_weight: Weight of counterfactual gate supervision; with 0 its labels are not computed.
        z_weight: Weight of the z-loss on the scores' scale.
        distill_weight: Weight of the divergence from the dense model, which runs once more per step.
        oracle: Where the labels of `util` and `rank` come from: `"all_full"` (other routed layers run full),
            `"on_policy"` (they follow the gate), or `"none"`.
        oracle_window: `W`, tokens whose loss a label looks at.
        oracle_gamma: Decay of the window.
        oracle_warmup: First optimizer step with labels.
        oracle_interval: Steps from one refresh of the labels to the next; in between `util` and `rank` are absent.
        cgs_warmup: The same for counterfactual gate supervision, which labels one layer per refresh, in turn.
        cgs_interval: Steps between its refreshes.
        budget_start: Budget at step 0; it falls linearly to the adapter's over `budget_schedule_steps`.
        budget_schedule_steps: Length of the budget schedule in optimizer steps; 0 for none.
        temperature_start: Gate temperature at step 0; it moves linearly to the adapter's over
            `temperature_schedule_steps`.
        temperature_schedule_steps: Length of the temperature schedule in optimizer steps; 0 for none.
    """

    lm_weight: float = field(default=LOSSES["lm"].weight, metadata={"help": "weight of the language-model loss"})
    jepa_weight: float = field(default=LOSSES["jepa"].weight, metadata={"help": "weight of the JEPA loss"})
    jepa_targets: str = field(default="paired", metadata={"help": f"one of {JEPA_TARGETS}"})
    util_weight: float = field(default=LOSSES["util"].weight, metadata={"help": "weight of the utility regression"})
    rank_weight: float = field(default=LOSSES["rank"].weight, metadata={"help": "weight of the pairwise ranking"})
    budget_weight: float = field(default=LOSSES["budget"].weight, metadata={"help": "weight of the budget loss"})
    alive_weight: float = field(default=LOSSES["alive"].weight, metadata={"help": "weight of the alive loss"})
    alive_min: float = field(default=0.05, metadata={"help": "p_min of the alive loss"})
    cgs_weight: float = field(default=LOSSES["cgs"].weight, metadata={"help": "weight of counterfactual supervision"})
    z_weight: float = field(default=LOSSES["z"].weight, metadata={"help": "weight of the z-loss"})
    distill_weight: float = field(default=LOSSES["distill"].weight, metadata={"help": "weight of KL(dense || routed)"})
    oracle: str = field(default="none", metadata={"help": f"labels of util and rank: none, or one of {ORACLES}"})
    oracle_window: int = field(default=8, metadata={"help": "tokens whose loss a label looks at"})
    oracle_gamma: float = field(default=0.5, metadata={"help": "decay of the window"})
    oracle_warmup: int = field(default=100, metadata={"help": "first optimizer step with labels"})
    oracle_interval: int = field(default=5, metadata={"help": "steps between refreshes of the labels"})
    cgs_warmup: int = field(default=500, metadata={"help": "first step with counterfactual supervision"})
    cgs_interval: int = field(default=4, metadata={"help": "steps between its refreshes"})
    budget_start: float = field(default=1.0, metadata={"help": "budget at step 0 of the budget schedule"})
    budget_schedule_steps: int = field(default=0, metadata={"help": "steps of the budget schedule; 0 for none"})
    temperature_start: float = field(default=2.0, metadata={"help": "gate temperature at step 0 of its schedule"})
    temperature_schedule_steps: int = field(default=0, metadata={"help": "steps of the temperature schedule"})

    def check(self) -> None:
        """Raise `ConfigError` on a value out of range."""
        check_budget(self.budget_start)
        for name in (*(f"{loss}_weight" for loss in LOSSES), "alive_min"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a finite number of at least 0")
        for name, allowed in (("oracle", ("none", *ORACLES)), ("jepa_targets", JEPA_TARGETS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not supported; use one of: {', '.join(allowed)}")
        if not 0 < self.temperature_start < float("inf"):
            raise ConfigError(f"temperature_start={self.temperature_start!r} must be a finite number above 0")
        if not 0 <= self.oracle_gamma <= 1:
            raise ConfigError(f"oracle_gamma={self.oracle_gamma!r} must be a number in [0, 1]")
        for name in ("oracle_window", "oracle_interval", "cgs_interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least 1")
        for name in ("budget_schedule_steps", "temperature_schedule_steps", "oracle_warmup", "cgs_warmup"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least 0")

    def weights(self) -> dict[str, float]:
        return {name: getattr(self, f"{name}_weight") for name in LOSSES}

    def uses_oracle(self) -> bool:
        return self.oracle != "none" and (self.util_weight > 0 or self.rank_weight > 0)

    def forks(self) -> bool:
        """Whether a loss runs more than the model's own forward pass."""
        return self.uses_oracle() or self.cgs_weight > 0 or self.distill_weight > 0


class RoutingObjective:
    """Adds the routing losses to a language-model loss, tracks thresholds, and collects what is logged.

    Args:
        arguments: Weights.
        model: The model with routed layers.

    Raises:
        ValueError: The model has no active depth-routed adapter.
    """

    def __init__(self, arguments: RoutingArguments, model: nn.Module) -> None:
        active_routings(model)
        self.arguments = arguments
        self.model = model
        self._step = 0
        self._temperature: torch.Tensor | None = None
        self._sums: dict[str, tuple[torch.Tensor, int]] = {}

    @contextmanager
    def watching(self) -> Iterator[tuple[RouteTrace, Prefix | None]]:
        """Around a forward pass, or many: what `__call__` needs to see of the last one."""
        observed = observe_prefix(self.model) if self.arguments.forks() else nullcontext()
        with record_routes(self.model) as trace, observed as prefix:
            yield trace, prefix

    def __call__(
        self,
        lm: torch.Tensor,
        watched: tuple[RouteTrace, Prefix | None],
        share: float,
        labels: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The loss to back-propagate for one batch; inside the `watching` block of its forward pass.

        Args:
            lm: The language-model loss; already divided by the number of accumulated batches if `share` is below 1.
            watched: From `watching`.
            share: This batch's part of the optimizer step, for terms that are means over the batch.
            labels: The batch's labels `[B, T]`; needed by `util`, `rank`, `cgs` and `distill`.
            logits: The model's logits `[B, T, V]`; needed by `distill`.

        Raises:
            ValueError: A term with a weight lacks what it needs.
        """
        trace, prefix = watched
        a = self.arguments
        inputs: dict[str, Any] = {"jepa_targets": a.jepa_targets}
        if prefix is not None:
            if labels is None:
                raise ValueError("the util, rank, cgs and distill losses need labels in the batch")
            if a.distill_weight > 0 and logits is None:
                raise ValueError("the distill loss needs the model's logits; turn off what removes them")
            inputs |= {"prefix": prefix, "labels": labels, "logits": logits}
            inputs |= self._refreshed(prefix, labels)
        terms = routing_losses(trace, lm, a.weights(), a.alive_min, **inputs)
        holders = active_routings(self.model)
        for holder, table in zip(holders, quantile_tables([trace[holder.layer_index] for holder in holders])):
            holder.active_quantiles().track(table)
        self._collect(terms, trace, share)
        zero = lm.new_zeros(())
        return terms.pop("lm", zero) + share * sum(terms.values(), zero)

    def _refreshed(self, prefix: Prefix, labels: torch.Tensor) -> dict[str, Any]:
        """The labels that are due at this step."""
        a, step = self.arguments, self._step
        due: dict[str, Any] = {}
        if a.uses_oracle() and step >= a.oracle_warmup and (step - a.oracle_warmup) % a.oracle_interval == 0:
            due["utility"] = prefix_utility(prefix, labels, a.oracle, a.oracle_window, a.oracle_gamma)
        if a.cgs_weight > 0 and step >= a.cgs_warmup and (step - a.cgs_warmup) % a.cgs_interval == 0:
            layers = [holder.layer_index for holder in active_routings(self.model)]
            layer = layers[(step - a.cgs_warmup) // a.cgs_interval % len(layers)]
            difference = prefix_utility(prefix, labels, "on_policy", window=1, layers=[layer])
            due |= {"counterfactual": difference, "counterfactual_temperature": self._adapt(difference[layer])}
        return due

    def _adapt(self, labels: UtilityLabels) -> torch.Tensor:
        """The counterfactual temperature: a moving average of the mean `|dl|`."""
        size = (labels.utility.abs() * labels.valid).sum() / labels.valid.sum().clamp(min=1)
        before = size if self._temperature is None else self._temperature
        self._temperature = torch.lerp(size, before, _TEMPERATURE_DECAY).clamp(min=1e-6)
        return self._temperature

    def schedule(self, step: int) -> None:
        """Set the budget and the temperature of optimizer step `step`."""
        self._step = step
        a = self.arguments
        for holder in active_routings(self.model):
            config = holder.active_config()
            holder.scheduled_budget = _ramp(step, a.budget_schedule_steps, a.budget_start, config.budget)
            holder.scheduled_temperature = _ramp(
                step, a.temperature_schedule_steps, a.temperature_start, config.gate_temperature
            )

    def end_schedule(self) -> None:
        for holder in routings(self.model):
            holder.scheduled_budget = holder.scheduled_temperature = None

    def pop_metrics(self) -> dict[str, float]:
        """Means since the last call: `loss_lm`, `loss_budget`, ..., and the per-layer diagnostics.

        Each over the batches that had it: `loss_util` over the refreshes.
        """
        metrics = {name: float(total) / count for name, (total, count) in self._sums.items()}
        self._sums = {}
        return metrics

    def _collect(self, terms: dict[str, torch.Tensor], trace: RouteTrace, share: float) -> None:
        weights = self.arguments.weights()
        values = {f"loss_{name}": term.detach() / weights[name] for name, term in terms.items()}
        if "loss_lm" in values:
            values["loss_lm"] = values["loss_lm"] / share
        for name, value in {**values, **diagnostics(trace)}.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, count + 1)


def _ramp(step: int, steps: int, start: float, end: float) -> float | None:
    return None if step >= steps else start + (end - start) * step / steps
