"""Routing losses for a Trainer that is not ours: a callback,
and the hook that adds it to a Trainer that has none.

`trl.SFTTrainer(peft_config=DepthRouteConfig(...))` injects the adapter itself, and takes its loss
from elsewhere than the model's output. So the losses are added where every Trainer has its own:
around `compute_loss`, while training runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from ..adapter.labels import as_served
from ..files.shown import say
from ..inference.calibration import active_routings
from ..parts.gates import GATES
from ..routing.misuse import FROZEN
from ..routing.routing import Routing
from ..routing.stack import routed_now, state_of
from .answers import check_answers
from .arguments import RoutingArguments
from .log_lines import missed_budget, print_lines, unfinished_schedules
from .objective import RoutingObjective
from .record import known, record_of, remember_training, training_record

if TYPE_CHECKING:
    from transformers import TrainerControl

logger = logging.getLogger(__name__)


class RoutingCallback(TrainerCallback):
    """Schedules and logging; shared by `DepthRouteTrainer` and `DepthRouteCallback`."""

    objective: RoutingObjective  # while training runs, and `begun` is not 0
    begun = 0.0
    resumed_at = 0  # the step that training went on from
    before: Mapping[str, Any] = MappingProxyType({})  # the record that training started with

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # `auto_find_batch_size` begins anew, in the same `train`, where a batch was too large.
        self.restore()
        self.objective.freeze()
        self.begun = time.monotonic()
        self.resumed_at = state.global_step
        config = active_routings(self.objective.model)[0].active_config()
        if state.is_world_process_zero:
            for line in unfinished_schedules(self.objective.arguments, config, state.max_steps):
                say(line)
        self._remember(args, state, kwargs)

    def _remember(
        self, args: TrainingArguments, state: TrainerState, given: dict[str, Any]
    ) -> None:
        """Note the run so far with the model, for the card of a checkpoint or of the end."""
        model = given["model"]
        dataset = known(lambda: given["train_dataloader"].dataset)
        if not record_of(model):  # a checkpoint that was loaded has none
            remember_training(model, self.before)
        seconds = time.monotonic() - self.begun
        record = training_record(args, state, model, dataset, seconds, self.resumed_at)
        remember_training(model, record)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.objective.schedule(state.global_step)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.objective.check_finite(state.global_step + 1, gradients=not args.fp16)

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.objective.after_step()

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        if self.begun and "loss" in (logs or ()):
            self.objective.note_shares()
            metrics = self.objective.pop_metrics()
            logs.update(metrics)
            state.log_history[-1].update(metrics)
        if self.begun:
            self._remember(args, state, kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._remember(args, state, kwargs)
        if not args.load_best_model_at_end:  # else the weights are of an earlier step
            self.objective.note_shares()
        self.restore()
        config = active_routings(self.objective.model)[0].active_config()
        missed = missed_budget(config, state.log_history)
        if missed is not None and state.is_world_process_zero:
            say(missed)

    def restore(self) -> None:
        """Undo what holds while training runs, whatever ended it; a second call does nothing."""
        if self.begun:
            self.begun = 0.0
            self.objective.end_schedule()


class DepthRouteCallback(RoutingCallback):
    """Routing losses, schedules and diagnostics for `transformers.Trainer`,
    `trl.SFTTrainer` and their subclasses.

        callback = DepthRouteCallback(arguments=RoutingArguments())
        SFTTrainer(model, peft_config=DepthRouteConfig(), callbacks=[callback])

    While training runs, the trainer's loss includes the routing losses, and every log entry gets
    the loss terms and the per-layer diagnostics. A trainer that is given none gets one with default
    weights when it trains a routed model.

    Args:
        trainer: The trainer it is added to; found out by itself when that trains.
        arguments: Weights and schedules; by default those among the trainer's arguments, else the
            defaults.
    """

    def __init__(
        self, trainer: Trainer | None = None, arguments: RoutingArguments | None = None
    ) -> None:
        self.trainer = trainer
        self.arguments = arguments
        if arguments is not None:
            arguments.check()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.trainer is None:
            raise RuntimeError(
                "DepthRouteCallback does not know its trainer; pass it: DepthRouteCallback(trainer)"
            )
        trainer = self.trainer
        self.restore()
        arguments = self.arguments or routing_arguments(args)
        self.objective = RoutingObjective(arguments, kwargs["model"])
        trainer.callback_handler.callbacks.remove(self)
        # Adds to the logs before integrations read them.
        trainer.callback_handler.callbacks.insert(0, self)
        trainer.__dict__["compute_loss"] = partial(
            routed_loss, self.objective, trainer, trainer.compute_loss
        )
        super().on_train_begin(args, state, control, **kwargs)

    def restore(self) -> None:
        if self.begun:
            vars(self.trainer).pop("compute_loss", None)
        super().restore()


def routing_arguments(args: TrainingArguments) -> RoutingArguments:
    """The weights and schedules among a trainer's arguments; without any, the defaults."""
    return args if isinstance(args, RoutingArguments) else RoutingArguments()


