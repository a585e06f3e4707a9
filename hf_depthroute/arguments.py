"""`RoutingArguments`: loss weights and schedules of a training run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from .balancing import DISPATCHES
from .config import ConfigError, check_budget
from .losses import JEPA_TARGETS, LOSSES
from .oracle import ORACLES


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
    capacity_weight: float = field(default=LOSSES["capacity"].weight, metadata={"help": "weight of the capacity loss"})
    depth_weight: float = field(default=LOSSES["depth"].weight, metadata={"help": "weight of the active fraction"})
    similarity_weight: float = field(
        default=LOSSES["similarity"].weight, metadata={"help": "weight of the labels by similarity"}
    )
    predictor_weight: float = field(
        default=LOSSES["predictor"].weight, metadata={"help": "weight of the causal predictor's loss"}
    )
    exit_weight: float = field(default=LOSSES["exit"].weight, metadata={"help": "weight of the early exits' loss"})
    balance_weight: float = field(default=LOSSES["balance"].weight, metadata={"help": "weight of expert balance"})
    balance_dispatch: str = field(default="top1", metadata={"help": f"one of {DISPATCHES}"})
    router_z_weight: float = field(
        default=LOSSES["router_z"].weight, metadata={"help": "weight of the expert routers' z-loss"}
    )
    loss_weights: dict[str, float] | str | None = field(
        default=None, metadata={"help": "weights of rows added to LOSSES, by name"}
    )
    controller_step: float = field(default=0.01, metadata={"help": "step of the threshold controller"})
    fused_loss: bool = field(default=True, metadata={"help": "compute the language-model loss without logits"})
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
        outside = self.loss_weights if isinstance(self.loss_weights, dict) else {}
        return {
            name: getattr(self, f"{name}_weight") if hasattr(self, f"{name}_weight") else outside.get(name, term.weight)
            for name, term in LOSSES.items()
        }

    def _read_loss_weights(self) -> dict[str, float] | None:
        given = self.loss_weights
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
