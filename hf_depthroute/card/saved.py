"""The card that saving a model writes, and where PEFT would have written its own."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .benchmarks import OURS
from .facts import TRAINING_NAME, holds_adapter, read_training
from .page import routed_name, shows_results, write_card
from .record import remembered
from .results import ResultError


def instead_of_pefts(update: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    """`PeftModel.create_or_update_model_card` that writes this library's card for a model with a routed adapter.

    PEFT calls it in front of the weights, which a card is made of: `save_card` writes that one.
    """

    @functools.wraps(update)
    def create_or_update_model_card(self: Any, output_dir: str) -> None:
        if routed_name(self) is None:
            update(self, output_dir)
        elif holds_adapter(Path(output_dir)):
            save_card(self, Path(output_dir), Path(output_dir))

    return create_or_update_model_card


def save_card(model: Any, stage: Path, folder: Path, **arguments: Any) -> None:
    """Write the card of what was just saved.

    Args:
        model: The `PeftModel`, with what it remembers of its run.
        stage: Where its adapters were saved.
        folder: Where they will be; a `training.json` there counts for a model that remembers none.
        **arguments: More of `write_card`'s.
    """
    name = routed_name(model)
    if name is None or not holds_adapter(stage):  # only other methods' adapters were saved
        type(model).create_or_update_model_card.__wrapped__(model, str(stage))
        return
    run = remembered(model, name)
    before = None
    if run.training is None:
        before = read_training((folder if name == "default" else folder / name) / TRAINING_NAME)
    arguments |= {"adapter_name": name, "training": run.record(model, name, before)}
    try:
        write_card(stage, run.results, **arguments)
    except ResultError as error:
        warnings.warn(f"left out of the model card: {error}", stacklevel=3)
        write_card(stage, **arguments)
    if run.results or not shows_results(stage):  # else the card that was there stays, and what belongs to it
        for stale in folder.glob(OURS):
            if not (stage / stale.relative_to(folder)).is_file():
                stale.unlink()
