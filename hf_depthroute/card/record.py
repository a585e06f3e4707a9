"""What a model remembers of the run that made its adapter, for the card that is written when it is saved.

It lives with the adapter in memory and is never part of its weights. Training again, or another calibration, makes
what was measured before worthless: the former forgets it, the latter shows in the weights' hash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ..trace import routings

if TYPE_CHECKING:
    from ..quantiles import ScoreQuantiles

_ARGUMENTS = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "max_steps",
    "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "optim", "bf16", "fp16", "seed",
)  # fmt: skip


@dataclass
class Run:
    """The record of an adapter's training, in the form of `training.json`, and its results as for `make_card`."""

    training: dict[str, Any] | None = None
    results: list[Any] = field(default_factory=list)

    def record(self, model: nn.Module, adapter_name: str, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The record of the training, or `before` where none is remembered, with what the thresholds let run full."""
        known = self.training if self.training is not None else before
        return {**(known or {}), **_measured(model, adapter_name)}


def add_results(model: nn.Module, *results: Any) -> None:
    """Show these results in the cards that `save_pretrained` and `push_to_hub` of this model write.

    Args:
        model: A model with an active routed adapter.
        *results: As for `make_card`: files of `eval --out` or `bench --out`, or what `evaluate_budgets`,
            `evaluate_tasks` or `bench` returned for this adapter.

    Raises:
        ValueError: No routed adapter is active.
    """
    _active(model).results.extend(results)


def remember_training(model: nn.Module, training: Mapping[str, Any]) -> None:
    """Replace the record of the active adapter's training; what was measured before is forgotten."""
    run = _active(model)
    run.training = dict(training)
    run.results.clear()


def remembered(model: nn.Module, adapter_name: str) -> Run:
    """What is known of `adapter_name`; nothing, of an adapter that was loaded."""
    holder = next(holder for holder in routings(model) if adapter_name in holder.depth_route_gate)
    found: Run = holder.runs.get(adapter_name, Run())
    return found


def training_record(args: Any, state: Any, model: nn.Module, dataset: Any, seconds: float) -> dict[str, Any]:
    """The record of a training by a `transformers.Trainer`, so far.

    Args:
        args: Its `TrainingArguments`; `RoutingArguments` are recorded too.
        state: Its `TrainerState`; the history of its log is referred to, not copied.
        model: What is trained.
        dataset: Its training dataset; the Hub's id is read from it where `datasets` noted it.
        seconds: Since training began.
    """
    from ..versions import versions

    values = {name: getattr(args, name, None) for name in (*_ARGUMENTS, *_routing_arguments())}
    shown = {
        n: v if isinstance(v, (int, float)) else str(getattr(v, "value", v)) for n, v in values.items() if v is not None
    }
    return {
        "hyperparameters": shown | {"steps": state.global_step, "processes": args.world_size},
        "dataset": _dataset_id(dataset),
        "examples": len(dataset) if hasattr(dataset, "__len__") else None,
        "seconds": round(seconds, 1),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "log_history": state.log_history,
        "versions": versions(),
    }


def _measured(model: nn.Module, adapter_name: str) -> dict[str, Any]:
    """Layer by layer what the thresholds that the model has now let run full; empty where nobody measured it."""
    found, where = {}, ""
    for holder in routings(model):
        if adapter_name in holder.depth_route_quantiles:
            measured = cast("ScoreQuantiles", holder.depth_route_quantiles[adapter_name]).measured
            if measured is not None and measured.budget == holder.config(adapter_name).budget:
                found[str(holder.layer_index)], where = measured.full_ratio, measured.where
    return {"calibrated_full_ratio": found, "calibrated_in": where} if found else {}


def _active(model: nn.Module) -> Run:
    from ..calibration import active_routings

    holder = active_routings(model)[0]
    found: Run = holder.runs.setdefault(holder.active_name(), Run())
    return found


def _routing_arguments() -> list[str]:
    import dataclasses

    from ..arguments import RoutingArguments

    return [f.name for f in dataclasses.fields(RoutingArguments)]


def _dataset_id(dataset: Any) -> str | None:
    """`me/text` of a dataset that was read from `hf://datasets/me/text@...`."""
    sources = getattr(getattr(dataset, "info", None), "download_checksums", None) or {}
    for source in sources:
        name, at, _ = str(source).removeprefix("hf://datasets/").partition("@")
        if at and str(source).startswith("hf://datasets/"):
            return name
    return None
