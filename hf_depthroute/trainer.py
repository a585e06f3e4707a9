"""Training: `DepthRouteTrainer` and its arguments."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from .calibration import active_routings
from .callbacks import DepthRouteCallback, RoutingCallback, is_standard, move_first, routed_loss
from .card.trainers import CardMixin
from .checkpoints import CheckpointsMixin
from .fused_loss import FusedLoss, fused_loss_obstacle
from .objective import RoutingArguments, RoutingObjective

__all__ = [
    "DepthRouteCallback",
    "DepthRouteTrainer",
    "DepthRouteTrainerMixin",
    "DepthRouteTrainingArguments",
    "RoutingArguments",
]


@dataclass
class DepthRouteTrainingArguments(TrainingArguments, RoutingArguments):
    """`transformers.TrainingArguments` plus `RoutingArguments`.

    The optimizer's defaults are those of "Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical
    Study" (arXiv:2604.17228): AdamW, lr 2e-4, weight decay 0.01, clip 1.0, cosine to 1 % of lr. Set `warmup_steps` to
    fit the length of your run (there: 1,000 of 20,000).
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


class DepthRouteTrainerMixin(CheckpointsMixin, CardMixin):
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
        callback = RoutingCallback()
        callback.objective = self.routing_objective
        self.add_callback(callback)
        move_first(self, callback)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The Trainer's loss plus the routing losses; in evaluation, the Trainer's loss alone."""
        plain = super().compute_loss  # type: ignore[misc]
        if not model.training:
            return plain(model, inputs, return_outputs, num_items_in_batch)
        self.doing = f"in training step {self.state.global_step + 1}"
        # A `compute_loss` other than the Trainer's may look at the logits.
        fused = is_standard(plain) and inputs.get("labels") is not None and not return_outputs
        fusing = self._fused_loss() if fused and self.fused_loss_obstacle() is None else None
        return routed_loss(
            self.routing_objective, self, plain, model, inputs, return_outputs, num_items_in_batch, fusing
        )

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


class DepthRouteTrainer(DepthRouteTrainerMixin, Trainer):  # type: ignore[misc]  # create_model_card takes more
    """`transformers.Trainer` that adds the routing losses and logs them.

    Takes the Trainer's arguments; pass `DepthRouteTrainingArguments` as `args` to set weights and schedules.

    Raises:
        ValueError: The model has no active depth-routed adapter.
    """
