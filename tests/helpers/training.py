"""What the training tests share: tiny datasets, a Trainer with fixed order,
and the gradients of every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models import DEVICE, tokens
from torch import nn
from transformers import Trainer, TrainerCallback

from hf_depthroute import DepthRouteTrainer, DepthRouteTrainingArguments
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.trace import RouteTrace, record_routes
from hf_depthroute.training.losses import routing_losses

Row = dict[str, torch.Tensor]


def rows(count: int, length: int = 12, padding: tuple[int, ...] = (0,), seed: int = 0) -> list[Row]:
    """`count` examples; example `i` has `padding[i % len(padding)]` pad tokens on the right."""
    ids, result = tokens(count, length, seed), []
    for i in range(count):
        real = torch.arange(length) < length - padding[i % len(padding)]
        row = {
            "input_ids": ids[i] * real,
            "attention_mask": real.long(),
            "labels": torch.where(real, ids[i], -100),
        }
        result.append(row)
    return result


def stacked(examples: list[Row]) -> Row:
    """The batch of some examples."""
    return {name: torch.stack([row[name] for row in examples]) for name in examples[0]}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def backward(
    model: nn.Module, batch: Row, **kwargs: Any
) -> tuple[dict[str, torch.Tensor], RouteTrace]:
    """The loss terms and the trace of one batch, after the backward pass of their sum."""
    with record_routes(model) as trace:
        lm = model(**batch).loss
    terms = routing_losses(trace, lm, **kwargs)
    sum(terms.values()).backward()
    return terms, trace


class KeepGradients(TrainerCallback):
    """Collects the gradients of every optimizer step, before the step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(gradients(kwargs["model"]))


def training_arguments(folder: Path, **fields: Any) -> DepthRouteTrainingArguments:
    """Sequential order, two rows a batch, every step logged, no clipping, nothing written."""
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": DEVICE == "cpu",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 2,
        "max_grad_norm": 0.0,
        "learning_rate": 1e-2,
        "train_sampling_strategy": "sequential",
    }
    return DepthRouteTrainingArguments(**defaults | fields)


def make_trainer(
    model: nn.Module,
    examples: list[Row],
    folder: Path,
    cls: type[Trainer] = DepthRouteTrainer,
    **fields: Any,
) -> tuple[Any, KeepGradients]:
    kept = KeepGradients()
    evaluation = fields.pop("eval_dataset", None)
    arguments = training_arguments(folder, **fields)
    trainer = cls(
        model, arguments, train_dataset=examples, eval_dataset=evaluation, callbacks=[kept]
    )
    return trainer, kept


def step_logs(trainer: Trainer) -> list[dict[str, float]]:
    """The log entries of training steps."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def adapter_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of the adapter: parameters, the frozen projection, and the quantile tables."""
    return {
        f"{routing.layer_index}.{name}": value.clone()
        for routing in routings_of(model)
        for name, value in routing.state_dict().items()
    }


def assert_same_tensors(
    one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tolerance: float = 0.0
) -> None:
    """Equal keys and values; bit for bit unless a tolerance,
    relative to each tensor's largest value, is given."""
    assert one.keys() == two.keys() and one
    for name, value in one.items():
        if tolerance == 0.0:
            assert torch.equal(value, two[name]), name
        else:
            assert (value - two[name]).abs().max() <= tolerance * max(
                1.0, value.abs().max().item()
            ), name
