"""The card that saving a model writes, and where PEFT would have written its own."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..adapter_file import AdapterMismatchError
from ..saving import SaveWarning, warn_without_card
from .benchmarks import OURS
from .facts import holds_adapter
from .page import routed_name, write_card
from .readme import CARD_NAME, shows_results
from .record import remembered
from .results import ResultError
from .training import read_training


def instead_of_pefts(update: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    """`PeftModel.create_or_update_model_card` that writes this library's card for a model with a routed adapter.

    PEFT calls it in front of the weights, which a card is made of: `save_card` writes that one.
    """

    @functools.wraps(update)
    def create_or_update_model_card(self: Any, output_dir: str) -> None:
        if routed_name(self) is None:
            update(self, output_dir)
        elif holds_adapter(Path(output_dir)):
            _write(self, Path(output_dir), Path(output_dir))

    return create_or_update_model_card


def save_card(model: Any, stage: Path, folder: Path) -> None:
    """Write the card of what was just saved. Without one, for whatever reason, there is a warning, and no error.

    Args:
        model: The `PeftModel`, with what it remembers of its run.
        stage: Where its adapters were saved.
        folder: Where they will be; a `training.json` there counts for a model that remembers none.
    """
    try:
        _write(model, stage, folder)
    except Exception as error:  # hours of training are not lost for a card
        (stage / CARD_NAME).unlink(missing_ok=True)
        warn_without_card(folder / CARD_NAME, error)


def _write(model: Any, stage: Path, folder: Path) -> None:
    name = routed_name(model)
    if name is None or not holds_adapter(stage):  # only other methods' adapters were saved
        type(model).create_or_update_model_card.__wrapped__(model, str(stage))
        return
    run = remembered(model, name)
    before = None
    if run.training is None:
        try:
            before = read_training(folder if name == "default" else folder / name)
        except AdapterMismatchError as error:
            warnings.warn(f"left out of the model card: {error}", SaveWarning, stacklevel=4)
    training = run.record(model, name, before)
    try:
        write_card(stage, run.results, adapter_name=name, training=training)
    except ResultError as error:
        warnings.warn(f"left out of the model card: {error}", SaveWarning, stacklevel=4)
        write_card(stage, adapter_name=name, training=training)
    if run.results or not shows_results(stage):  # else the card that was there stays, and what belongs to it
        for stale in folder.glob(OURS):
            if not (stage / stale.relative_to(folder)).is_file():
                stale.unlink()
