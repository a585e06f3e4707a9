"""Readable training logs: one line per log entry.

The per-layer values (`full_ratio/layer_11` and so on) are left out of the line only. They stay in
the log entries, so TensorBoard, trackio and `log_history` have them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerState, TrainingArguments

from ..config.adapter import DepthRouteConfig
from ..files.shown import counted, say
from ..parts.gates import GATES
from .arguments import RoutingArguments
from .objective import ramp

if TYPE_CHECKING:
    from transformers import TrainerControl

_FAR = 0.1  # from the budget, in shares of the tokens
_NOT_SHOWN = ("epoch", "total_flos")


class Lines:
    """Remembers when training began, for the time left. A mixin of callbacks."""

    begun, first_step = 0.0, 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.begun = time.monotonic()
        self.first_step = state.global_step
        super().on_train_begin(args, state, control, **kwargs)  # type: ignore[misc]

    def line(self, state: TrainerState, logs: Mapping[str, Any]) -> str:
        done = state.global_step - self.first_step
        rest = state.max_steps - state.global_step
        passed = time.monotonic() - self.begun
        left = None
        if self.begun and done > 0:
            left = passed / done * rest
        return log_line(logs, state.global_step, state.max_steps, left, self.first_step)


class LinePrinter(Lines, PrinterCallback):
    """transformers' `PrinterCallback` with a readable line instead of the whole log entry."""

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_local_process_zero and logs:
            say(self.line(state, logs))


class LineProgress(Lines, ProgressCallback):
    """transformers' progress bar with a readable line above it instead of the whole log entry."""

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs:
            self.training_bar.write(self.line(state, logs))


def print_lines(trainer: Trainer) -> None:
    """Exchange the Trainer's own two ways of printing log entries; the caller's stay."""
    replaced = {PrinterCallback: LinePrinter, ProgressCallback: LineProgress}
    callbacks = trainer.callback_handler.callbacks
    for index, callback in enumerate(callbacks):
        if type(callback) in replaced:
            callbacks[index] = replaced[type(callback)]()


def log_line(
    logs: Mapping[str, Any],
    step: int,
    steps: int,
    seconds_left: float | None = None,
    first_step: int = 0,
) -> str:
    """A log entry in one line: step, loss, its terms, mean share run full, mean probability.

    A training that was resumed took the steps after `first_step`.
    """
    if "train_runtime" in logs:
        speed = logs.get("train_steps_per_second")
        mean = ""
        if "train_loss" in logs:
            mean = f", mean loss {_number(logs['train_loss'])}"
        time_taken = duration(logs["train_runtime"])
        took = counted(step, "step")
        if first_step:
            took = f"{counted(step - first_step, 'step')}, up to step {step},"
        return f"trained {took} in {time_taken} ({_number(speed)} steps/s){mean}"
    shown = [name for name in logs if name not in _NOT_SHOWN and "/layer_" not in name]
    rest = {name: logs[name] for name in shown}
    parts = [f"step {step:>{len(str(steps))}}/{steps}"]
    if "loss" in rest:
        parts.append(f"loss {_number(rest.pop('loss'))}")
    terms = [name for name in rest if name.startswith("loss_")]
    if terms:
        shown = [f"{name.removeprefix('loss_')} {_number(rest.pop(name))}" for name in terms]
        parts.append(", ".join(shown))
    gated = {key.removeprefix("gate_prob/") for key in logs if key.startswith("gate_prob/layer_")}
    for name, form in {"full_ratio": "full {:.1%}", "gate_prob": "gate p {:.3f}"}.items():
        keys = [key for key in logs if key.startswith(f"{name}/")]
        if gated:
            keys = [key for key in keys if key.removeprefix(f"{name}/") in gated]
        values = [float(logs[key]) for key in keys]
        if values:
            parts += [form.format(sum(values) / len(values))]
    short = {"learning_rate": "lr", "grad_norm": "grad"}
    parts += [f"{short.get(name, name)} {_number(value)}" for name, value in rest.items()]
    if seconds_left is not None:
        parts += [f"{duration(seconds_left)} left"]
    return " | ".join(parts)


def unfinished_schedules(
    arguments: RoutingArguments, config: DepthRouteConfig, steps: int
) -> list[str]:
    """A line on every schedule that ends after a training of `steps` optimizer steps does,
    and on labels that it does not come to."""
    if GATES[config.gate].static or steps < 1:
        return []
    assert config.gate_temperature is not None
    ends = {
        "budget": (arguments.budget_start, config.budget),
        "temperature": (arguments.temperature_start, config.gate_temperature),
    }
    found = []
    for name, (start, end) in ends.items():
        length = getattr(arguments, f"{name}_schedule_steps")
        if length <= steps or start == end:
            continue
        last = ramp(steps - 1, length, start, end)
        found.append(
            f"note: {name}_schedule_steps={length} is longer than this training of {steps} steps, "
            f"which ends at a {name} of {last:.3g}, not at the adapter's {end:g}: train for at "
            f"least {length} steps, or make the schedule shorter"
        )
    labels = {"oracle_warmup": arguments.uses_oracle(), "cgs_warmup": arguments.cgs_weight > 0}
    return found + [
        f"note: {name}={getattr(arguments, name)}: a training of {steps} steps makes no labels, so "
        f"their losses do nothing; train longer, or lower {name}"
        for name, used in labels.items()
        if used and getattr(arguments, name) >= steps
    ]


def missed_budget(config: DepthRouteConfig, history: Sequence[Mapping[str, Any]]) -> str | None:
    """A line on a gate with a fixed threshold that ended far from its budget; None if it did not.

    Only a loss pulls such a gate to its budget, and nothing corrects the share afterwards:
    `calibrate` moves no fixed threshold.
    """
    gate = GATES[config.gate]
    if config.fixed_threshold is None or gate.soft or gate.static or gate.exits or gate.spares:
        return None
    found = [[v for name, v in logs.items() if name.startswith("full_ratio/")] for logs in history]
    shares: list[float] = next((values for values in reversed(found) if values), [])
    share = sum(shares) / len(shares) if shares else config.budget
    if abs(share - config.budget) <= _FAR:
        return None
    return (
        f"note: {share:.1%} of the tokens run full, far from the budget of {config.budget:.1%}: "
        f"the threshold of this gate is fixed at {config.fixed_threshold:g}, so only losses move "
        "the share; raise budget_weight or capacity_weight, train longer, or take "
        "threshold='budget' and calibrate"
    )


def duration(seconds: float) -> str:
    """`75` -> `"1:15"`, `4000` -> `"1:06:40"`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
