"""`RoutingArguments`: loss weights and schedules of a training run.

Name, default and help of every one stand here once: the options of `hf-depthroute train` and the default weights of
`LOSSES` are read from these fields. The module imports nothing heavy, so that `--help` answers at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

JEPA_TARGETS = ("paired", "deranged")
ORACLES = ("all_full", "on_policy")
DISPATCHES = ("top1", "topk")


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
        capacity_weight: Weight of Router-Tuning's `ReLU(mean(M) - budget)`.
        depth_weight: Weight of token-selective attention's mean active probability; 0.001 in its paper.
        similarity_weight: Weight of the labels by the similarity of the stream before and after the full path (DLO).
        predictor_weight: Weight of the causal predictor's loss; applies with `causal_rule="predictor"`.
        exit_weight: Weight of the cross-entropy of early exits, one at the input of every routed layer.
        balance_weight: Weight of the load-balancing loss of a mixture-of-experts base's own routers.
        balance_dispatch: Its dispatch fractions: `"top1"`, or `"topk"` for all pairs that are sent.
        router_z_weight: Weight of the z-loss of the same routers.
        loss_weights: Weights of rows that other packages have added to `LOSSES`, by name, such as `{"entropy": 0.01}`
            (or the same as JSON text); a row that is not named here has its own default weight.
        controller_step: How far one optimizer step moves a threshold of an adapter with `selection="controller"`.
        fused_loss: Compute the language-model loss without logits wherever model, losses and Trainer allow it
            (`DepthRouteTrainer.fused_loss_obstacle` says what does not). The value is the same.
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

    lm_weight: float = field(default=1.0, metadata={"help": "Weight of the language-model loss."})
    jepa_weight: float = field(default=1.0, metadata={"help": "Weight of the JEPA loss (JEPA gate only)."})
    jepa_targets: str = field(default="paired", metadata={"help": "paired, or deranged (an ablation)."})
    util_weight: float = field(default=1.0, metadata={"help": "Weight of the regression on the oracle's labels."})
    rank_weight: float = field(default=0.2, metadata={"help": "Weight of the ranking by the oracle's labels."})
    budget_weight: float = field(default=1.0, metadata={"help": "Weight of the budget loss."})
    alive_weight: float = field(default=0.5, metadata={"help": "Weight of the alive loss."})
    alive_min: float = field(default=0.05, metadata={"help": "Mean probability below which the alive loss begins."})
    cgs_weight: float = field(default=0.0, metadata={"help": "Weight of counterfactual gate supervision."})
    z_weight: float = field(default=0.0, metadata={"help": "Weight of the z-loss on the scores' scale."})
    distill_weight: float = field(default=0.0, metadata={"help": "Weight of KL(dense || routed)."})
    capacity_weight: float = field(default=0.0, metadata={"help": "Weight of Router-Tuning's ReLU(share - budget)."})
    depth_weight: float = field(default=0.0, metadata={"help": "Weight of the mean active probability (TSA)."})
    similarity_weight: float = field(default=0.0, metadata={"help": "Weight of the labels by similarity (DLO)."})
    predictor_weight: float = field(default=1.0, metadata={"help": "Weight of the causal predictor's loss."})
    exit_weight: float = field(default=0.0, metadata={"help": "Weight of the early exits' loss; for gate exit."})
    balance_weight: float = field(default=0.0, metadata={"help": "Weight of the base's expert balance (Switch)."})
    balance_dispatch: str = field(default="top1", metadata={"help": "Fractions that are balanced: top1 or topk."})
    router_z_weight: float = field(default=0.0, metadata={"help": "Weight of the base's router z-loss."})
    loss_weights: dict[str, float] | str | None = field(
        default=None, metadata={"help": "JSON: weights of rows that were added to LOSSES, by name."}
    )
    controller_step: float = field(default=0.01, metadata={"help": "Step of the threshold controller."})
    fused_loss: bool = field(default=True, metadata={"help": "Compute the loss without logits where possible."})
    oracle: str = field(default="none", metadata={"help": "Labels of util and rank: none, all_full or on_policy."})
    oracle_window: int = field(default=8, metadata={"help": "Tokens whose loss a label looks at."})
    oracle_gamma: float = field(default=0.5, metadata={"help": "Decay of that window."})
    oracle_warmup: int = field(default=100, metadata={"help": "First step with labels."})
    oracle_interval: int = field(default=5, metadata={"help": "Steps between refreshes of the labels."})
    cgs_warmup: int = field(default=500, metadata={"help": "First step with counterfactual gate supervision."})
    cgs_interval: int = field(default=4, metadata={"help": "Steps between refreshes of its labels."})
    budget_start: float = field(default=1.0, metadata={"help": "Budget at step 0 of the budget schedule."})
    budget_schedule_steps: int = field(default=0, metadata={"help": "Steps of the budget schedule; 0 for none."})
    temperature_start: float = field(default=2.0, metadata={"help": "Gate temperature at step 0 of its schedule."})
    temperature_schedule_steps: int = field(
        default=0, metadata={"help": "Steps of the temperature schedule; 0 for none."}
    )

    def check(self) -> None:
        """Raise `ConfigError` on a value out of range."""
        from .config_rules import ConfigError, check_budget

        check_budget(self.budget_start)
        self.loss_weights = self._read_loss_weights()
        numbers = {f"{name}_weight": weight for name, weight in self.weights().items()}
        for name, number in (numbers | {"alive_min": self.alive_min, "controller_step": self.controller_step}).items():
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < float("inf"):
                raise ConfigError(f"{name}={number!r} must be a finite number of at least 0")
        choices = {"oracle": ("none", *ORACLES), "jepa_targets": JEPA_TARGETS, "balance_dispatch": DISPATCHES}
        for name, allowed in choices.items():
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
        """The weight of every row of `LOSSES`."""
        from .losses import LOSSES

        outside = self.loss_weights if isinstance(self.loss_weights, dict) else {}
        return {
            name: getattr(self, f"{name}_weight") if hasattr(self, f"{name}_weight") else outside.get(name, term.weight)
            for name, term in LOSSES.items()
        }

    def _read_loss_weights(self) -> dict[str, float] | None:
        from .config_rules import ConfigError
        from .losses import LOSSES

        given: Any = self.loss_weights
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise ConfigError(f"loss_weights={given!r} is not JSON: {error}") from error
        if given is not None and not isinstance(given, dict):
            raise ConfigError(f"loss_weights={given!r} must map names of losses to weights")
        for name in given or {}:
            if hasattr(self, f"{name}_weight"):
                raise ConfigError(f"loss_weights: {name!r} has an argument of its own; use {name}_weight")
            if name not in LOSSES:
                raise ConfigError(
                    f"loss_weights: there is no loss {name!r}; import what adds it to LOSSES, or use one of: "
                    f"{', '.join(LOSSES)}"
                )
        return given

    def uses_oracle(self) -> bool:
        return self.oracle != "none" and (self.util_weight > 0 or self.rank_weight > 0)

    def forks(self) -> bool:
        """Whether a loss runs more than the model's own forward pass."""
        return self.uses_oracle() or self.cgs_weight > 0 or self.distill_weight > 0
