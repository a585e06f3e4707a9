"""Training: `DepthRouteTrainer`, its arguments, and a callback for people who keep their own Trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .calibration import active_routings, quantile_tables
from .config import ConfigError, check_budget
from .losses import LOSSES, diagnostics, routing_losses
from .trace import RouteTrace, record_routes, routings


@dataclass
class RoutingArguments:
    """Loss weights and schedules of a routed training run.

    Args:
        jepa_weight: Weight of the JEPA alignment loss (JEPA gate only).
        budget_weight: Weight of the budget loss.
        alive_weight: Weight of the alive loss.
        alive_min: `p_min` of the alive loss.
        budget_start: Budget at step 0; it falls linearly to the adapter's over `budget_schedule_steps`.
        budget_schedule_steps: Length of the budget schedule in optimizer steps; 0 for none.
        temperature_start: Gate temperature at step 0; it moves linearly to the adapter's over
            `temperature_schedule_steps`.
        temperature_schedule_steps: Length of the temperature schedule in optimizer steps; 0 for none.
    """

    lm_weight: float = field(default=LOSSES["lm"].weight, metadata={"help": "weight of the language-model loss"})
    jepa_weight: float = field(default=LOSSES["jepa"].weight, metadata={"help": "weight of the JEPA loss"})
    budget_weight: float = field(default=LOSSES["budget"].weight, metadata={"help": "weight of the budget loss"})
    alive_weight: float = field(default=LOSSES["alive"].weight, metadata={"help": "weight of the alive loss"})
    alive_min: float = field(default=0.05, metadata={"help": "p_min of the alive loss"})
    budget_start: float = field(default=1.0, metadata={"help": "budget at step 0 of the budget schedule"})
    budget_schedule_steps: int = field(default=0, metadata={"help": "steps of the budget schedule; 0 for none"})
    temperature_start: float = field(default=2.0, metadata={"help": "gate temperature at step 0 of its schedule"})
    temperature_schedule_steps: int = field(default=0, metadata={"help": "steps of the temperature schedule"})

    def check(self) -> None:
        """Raise `ConfigError` on a value out of range."""
        check_budget(self.budget_start)
        for name in ("lm_weight", "jepa_weight", "budget_weight", "alive_weight", "alive_min"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a finite number of at least 0")
        if not 0 < self.temperature_start < float("inf"):
            raise ConfigError(f"temperature_start={self.temperature_start!r} must be a finite number above 0")
        for name in ("budget_schedule_steps", "temperature_schedule_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least 0")

    def weights(self) -> dict[str, float]:
        return {name: getattr(self, f"{name}_weight") for name in LOSSES}


@dataclass
class DepthRouteTrainingArguments(TrainingArguments, RoutingArguments):
    """`transformers.TrainingArguments` plus `RoutingArguments`.

    The optimizer's defaults are the paper's: AdamW, lr 2e-4, weight decay 0.01, clip 1.0, cosine to 1 % of lr. Set
    `warmup_steps` to fit the length of your run (the paper: 1,000 of 20,000).
    """

    learning_rate: float = field(default=2e-4, metadata={"help": "peak learning rate"})
    weight_decay: float = field(default=0.01, metadata={"help": "AdamW weight decay"})
    lr_scheduler_type: str = field(default="cosine_with_min_lr", metadata={"help": "learning-rate schedule"})
    lr_scheduler_kwargs: dict[str, Any] | str | None = field(
        default_factory=lambda: {"min_lr_rate": 0.01}, metadata={"help": "arguments of the schedule"}
    )

    def __post_init__(self) -> None:
        self.check()
        if self.lr_scheduler_type != "cosine_with_min_lr" and self.lr_scheduler_kwargs == {"min_lr_rate": 0.01}:
            self.lr_scheduler_kwargs = {}
        super().__post_init__()


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
        self._sums: dict[str, torch.Tensor] = {}
        self._count = 0

    def __call__(self, lm: torch.Tensor, trace: RouteTrace, share: float) -> torch.Tensor:
        """The loss to back-propagate for one batch.

        Args:
            lm: The language-model loss; already divided by the number of accumulated batches if `share` is below 1.
            trace: Of the same forward pass.
            share: This batch's part of the optimizer step, for terms that are means over the batch.
        """
        terms = routing_losses(trace, lm, self.arguments.weights(), self.arguments.alive_min)
        holders = active_routings(self.model)
        for holder, table in zip(holders, quantile_tables([trace[holder.layer_index] for holder in holders])):
            holder.active_quantiles().track(table)
        self._collect(terms, trace, share)
        zero = lm.new_zeros(())
        return terms.pop("lm", zero) + share * sum(terms.values(), zero)

    def schedule(self, step: int) -> None:
        """Set the budget and the temperature of optimizer step `step`."""
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
        """Means since the last call: `loss_lm`, `loss_budget`, ..., and the per-layer diagnostics."""
        metrics = {name: float(total) / self._count for name, total in self._sums.items()}
        self._sums, self._count = {}, 0
        return metrics

    def _collect(self, terms: dict[str, torch.Tensor], trace: RouteTrace, share: float) -> None:
        weights = self.arguments.weights()
        values = {f"loss_{name}": term.detach() / weights[name] for name, term in terms.items()}
        if "loss_lm" in values:
            values["loss_lm"] = values["loss_lm"] / share
        for name, value in {**values, **diagnostics(trace)}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._count += 1


class _RoutingCallback(TrainerCallback):
    """Schedules and logging; shared by `DepthRouteTrainer` and `DepthRouteCallback`."""

    objective: RoutingObjective | None = None

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.objective is not None:
            self.objective.schedule(state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if self.objective is not None and logs is not None and "loss" in logs:
            metrics = self.objective.pop_metrics()
            logs.update(metrics)
            state.log_history[-1].update(metrics)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.objective is not None:
            self.objective.end_schedule()


class DepthRouteCallback(_RoutingCallback):
    """Routing losses, schedules and diagnostics for a plain `transformers.Trainer`.

        trainer = Trainer(model=model, ...)
        trainer.add_callback(DepthRouteCallback(trainer))

    While training runs, the model's `loss` output includes the routing losses, and every log entry gets the loss
    terms and the per-layer diagnostics. Without the trainer as an argument it works too
    (`callbacks=[DepthRouteCallback()]`), but reporting integrations that run before it (TensorBoard) do not see the
    added values; `trainer.state.log_history` has them. Nor does the callback know then that the last step of an epoch
    accumulates fewer batches than the others; its routing losses count for less.

    Args:
        trainer: The trainer it is added to.
        arguments: Weights and schedules.
    """

    def __init__(self, trainer: Trainer | None = None, arguments: RoutingArguments | None = None) -> None:
        self.trainer = trainer
        self.arguments = arguments or RoutingArguments()
        self.arguments.check()
        self._open = ExitStack()

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._open.close()  # left open by a training run that ended in an exception
        model = kwargs["model"]
        self.objective = RoutingObjective(self.arguments, model)
        trace = self._open.enter_context(record_routes(model))
        hook = _add_losses(self.objective, trace, args, self.trainer)
        self._open.callback(model.register_forward_hook(hook, with_kwargs=True).remove)
        if self.trainer is not None:
            _move_first(self.trainer, self)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_end(args, state, control, **kwargs)
        self._open.close()


class DepthRouteTrainerMixin:
    """Adds the routing losses in `compute_loss`, whatever the Trainer class takes its language-model loss from."""

    args: TrainingArguments
    model: Any
    add_callback: Any
    model_accepts_loss_kwargs: bool
    compute_loss_func: Any
    current_gradient_accumulation_steps: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        arguments = self.args if isinstance(self.args, RoutingArguments) else RoutingArguments()
        self.routing_objective = RoutingObjective(arguments, self.model)
        callback = _RoutingCallback()
        callback.objective = self.routing_objective
        self.add_callback(callback)
        _move_first(self, callback)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The Trainer's loss plus the routing losses; in evaluation, the Trainer's loss alone."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        with record_routes(model) as trace:
            lm, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)  # type: ignore[misc]
        # Where the Trainer knows the tokens of the whole step, the loss is divided by them and not by the number of
        # accumulated batches; the routing terms, means over one batch, have to be.
        divided = getattr(self, "loss_is_scaled_for_ga", None)
        if divided is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            divided = counted or self.compute_loss_func is not None
        share = 1.0 / self.current_gradient_accumulation_steps if divided else 1.0
        loss = self.routing_objective(lm, trace, share)
        return (loss, outputs) if return_outputs else loss


class DepthRouteTrainer(DepthRouteTrainerMixin, Trainer):
    """`transformers.Trainer` that adds the routing losses and logs them.

    Takes the Trainer's arguments; pass `DepthRouteTrainingArguments` as `args` to set weights and schedules.

    Raises:
        ValueError: The model has no active depth-routed adapter.
    """


def _add_losses(
    objective: RoutingObjective, trace: RouteTrace, args: TrainingArguments, trainer: Trainer | None
) -> Callable[..., None]:
    def hook(module: nn.Module, positional: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()) or getattr(output, "loss", None) is None:
            return
        share = 1.0
        if kwargs.get("num_items_in_batch") is not None:  # the loss is divided by the tokens of the whole step
            # The last step of an epoch may accumulate fewer batches.
            share = 1.0 / (trainer.current_gradient_accumulation_steps if trainer else args.gradient_accumulation_steps)
            if args.average_tokens_across_devices:  # and the Trainer multiplies it by the number of processes
                share /= args.world_size
        output.loss = objective(output.loss, trace, share)

    return hook


def _move_first(trainer: Any, callback: TrainerCallback) -> None:
    """Let `callback` add to the logs before the reporting integrations read them."""
    callbacks = trainer.callback_handler.callbacks
    callbacks.remove(callback)
    callbacks.insert(0, callback)


def _ramp(step: int, steps: int, start: float, end: float) -> float | None:
    return None if step >= steps else start + (end - start) * step / steps
