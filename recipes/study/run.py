"""One run of a study: the fresh base, an adapter, the training with its records,
and the final measurements.

A run lives in `OUT/runs/CONFIG/SEED/`: `run.json` first, `metrics.jsonl` and `eval.jsonl` while it
trains, and `summary.json` last and whole; its presence means that the run is complete. Now and then
its step, loss and time left are printed on stderr.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PrinterCallback, TrainerCallback

from hf_depthroute.adapter.tuner import get_depth_routed_model
from hf_depthroute.config.adapter import ConfigError
from hf_depthroute.evaluation.perplexity import mean_loss
from hf_depthroute.files.hub import explained
from hf_depthroute.files.remote_code import trusts_remote_code
from hf_depthroute.files.shown import OneLine, say
from hf_depthroute.files.staged import sync, write_json
from hf_depthroute.inference.calibration import use_selection
from hf_depthroute.training.log_lines import Lines
from hf_depthroute.training.trainer import DepthRouteTrainer

from . import metrics
from .blocks import OrderedBlocks, draw_order, read_blocks, to_batches
from .fingerprint import CODE, differences
from .grid import RunSpec, Study
from .measure import autocast, measure

INTERVAL = 10.0  # seconds between the lines that a run prints


class StudyError(ConfigError):
    """A study cannot be started or continued. The message is one line."""


class RunError(OneLine, RuntimeError):
    """A run cannot go on. The message is one line."""


def device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Start:
    """State shared by all runs of one start of a study.

    Attributes:
        out: The study's folder, with the token blocks.
        base: Folder or Hub id.
        dense_loss: Validation loss of the base.
        threads: CPU threads of a run.
        selected: Folders of all runs of this start.
        engine: `"processes"` or `"ray"`.
        debug: Show the warnings of the libraries.
        owner: Process id.
        code: Hash of the package's code.
        device: `"cpu"` or `"cuda"`.
        trust: The base's own code may run.
    """

    study: Study
    out: Path
    base: str
    fingerprint: str
    dense_loss: float
    threads: int
    selected: tuple[Path, ...]
    engine: str
    debug: bool
    owner: int = field(default_factory=os.getpid)
    code: str = CODE
    device: str = field(default_factory=device_type)
    trust: bool = field(default_factory=trusts_remote_code)


def run_folder(out: Path, spec: RunSpec) -> Path:
    return out / "runs" / spec.config / str(spec.seed)


def is_finished(out: Path, spec: RunSpec, fingerprint: str) -> bool:
    """Whether a run is complete.

    Raises:
        StudyError: The run was made with another specification or in another study; it is left as
            it is.
    """
    folder = run_folder(out, spec)
    made = read_json(folder / "run.json")
    if made is None or read_json(folder / "summary.json") is None:
        return False
    wanted = json.loads(json.dumps(dataclasses.asdict(spec)))
    if spec.steps is None:
        del wanted["steps"]  # have yet to follow from a measurement
    other = differences({name: made.get(name) for name in wanted}, wanted)
    if made.get("fingerprint") != fingerprint:
        other.append("the fingerprint of the study")
    if other:
        raise StudyError(
            f"{folder}: made with another specification ({', '.join(other)}); "
            "rename the config, or pass another --out, or delete the folder"
        )
    return True


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON file that holds a mapping; None when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def train_run(start: Start, spec: RunSpec) -> dict[str, Any]:
    """Train and measure one run into its folder, which must not exist.

    Returns:
        The content of its `summary.json`.

    Raises:
        RunError: The loss is not finite.
    """
    assert spec.steps is not None
    torch.set_num_threads(start.threads)
    folder = run_folder(start.out, spec)
    folder.mkdir(parents=True)
    write_json(folder / "run.json", {**dataclasses.asdict(spec), "fingerprint": start.fingerprint})
    blocks = read_blocks(start.out / "blocks.safetensors")
    transformers.set_seed(spec.seed)
    model = get_depth_routed_model(load_base(start.base), spec.adapter_config())
    if spec.joint:
        unfreeze(model)
    arguments = spec.training_arguments(start.study.batch_size, folder)
    rule = "threshold" if spec.adapter.get("selection") == "threshold" else "topk"
    validation = to_batches(blocks.validation, start.study.batch_size, arguments.device)

    def evaluate() -> float:
        with use_selection(model, rule), autocast(arguments):
            return mean_loss(model.get_base_model(), validation)

    wanted = spec.steps * start.study.batch_size * arguments.gradient_accumulation_steps
    label = (
        f"[run {start.selected.index(folder) + 1} of {len(start.selected)}] {spec.config}, seed "
        f"{spec.seed}"
    )
    recorder = Recorder(folder, label, start.study.eval_every, spec.steps, evaluate)
    with recorder.open():
        trainer = DepthRouteTrainer(
            model=model,
            args=arguments,
            train_dataset=OrderedBlocks(
                blocks.train, draw_order(len(blocks.train), wanted, spec.seed)
            ),
            data_collator=transformers.default_data_collator,
            callbacks=[recorder],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()

    summary = {
        "config": spec.config,
        "seed": spec.seed,
        "fingerprint": start.fingerprint,
        "steps": spec.steps,
        "dense_loss": start.dense_loss,
        **recorder.summary(start.study.thresholds),
        **measure(model, blocks, arguments, rule, recorder.rows),
    }
    write_json(folder / "summary.json", summary)
    return summary


def load_base(base: str) -> Any:
    """The base model in float32, on the GPU if there is one;
    lower precision is left to autocast."""
    with explained(f"model {base}"):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, trust_remote_code=trusts_remote_code()
        )
    return model.to(device_type()).eval()


def unfreeze(model: nn.Module) -> None:
    """Let the base model train too; the targets' projection stays as it is."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and "depth_route_target" not in name:
            parameter.requires_grad_(True)


@dataclass(eq=False)
class Recorder(Lines, TrainerCallback):
    """Writes `metrics.jsonl` and `eval.jsonl`: every step with its seconds,
    and the validation loss now and then.

    What it prints begins with `label`, which tells the run from those that train at the same time.
    """

    folder: Path
    label: str
    every: int
    steps: int
    evaluate: Callable[[], float]
    rows: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    _started = _spent = (0.0, 0.0)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Keep the two files open, to be read line by line while the run goes on."""
        paths = self.folder / "metrics.jsonl", self.folder / "eval.jsonl"
        self._metrics, self._evals = (
            path.open("w", buffering=1, encoding="utf-8") for path in paths
        )
        with self._metrics, self._evals:
            yield
        for path in paths:  # before summary.json says that the run is complete
            sync(path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluate(0)
        super().on_train_begin(args, state, control, **kwargs)
        self._print(f"starts, {state.max_steps} steps")

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
        if time.monotonic() - self._said >= INTERVAL:
            self._print(self.line(state, {"loss": logs["loss"]}))

    def _print(self, text: str) -> None:
        say(f"{self.label}: {text}", sys.stderr)
        self._said = time.monotonic()

    def _evaluate(self, step: int) -> None:
        loss = self.evaluate()
        if not math.isfinite(loss):
            raise RunError(f"training diverged: the validation loss is {loss} at step {step}")
        self.evaluations.append((step, loss))
        self._evals.write(json.dumps({"step": step, "lm_loss": loss}) + "\n")

    def summary(self, thresholds: Sequence[float]) -> dict[str, Any]:
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
    """Wall-clock, and the processor time of this process:
    what other work on a shared machine does not lengthen."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()