def routed_loss(
    objective: RoutingObjective,
    trainer: Trainer,
    plain: Callable[..., Any],
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: torch.Tensor | int | None = None,
    fused: AbstractContextManager[None] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, Any]:
    """The trainer's own `compute_loss`, `plain`; in training, plus the routing losses.

    Raises:
        ValueError: The loss came from no forward pass of the routed model that has gradients.
    """
    served = as_served(objective.model, inputs)
    if not model.training:
        with served:
            return plain(model, inputs, return_outputs, num_items_in_batch)
    labels = inputs.get("labels")  # the Trainer may pop them
    # A `compute_loss` other than the Trainer's may run the model again to have outputs, or make no
    # logits at all.
    asks = return_outputs or is_standard(plain)
    with objective.watching() as watched, _as_deployed(trainer, objective.model), served:
        with fused or nullcontext():
            lm = plain(model, inputs, asks, num_items_in_batch)
        outputs = None
        if asks:
            lm, outputs = lm
        seen = any(record.probs.requires_grad for record in watched.trace.values())
        if lm.requires_grad and not seen and _trains_routers(active_routings(objective.model)):
            raise ValueError(
                f"{type(trainer).__name__}.compute_loss made its loss without a forward pass of "
                "the routed model that has gradients, which the routing losses need; let it call "
                "the model outside of torch.no_grad()"
            )
        share = _share(trainer, num_items_in_batch)
        logits = None
        if fused is None:
            logits = getattr(outputs, "logits", None)
        if objective.arguments.distill_weight > 0 and not is_standard(plain):
            assert watched.prefix is not None and watched.prefix.final is not None, (
                "no forward pass was observed"
            )
            logits = watched.prefix.lm_head(watched.prefix.final)
        loss = objective(lm, watched, share, labels, logits)
    return (loss, outputs) if return_outputs else loss


@contextmanager
def _as_deployed(trainer: Trainer, model: nn.Module) -> Iterator[None]:
    """Decide as inference does where a trainer compares with a reference or with rollouts.

    DPO, KTO, GRPO and RLOO need the log-probabilities of the model that generates. Under top-k a
    token's depends on later tokens.
    """
    configs = [routing.active_config() for routing in active_routings(model)]
    if not hasattr(trainer, "ref_model") or any(GATES[config.gate].soft for config in configs):
        yield
        return
    with state_of(model).override(selection=configs[0].inference_rule):
        yield


def is_standard(compute_loss: object) -> bool:
    """Whether a bound `compute_loss` is `transformers.Trainer`'s own."""
    return getattr(compute_loss, "__func__", None) is Trainer.compute_loss


def _share(trainer: Trainer, num_items_in_batch: torch.Tensor | int | None) -> float:
    """This batch's part of the optimizer step, for terms that are means over one batch."""
    # Where the Trainer divides by the tokens of the whole step, it does not by the number of
    # accumulated batches.
    divided = getattr(trainer, "loss_is_scaled_for_ga", None)
    if divided is None:
        counted = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
        divided = counted or trainer.compute_loss_func is not None
    if divided:
        return 1.0 / trainer.current_gradient_accumulation_steps
    return 1.0


@contextmanager
def provided(trainer: Trainer) -> Iterator[None]:
    """Train inside the block: a `DepthRouteCallback` knows its trainer, and every router has one.

    A trainer with routing losses prints readable lines. Whatever ends the block, schedules and
    frozen gates end too.

    Raises:
        ValueError: The model is routed, and no parameter of it trains; the losses would be added
            twice; the trainer compares answers and the adapter routes prompts alone; or
            `DataParallel` would copy the model.
    """
    model = cast(nn.Module, trainer.model)
    routings = routed_now(model)
    if routings and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(FROZEN)
    check_answers(trainer)
    callbacks = trainer.callback_handler.callbacks
    ours = [callback for callback in callbacks if isinstance(callback, RoutingCallback)]
    if len(ours) > 1:
        names = " and ".join(type(callback).__name__ for callback in ours)
        raise ValueError(
            f"{type(trainer).__name__} would add the routing losses {len(ours)} times ({names}): "
            "leave one in; DepthRouteTrainer has its own"
        )
    for callback in ours:
        if isinstance(callback, DepthRouteCallback):
            callback.trainer = trainer
    if not ours and _trains_routers(routings):
        logger.info(
            "%s trains a routed model: added DepthRouteCallback, default weights",
            type(trainer).__name__,
        )
        ours.append(DepthRouteCallback(trainer))
        trainer.add_callback(ours[0])
    if ours and trainer.args.n_gpu > 1:
        raise ValueError(
            f"{trainer.args.n_gpu} GPUs in one process: DataParallel runs copies of the model in "
            "threads, where routing losses see no decision; start one process for each GPU "
            "(accelerate launch, torchrun), or set CUDA_VISIBLE_DEVICES=0"
        )
    if ours:
        print_lines(trainer)
        for callback in ours:
            callback.before = record_of(model)
    try:
        yield
    finally:
        for callback in ours:
            callback.restore()


def _trains_routers(routings: list[Routing]) -> bool:
    return any(
        p.requires_grad for routing in routings for p in routing.depth_route_gate.parameters()
    )
