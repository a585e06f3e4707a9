"""Training: `DepthRouteTrainer` and its arguments."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..base.distributed import sharing
from ..files.out_of_resources import disk_full, out_of_memory
from ..files.shown import reason, shown
from ..files.staged import write_json
from ..inference.calibration import active_routings
from ..parts.gates import GATES
from ..routing.trace import count_routes
from . import checkpoints
from .arguments import RoutingArguments
from .callbacks import (
    DepthRouteCallback,
    RoutingCallback,
    is_standard,
    routed_loss,
    routing_arguments,
)
from .fused_loss import FusedLoss, fused_loss_obstacle
from .objective import RoutingObjective
from .record import record_of

__all__ = [
    "DepthRouteCallback",
    "DepthRouteTrainer",
    "DepthRouteTrainerMixin",
    "DepthRouteTrainingArguments",
    "RoutingArguments",
]

if TYPE_CHECKING:
    _Trainer = Trainer
else:
    _Trainer = object  # a mixin over any Trainer


@dataclass
# The folder is the first, as in its base.
class DepthRouteTrainingArguments(RoutingArguments, TrainingArguments):
    """`transformers.TrainingArguments` plus `RoutingArguments`.

    The optimizer's defaults are those of "Revisiting Auxiliary Losses for Conditional Depth
    Routing: An Empirical Study" (arXiv:2604.17228): AdamW, lr 2e-4, weight decay 0.01, clip 1.0,
    cosine to 1 % of lr. Set `warmup_steps` to fit the length of your run (there: 1,000 of 20,000).
    """

    learning_rate: float = field(default=2e-4, metadata={"help": "peak learning rate"})
    weight_decay: float = field(default=0.01, metadata={"help": "AdamW weight decay"})
    lr_scheduler_type: str = field(
        default="cosine_with_min_lr", metadata={"help": "learning-rate schedule"}
    )
    lr_scheduler_kwargs: dict[str, Any] | str | None = field(
        default_factory=lambda: {"min_lr_rate": 0.01},
        metadata={"help": "arguments of the schedule"},
    )

    def __post_init__(self) -> None:
        self.check()
        if self.lr_scheduler_type != "cosine_with_min_lr" and self.lr_scheduler_kwargs == {
            "min_lr_rate": 0.01
        }:
            self.lr_scheduler_kwargs = {}
        super().__post_init__()


class DepthRouteTrainerMixin(_Trainer):
    """Adds the routing losses in `compute_loss`, whatever the Trainer class takes its
    language-model loss from.

    A step whose loss is not finite ends training before its optimizer step. Whole checkpoints are
    marked, and no other is resumed from. What ran out of memory or disk ends with a line that names
    what was being done and what is left.
    """

    model: Any
    doing = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._callback = RoutingCallback()
        self._watch(self.model)
        self.routing_objective.thaw()  # until training begins
        # Adds to the logs before the integrations read them.
        self.callback_handler.callbacks.insert(0, self._callback)

    def _watch(self, model: nn.Module) -> None:
        """Train `model` with the routing losses."""
        objective = RoutingObjective(routing_arguments(self.args), model)
        self._callback.objective = self.routing_objective = objective
        self._fused: FusedLoss | None = None

    def call_model_init(self, trial: object = None) -> nn.Module:
        """As `Trainer.call_model_init`: every training and trial has a model of its own."""
        model = super().call_model_init(trial)
        if hasattr(self, "_callback"):
            self._watch(model)
        return model

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The Trainer's loss plus the routing losses; in evaluation, the Trainer's loss alone."""
        plain = super().compute_loss
        fused = None
        if model.training:
            self.doing = f"in training step {self.state.global_step + 1}"
            # A `compute_loss` other than the Trainer's may look at the logits.
            fusible = is_standard(plain) and inputs.get("labels") is not None and not return_outputs
            if fusible and self.fused_loss_obstacle() is None:
                # The same object for every step, so that a compiled model is compiled once.
                fused = self._fused = self._fused or FusedLoss(self.model)
        given = model, inputs, return_outputs, num_items_in_batch
        return routed_loss(self.routing_objective, self, plain, *given, fused)

    def fused_loss_obstacle(self) -> str | None:
        """Why training steps compute logits; None if the loss is fused with the LM head.

        They do too in a subclass whose `compute_loss` asks for the outputs, or over a Trainer with
        one of its own.
        """
        arguments = self.routing_objective.arguments
        gates = [GATES[routing.active_config().gate] for routing in active_routings(self.model)]
        split = self.is_fsdp_enabled or self.is_deepspeed_enabled or self.args.n_gpu > 1
        split = split or getattr(self.accelerator, "parallelism_config", None) is not None
        obstacles = {
            "fused_loss=False": not arguments.fused_loss,
            "lm_weight=0: no gradient is wanted": arguments.lm_weight == 0,
            "the distill loss needs them": arguments.distill_weight > 0,
            "the gate reads them inside the layers": any(gate.reads_logits for gate in gates),
            "label smoothing": self.label_smoother is not None,
            "a loss function of the Trainer's own": self.compute_loss_func is not None,
            "use_liger_kernel=True has a fused loss too": self.args.use_liger_kernel,
            "the model is split over devices or copied by DataParallel": split,
        }
        found = (reason for reason, holds in obstacles.items() if holds)
        return next(found, None) or fused_loss_obstacle(self.model)

    def create_model_card(  # type: ignore[override]  # takes more
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | Sequence[str] | None = None,
        model_name: str | None = None,
        dataset: str | Sequence[str] | None = None,
        results: Sequence[object] = (),
        **ignored: object,
    ) -> None:
        """Write `README.md` in `output_dir`.

        `push_to_hub` calls it, and passes on what it does not know itself:

            trainer.push_to_hub(results=["eval.json"], license="apache-2.0")

        Args:
            language, license, tags, model_name: For the metadata and the title; a licence is not
            guessed.
            dataset: Hub ids of the training data. Default: what the training dataset says.
            results: As for `hf_depthroute.card.make_card`; what was added with `add_results` is
                shown too.
            **ignored: Other arguments of `Trainer.create_model_card` and TRL's: the card has them
                from the run.

        Raises:
            ResultError: A result cannot be read, or was measured with other weights.
        """
        if not self.is_world_process_zero():
            return
        tags, dataset = (
            [names] if isinstance(names, str) else list(names or ()) for names in (tags, dataset)
        )
        card = {
            "language": language,
            "license": license,
            "tags": tags,
            "model_name": model_name,
            "datasets": dataset,
            "repo_id": getattr(self, "hub_model_id", None),
        }
        model = self.accelerator.unwrap_model(self.model)
        model.create_or_update_model_card(str(self.args.output_dir), results=results, card=card)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As `Trainer.train`.

        Raises:
            CheckpointError: The checkpoint to resume from is not whole; for True, none is. Later
                ones that are not whole are named in a warning and passed over.
            NonFiniteLossError: A loss term or a gradient was not finite; the optimizer did not
                step.
        """
        self.doing = ""
        self.routing_objective.freeze()
        try:
            resume_from_checkpoint = self._checked(resume_from_checkpoint)
            with self._named("training"):
                return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:  # also of a training that did not get to its first step
            self.routing_objective.end_schedule()

    def _checked(self, resume_from_checkpoint: str | bool | None) -> str | bool | None:
        """The checkpoint to resume from, which is whole; True where there is none to choose."""
        if resume_from_checkpoint is True:
            found, skipped = checkpoints.last_complete(Path(str(self.args.output_dir)))
            for line in skipped:
                warnings.warn(f"passed over {shown(line)}", stacklevel=3)
            return True if found is None else str(found)
        if resume_from_checkpoint:
            checkpoints.check_complete(Path(resume_from_checkpoint))
        return resume_from_checkpoint

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As `Trainer.evaluate`."""
        with self._named("evaluating"):
            return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.evaluation_loop`, whose metrics then have the share of the tokens that ran in
        full, mean over layers: `eval_full_ratio`.

        While scores move, their thresholds follow a few steps behind, and a loss is that of the
        share that ran.
        """
        with count_routes(self.model) as counter:
            output = super().evaluation_loop(*args, **kwargs)
        with sharing():
            shares = list(counter.full_ratio().values())
        if not shares:
            return output
        name = f"{kwargs.get('metric_key_prefix', 'eval')}_full_ratio"
        share = sum(shares) / len(shares)
        return output._replace(metrics={**(output.metrics or {}), name: share})

    def _save_checkpoint(
        self, model: nn.Module, trial: object, *args: object, **kwargs: object
    ) -> None:
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        folder = Path(self._get_output_dir(trial=trial)) / name
        limit = self.args.save_total_limit
        self.args.save_total_limit = None  # older ones go when this one is whole
        try:
            with self._named(f"saving {folder}"):
                super()._save_checkpoint(model, trial, *args, **kwargs)
                if self.args.should_save:
                    routing = self.routing_objective.state()
                    write_json(folder / checkpoints.ROUTING_STATE, routing, indent=None)
                    write_json(folder / checkpoints.RECORD, record_of(self.model), indent=None)
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    checkpoints.mark_complete(folder)
                    best = self.state.best_model_checkpoint
                    checkpoints.rotate(folder, limit, None if best is None else Path(best))
        finally:
            self.args.save_total_limit = limit

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        saved = Path(checkpoint or "") / checkpoints.ROUTING_STATE
        if checkpoint is not None and saved.is_file():
            self.routing_objective.load_state(checkpoints.read_routing_state(saved))

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        """Say what was being done when memory or disk ran out, once, and what is left."""
        outer = self.doing
        self.doing = doing
        try:
            yield
            self.doing = outer
        except (MemoryError, RuntimeError, OSError) as error:
            memory = out_of_memory(error)
            if outer or not (memory or disk_full(error)):
                raise
            whole = checkpoints.last_whole(Path(str(self.args.output_dir)))
            left = "there is no whole checkpoint"
            if whole:
                left = f"the last whole checkpoint is {whole}"
            what = "out of memory" if memory else "disk full"
            text = f"{what} while {self.doing}: {reason(error)}; {left}"
            if memory:  # the same type where it is PyTorch's own: callers catch it
                own = isinstance(error, torch.OutOfMemoryError)
                raise (type(error) if own else MemoryError)(text) from error
            place = getattr(error, "filename", None) or self.args.output_dir
            raise OSError(errno.ENOSPC, text, str(place)) from error
        finally:
            if not outer:
                self.doing = ""


class DepthRouteTrainer(DepthRouteTrainerMixin, Trainer):
    """`transformers.Trainer` that adds the routing losses and logs them.

    Takes the Trainer's arguments; pass `DepthRouteTrainingArguments` as `args` to set weights and
    schedules.

    Raises:
        ValueError: The model has no active depth-routed adapter.
        ConfigError: The arguments ask for labels that the adapter's tokens have not.
    """
