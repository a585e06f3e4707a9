"""The record of the run that made an adapter, kept on the model for the card that is
written with it.

It lives with the adapter in memory and is never part of its weights. Training again, or another
calibration, makes what was measured before worthless: the former forgets it, the latter shows in
the weights' hash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import nn

from ..files.versions import versions
from ..inference.calibration import active_routings
from ..routing.stack import routings_of
from ..routing.thresholds import ScoreQuantiles
from .arguments import RoutingArguments

if TYPE_CHECKING:
    from transformers import TrainerState, TrainingArguments

Known = TypeVar("Known")

_ARGUMENTS = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "optim",
    "bf16",
    "fp16",
    "seed",
)
_KEPT = ("fit", "arguments")


@dataclass
class Run:
    """An adapter's training, in the form of `training.json`, and results as for `make_card`."""

    training: dict[str, Any] | None = None
    results: list[object] = field(default_factory=list)

    def record(
        self, model: nn.Module, adapter_name: str, before: Mapping[str, object] | None = None
    ) -> dict[str, object]:
        """The training, or `before` where none is remembered, and the thresholds' shares."""
        training = before
        if self.training is not None:
            training = self.training
        record: dict[str, Any] = dict(training or {})
        shares = {}
        for routing in (h for h in routings_of(model) if adapter_name in h.depth_route_quantiles):
            measured = cast(ScoreQuantiles, routing.depth_route_quantiles[adapter_name]).measured
            if measured is not None and measured.budget == routing.config(adapter_name).budget:
                shares[str(routing.layer_index)] = measured.full_ratio
                record |= {"calibrated_full_ratio": shares, "calibrated_in": measured.where}
        if shares:
            record.pop("thresholds", None)  # of the shares before
        return record


def remember_training(model: nn.Module, training: Mapping[str, object]) -> None:
    """Replace the record of the active adapter's training; earlier results are forgotten."""
    run = active_run(model)
    run.training = dict(training)
    run.results.clear()


def remembered(model: nn.Module, adapter_name: str) -> Run:
    """The record of `adapter_name`; empty for an adapter that was loaded."""
    routing = next(h for h in routings_of(model) if adapter_name in h.depth_route_gate)
    return cast(Run, routing.runs.get(adapter_name, Run()))


def record_of(model: nn.Module) -> dict[str, Any]:
    """The record of the active adapter's training; empty, of an adapter that was loaded."""
    return active_run(model).training or {}


def training_record(
    args: TrainingArguments,
    state: TrainerState,
    model: nn.Module,
    dataset: Any,
    seconds: float,
    resumed_at: int,
) -> dict[str, Any]:
    """The record of a training so far, by its Trainer's arguments and state.

    The log's history is referred to, not copied. The Hub's id is read from `dataset` where
    `datasets` noted it; `seconds` have passed since training began, or went on at step
    `resumed_at`. A fact that cannot be found out is left out. What is remembered of a fit that
    training started from, and of the options of its command, stays.
    """
    before = record_of(model)
    names = (*_ARGUMENTS, *(field.name for field in fields(RoutingArguments)))
    plain = {name: known(partial(_plain, getattr(args, name, None))) for name in names}
    return {
        "hyperparameters": {name: value for name, value in plain.items() if value is not None}
        | {"steps": state.global_step, "processes": args.world_size},
        "dataset": known(partial(_dataset_id, dataset)),
        "examples": known(partial(len, dataset)),
        "seconds": round(seconds, 1),
        "resumed_at": resumed_at,
        "trainable_parameters": trainable_parameters(model),
        "log_history": state.log_history,
        "versions": versions(),
        **{name: before[name] for name in _KEPT if name in before},
    }


def trainable_parameters(model: nn.Module) -> int:
    """How many numbers of the model train."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def known(fact: Callable[[], Known]) -> Known | None:
    """The result of `fact`, or None if it raises: no training stops for a line of the model card.

    A dataset may run any code. A stream may have a `__len__` that raises, such as torch's
    `ChainDataset` over streams.
    """
    try:
        return fact()
    except Exception:
        return None


def _plain(value: object) -> float | str | None:
    """A hyperparameter as JSON holds it; None if it is not set."""
    if value is None or isinstance(value, (int, float)):
        return value
    return str(getattr(value, "value", value))


def active_run(model: nn.Module) -> Run:
    """The run of the active adapter.

    Raises:
        ValueError: No routed adapter is active.
    """
    routing = active_routings(model)[0]
    return cast(Run, routing.runs.setdefault(routing.active_name(), Run()))


def _dataset_id(dataset: object) -> str | None:
    """`me/text` of a dataset that was read from `hf://datasets/me/text@...`."""
    sources = getattr(getattr(dataset, "info", None), "download_checksums", None) or {}
    for source in sources:
        name, at, _ = str(source).removeprefix("hf://datasets/").partition("@")
        if at and str(source).startswith("hf://datasets/"):
            return name
    return None
