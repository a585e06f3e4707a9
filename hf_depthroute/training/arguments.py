"""`RoutingArguments`: loss weights and schedules of a training run.

Name, default and description of every one stand here once: the options of `hf-depthroute train` and
the default weights of `LOSSES` are read from these fields. The module imports nothing heavy, so
that `--help` answers at once; `losses` fills in the rows of `LOSSES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ..config.fields import with_help

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..routing.state import PathMetric
    from .losses import LossInputs

ORACLES = ("all_full", "on_policy")


@dataclass(frozen=True)
class LossTerm:
    """A row of `LOSSES`.

    Attributes:
        weight: The default weight.
        compute: The loss; None if the term does not apply.
        observe: Where the loss needs more of a forward pass than its trace: a context manager of
            the model, around the pass. What it yields is `inputs.observed[observe]`, once for all
            rows with the same one.
        metrics: Where it needs a number of both paths of a token: functions of the stream before
            the routed part, after the full path and after the cheap one, each `[B, T, d]`, to
            `[B, T]`. Each record of the trace has their results, without gradient, by these names.
    """

    weight: float
    compute: Callable[[LossInputs], torch.Tensor | None]
    observe: Callable[[nn.Module], AbstractContextManager[Any]] | None = None
    metrics: Mapping[str, PathMetric] = field(default_factory=dict)


# Every term of the training loss by its name; another package adds its own.
LOSSES: dict[str, LossTerm] = {}


@with_help
@dataclass
class RoutingArguments:
    """Loss weights and schedules of a routed training run.

    Args:
        train_gates: Train the gates; without it they decide as they are, and the branches learn.
        lm_weight: Weight of the language-model loss.
        jepa_weight: Weight of the JEPA alignment loss (JEPA gate only).
        jepa_targets: `"paired"`, or `"deranged"`: every token is aligned with the outcome of
            another one.
        util_weight: Weight of the regression of scores on the oracle's labels; applies when there
            is an `oracle`.
        rank_weight: Weight of the pairwise ranking by the oracle's labels; applies when there is an
            `oracle`.
        budget_weight: Weight of the budget loss.
        alive_weight: Weight of the alive loss.
        alive_min: Mean gate probability below which the alive loss begins, its `p_min`.
        cgs_weight: Weight of counterfactual gate supervision; with 0 its labels are not computed.
        z_weight: Weight of the z-loss on the scores' scale.
        distill_weight: Weight of the divergence from the dense model, which runs once more per
            step.
        capacity_weight: Weight of Router-Tuning's `ReLU(mean(M) - budget)`.
        depth_weight: Weight of token-selective attention's mean active probability; 0.001 in its
            paper.
        squared_depth_weight: Weight of FlexiDepth's penalty on the square of a token's depth; 1e-4,
            then 1e-5 in the code of its authors.
        similarity_weight: Weight of the labels by the similarity of the stream before and after the
            full path (DLO).
        recoverability_weight: Weight of the labels by what the cheap path misses of the full one.
        predictor_weight: Weight of the causal predictor's loss; applies with
            `causal_rule="predictor"`.
        exit_weight: Weight of the cross-entropy of early exits, one at the input of every routed
            layer.
        loss_weights: Weights of rows that other packages have added to `LOSSES`, by name, as a
            dictionary or as JSON text: `{"entropy": 0.01}`. A row that is not named here has its
            own default weight.
        controller_step: How far one optimizer step moves a threshold of an adapter with
            `selection="controller"`.
        fused_loss: Compute the language-model loss without logits wherever model, losses and
            Trainer allow it. The value is the same. `DepthRouteTrainer.fused_loss_obstacle` says
            what does not allow it.
        oracle: Where the labels of `util` and `rank` come from: `"all_full"` (other routed layers
            run full), `"on_policy"` (they follow the gate), or `"none"`.
        oracle_window: `W`, tokens whose loss a label looks at.
        oracle_gamma: Decay of that window, in [0, 1].
        oracle_warmup: First optimizer step with labels.
        oracle_interval: Steps from one refresh of the labels to the next; in between `util` and
            `rank` are absent.
        cgs_warmup: First optimizer step with counterfactual gate supervision, which labels one
            layer per refresh, in turn.
        cgs_interval: Steps from one refresh of its labels to the next.
        budget_start: Budget at step 0; it falls linearly to the adapter's over
            `budget_schedule_steps`.
        budget_schedule_steps: Length of the budget schedule in optimizer steps; 0 for none.
        temperature_start: Gate temperature at step 0; it moves linearly to the adapter's over
            `temperature_schedule_steps`.
        temperature_schedule_steps: Length of the temperature schedule in optimizer steps; 0 for
            none.
    """

    train_gates: bool = True
    lm_weight: float = 1.0
    jepa_weight: float = 1.0
    jepa_targets: str = "paired"
    util_weight: float = 1.0
    rank_weight: float = 0.2
    budget_weight: float = 1.0
    alive_weight: float = 0.5
    alive_min: float = 0.05
    cgs_weight: float = 0.0
    z_weight: float = 0.0
    distill_weight: float = 0.0
    capacity_weight: float = 0.0
    depth_weight: float = 0.0
    squared_depth_weight: float = 0.0
    similarity_weight: float = 0.0
    recoverability_weight: float = 0.0
    predictor_weight: float = 1.0
    exit_weight: float = 0.0
    loss_weights: dict[str, float] | str | None = None
    controller_step: float = 0.01
    fused_loss: bool = True
    oracle: str = "none"
    oracle_window: int = 8
    oracle_gamma: float = 0.5
    oracle_warmup: int = 100
    oracle_interval: int = 5
    cgs_warmup: int = 500
    cgs_interval: int = 4
    budget_start: float = 1.0
    budget_schedule_steps: int = 0
    temperature_start: float = 2.0
    temperature_schedule_steps: int = 0

    def check(self) -> None:
        """Raise `ConfigError` on a value out of range."""
        from ..config.rules import ConfigError, check_budget

        check_budget(self.budget_start)
        self._check_loss_weights()
        numbers: dict[str, Any] = {f"{name}_weight": w for name, w in self.weights().items()}
        numbers |= {"alive_min": self.alive_min, "controller_step": self.controller_step}
        for name, number in numbers.items():
            counts = isinstance(number, (int, float)) and not isinstance(number, bool)
            if not counts or not 0 <= number < float("inf"):
                raise ConfigError(f"{name}={number!r} must be a finite number of at least 0")
        words = {"oracle": ("none", *ORACLES), "jepa_targets": ("paired", "deranged")}
        for name, allowed in words.items():
            word = getattr(self, name)
            if word not in allowed:
                raise ConfigError(
                    f"{name}={word!r} is not supported; use one of: {', '.join(allowed)}"
                )
        if not 0 < self.temperature_start < float("inf"):
            raise ConfigError(
                f"temperature_start={self.temperature_start!r} must be a finite number above 0"
            )
        if not 0 <= self.oracle_gamma <= 1:
            raise ConfigError(f"oracle_gamma={self.oracle_gamma!r} must be a number in [0, 1]")
        least = {
            "oracle_window": 1,
            "oracle_interval": 1,
            "cgs_interval": 1,
            "oracle_warmup": 0,
            "cgs_warmup": 0,
            "budget_schedule_steps": 0,
            "temperature_schedule_steps": 0,
        }
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least {minimum}")

    def _check_loss_weights(self) -> None:
        from ..config.rules import ConfigError

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
                raise ConfigError(
                    f"loss_weights: {name!r} has an argument of its own; use {name}_weight"
                )
            if name not in LOSSES:
                known = ", ".join(dict.fromkeys((*OWN_LOSSES, *LOSSES)))
                raise ConfigError(
                    f"loss_weights: there is no loss {name!r}; import what adds it to LOSSES, or "
                    f"use one of: {known}"
                )
        self.loss_weights = given

    def weights(self) -> dict[str, float]:
        """The weight of every row of `LOSSES`."""
        outside = {}
        if isinstance(self.loss_weights, dict):
            outside = self.loss_weights
        added = {name: outside.get(name, term.weight) for name, term in LOSSES.items()}
        return added | {name: getattr(self, f"{name}_weight") for name in OWN_LOSSES}

    def uses_oracle(self) -> bool:
        return self.oracle != "none" and (self.util_weight > 0 or self.rank_weight > 0)

    def forks(self) -> bool:
        """Whether a loss runs more than the model's own forward pass."""
        return self.uses_oracle() or self.cgs_weight > 0 or self.distill_weight > 0


OWN_LOSSES = [
    f.name.removesuffix("_weight") for f in fields(RoutingArguments) if f.name.endswith("_weight")
]
