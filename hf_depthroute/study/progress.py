"""What a run of a study prints while it trains, on stderr: now and then its step, loss and time left."""

from __future__ import annotations

import sys
import time
from typing import Any

from transformers import TrainerState

from ..console import LinePrinter
from ..shown import say

INTERVAL = 10.0  # seconds between the lines of a run


class RunPrinter(LinePrinter):
    """Begins every line with `label`, which tells the run from those that train beside it."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label
        self._said = time.monotonic()

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._print(f"starts, {state.max_steps} steps")

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs and time.monotonic() - self._said >= INTERVAL:
            self._print(self.line(state, {"loss": logs["loss"]}))

    def _print(self, text: str) -> None:
        say(f"{self.label}: {text}", sys.stderr)
        self._said = time.monotonic()
