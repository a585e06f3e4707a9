"""One run of a study: the fresh base, an adapter, the training with its records, and the final measurements.

A run lives in `OUT/runs/CONFIG/SEED/`: `run.json` first, `metrics.jsonl` and `eval.jsonl` while it trains, and
`summary.json` last and whole; its presence means that the run is complete.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PrinterCallback, TrainerCallback

from ..calibration import use_selection
from ..evaluation.perplexity import mean_loss
from ..hub import explained
from ..remote_code import trusts_remote_code
from ..shown import OneLine
from ..staged_files import sync, write_json
from ..trainer import DepthRouteTrainer
from ..tuner import get_depth_routed_model
from . import metrics
from .data import OrderedBlocks, draw_order, read_blocks, to_batches
from .grid import RunSpec
from .measure import autocast, measure
from .progress import RunPrinter


class RunError(OneLine, RuntimeError):
    """A run cannot go on. The message is one line."""


@dataclass(frozen=True)
class SharedSetting:
    """What all runs of a study share.

    Attributes:
        blocks: Path of the token blocks.
        base: Folder or Hub id.
        fingerprint: The study's.
        dense_loss: Validation loss of the base.
        threads: CPU threads of a run.
    """

    blocks: str
    base: str
    fingerprint: str
    dense_loss: float
    batch_size: int
    eval_every: int
    thresholds: tuple[float, ...]
    threads: int


def train_run(shared: SharedSetting, spec: RunSpec, folder: Path, label: str | None = None) -> dict[str, Any]:
    """Train and measure one run into `folder`, which must not exist; with a `label`, print how far it is.

    Returns:
        The content of its `summary.json`.

    Raises:
        RunError: The loss is not finite.
    """
    assert spec.steps is not None
    torch.set_num_threads(shared.threads)
    folder.mkdir(parents=True)
    write_json(folder / "run.json", {**dataclasses.asdict(spec), "fingerprint": shared.fingerprint})
    blocks = read_blocks(Path(shared.blocks))
    transformers.set_seed(spec.seed)
    model = get_depth_routed_model(load_base(shared.base), spec.adapter_config())
    if spec.joint:
        unfreeze(model)
    arguments = spec.training_arguments(shared.batch_size, folder)
    rule = "threshold" if spec.adapter.get("selection") == "threshold" else "topk"
    validation = to_batches(blocks.validation, shared.batch_size, arguments.device)

    def evaluate() -> float:
        with use_selection(model, rule), autocast(arguments):
            return mean_loss(model.get_base_model(), validation)

    wanted = spec.steps * shared.batch_size * arguments.gradient_accumulation_steps
    recorder = Recorder(folder, shared.eval_every, spec.steps, evaluate)
    with recorder.open():
        trainer = DepthRouteTrainer(
            model=model,
            args=arguments,
            train_dataset=OrderedBlocks(blocks.train, draw_order(len(blocks.train), wanted, spec.seed)),
            data_collator=transformers.default_data_collator,
            callbacks=[recorder],
        )
        trainer.remove_callback(PrinterCallback)
        if label is not None:
            trainer.add_callback(RunPrinter(label))
        trainer.train()

    summary = {
        "config": spec.config,
        "seed": spec.seed,
        "fingerprint": shared.fingerprint,
        "steps": spec.steps,
        "dense_loss": shared.dense_loss,
        **recorder.summary(shared.thresholds),
        **measure(model, blocks, arguments, rule, recorder.rows),
    }
    write_json(folder / "summary.json", summary)
    return summary


def load_base(base: str) -> Any:
    """The base model in float32, on the GPU if there is one; lower precision is left to autocast."""
    with explained(f"model {base}"):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, trust_remote_code=trusts_remote_code()
        )
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def unfreeze(model: nn.Module) -> None:
    """Let the base model train too; the targets' projection stays as it is."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and "depth_route_target" not in name:
            parameter.requires_grad_(True)


class Recorder(TrainerCallback):
    """Writes `metrics.jsonl` and `eval.jsonl`: every step with its seconds, and the validation loss now and then."""

    def __init__(self, folder: Path, every: int, steps: int, evaluate: Callable[[], float]) -> None:
        self.folder = folder
        self.every = every
        self.steps = steps
        self.evaluate = evaluate
        self.rows: list[dict[str, Any]] = []
        self.evaluations: list[tuple[int, float]] = []
        self._started = self._spent = (0.0, 0.0)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Keep the two files open, to be read line by line while the run goes on."""
        metrics_path, evals_path = self.folder / "metrics.jsonl", self.folder / "eval.jsonl"
        with (
            metrics_path.open("w", buffering=1, encoding="utf-8") as self._metrics,
            evals_path.open("w", buffering=1, encoding="utf-8") as self._evals,
        ):
            yield
        sync(metrics_path)  # before summary.json says that the run is complete
        sync(evals_path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluate(0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = _now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wall, processor = _now()
        self._spent = (wall - self._started[0], processor - self._started[1])
        if state.global_step % self.every == 0 or state.global_step == self.steps:
            self._evaluate(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        values = {name: value for name, value in logs.items() if name != "epoch"}
        for name, value in values.items():
            if not math.isfinite(value):
                raise RunError(f"training diverged: {name} is {value} at step {state.global_step}")
        seconds, cpu_seconds = (round(value, 5) for value in self._spent)
        row = {"step": state.global_step, **values, "seconds": seconds, "cpu_seconds": cpu_seconds}
        self.rows.append(row)
        self._metrics.write(json.dumps(row) + "\n")

    def _evaluate(self, step: int) -> None:
        loss = self.evaluate()
        if not math.isfinite(loss):
            raise RunError(f"training diverged: the validation loss is {loss} at step {step}")
        self.evaluations.append((step, loss))
        self._evals.write(json.dumps({"step": step, "lm_loss": loss}) + "\n")

    def summary(self, thresholds: tuple[float, ...]) -> dict[str, Any]:
        """The part of `summary.json` that comes from the records."""
        best_step, best = metrics.best_of(self.evaluations)
        return {
            "avg_first_half": metrics.window_average(self.evaluations, self.steps / 2),
            "avg_whole": metrics.window_average(self.evaluations, self.steps),
            "best": best,
            "best_step": best_step,
            "endpoint": self.evaluations[-1][1],
            "hits": metrics.first_hits(self.evaluations, thresholds),
            "grad_norm_mean": metrics.mean_of(self.rows, "grad_norm"),
            "train_seconds": round(sum(row["seconds"] for row in self.rows), 3),
            "train_cpu_seconds": round(sum(row["cpu_seconds"] for row in self.rows), 3),
            "step_seconds_median": statistics.median(row["seconds"] for row in self.rows),
        }


def _now() -> tuple[float, float]:
    """Wall-clock, and the processor time of this process: what other work on a shared machine does not lengthen."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()
