"""Training: `DepthRouteTrainer`, its arguments, and a callback for people who keep their own Trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .calibration import active_routings
from .checkpoints import CheckpointsMixin
from .fused_loss import FusedLoss, fused_loss_obstacle
from .objective import RoutingArguments, RoutingObjective, Watched


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


class _RoutingCallback(TrainerCallback):
    """Schedules and logging; shared by `DepthRouteTrainer` and `DepthRouteCallback`."""

    objective: RoutingObjective | None = None

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.objective is not None:
            self.objective.schedule(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.objective is not None:
            self.objective.check_finite(state.global_step + 1, gradients=not args.fp16)

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.objective is not None:
            self.objective.after_step()

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
        watched = self._open.enter_context(self.objective.watching())
        hook = _add_losses(self.objective, watched, args, self.trainer)
        self._open.callback(model.register_forward_hook(hook, with_kwargs=True).remove)
        if self.trainer is not None:
            _move_first(self.trainer, self)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_end(args, state, control, **kwargs)
        self._open.close()


class DepthRouteTrainerMixin(CheckpointsMixin):
    """Adds the routing losses in `compute_loss`, whatever the Trainer class takes its language-model loss from.

    A step whose loss is not finite ends training in front of its optimizer step.
    """

    model: Any
    add_callback: Any
    model_accepts_loss_kwargs: bool
    compute_loss_func: Any
    current_gradient_accumulation_steps: int
    label_smoother: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        arguments = self.args if isinstance(self.args, RoutingArguments) else RoutingArguments()
        self.routing_objective = RoutingObjective(arguments, self.model)
        self._fused: FusedLoss | None = None
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
        self.doing = f"in training step {self.state.global_step + 1}"
        labels = inputs.get("labels")  # the Trainer may pop them
        plain = super().compute_loss  # type: ignore[misc]
        standard = getattr(plain, "__func__", None) is Trainer.compute_loss  # another one may look at the logits
        fused = standard and labels is not None and not return_outputs and self.fused_loss_obstacle() is None
        with self.routing_objective.watching() as watched:
            with self._fused_loss() if fused else nullcontext():
                lm, outputs = plain(model, inputs, True, num_items_in_batch)
            share = self._share(num_items_in_batch)
            logits = None if fused else getattr(outputs, "logits", None)
            loss = self.routing_objective(lm, watched, share, labels, logits)
        return (loss, outputs) if return_outputs else loss

    def fused_loss_obstacle(self) -> str | None:
        """Why training steps compute logits; None where the loss is fused with the LM head.

        They do too in a subclass whose `compute_loss` asks for the outputs, or over a Trainer with one of its own.
        """
        arguments = self.routing_objective.arguments
        gates = {holder.active_config().gate for holder in active_routings(self.model)}
        split = self.is_fsdp_enabled or self.is_deepspeed_enabled or self.args.n_gpu > 1
        obstacles = {
            "fused_loss=False": not arguments.fused_loss,
            "lm_weight=0: no gradient is wanted": arguments.lm_weight == 0,
            "the distill loss needs them": arguments.distill_weight > 0,
            "the gate reads them inside the layers": "exit" in gates,
            "label smoothing": self.label_smoother is not None,
            "a loss function of the Trainer's own": self.compute_loss_func is not None,
            "use_liger_kernel=True has a fused loss too": self.args.use_liger_kernel,
            "the model is split over devices or copied by DataParallel": split
            or getattr(self.accelerator, "parallelism_config", None) is not None,
        }
        return next((reason for reason, holds in obstacles.items() if holds), fused_loss_obstacle(self.model))

    def _fused_loss(self) -> AbstractContextManager[None]:
        # The same object for every step, so that a compiled model is compiled once.
        if self._fused is None:
            self._fused = FusedLoss(self.model)
        return self._fused

    def _share(self, num_items_in_batch: torch.Tensor | int | None) -> float:
        """This batch's part of the optimizer step, for terms that are means over one batch."""
        # Where the Trainer knows the tokens of the whole step, the loss is divided by them and not by the number of
        # accumulated batches; the routing terms, means over one batch, have to be.
        divided = getattr(self, "loss_is_scaled_for_ga", None)
        if divided is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            divided = counted or self.compute_loss_func is not None
        return 1.0 / self.current_gradient_accumulation_steps if divided else 1.0


class DepthRouteTrainer(DepthRouteTrainerMixin, Trainer):
    """`transformers.Trainer` that adds the routing losses and logs them.

    Takes the Trainer's arguments; pass `DepthRouteTrainingArguments` as `args` to set weights and schedules.

    Raises:
        ValueError: The model has no active depth-routed adapter.
    """


def _add_losses(
    objective: RoutingObjective,
    watched: Watched,
    args: TrainingArguments,
    trainer: Trainer | None,
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
        output.loss = objective(output.loss, watched, share, kwargs.get("labels"), getattr(output, "logits", None))

    return hook


def _move_first(trainer: Any, callback: TrainerCallback) -> None:
    """Let `callback` add to the logs before the reporting integrations read them."""
    callbacks = trainer.callback_handler.callbacks
    callbacks.remove(callback)
    callbacks.insert(0, callback)
