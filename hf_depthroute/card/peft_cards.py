"""This library's card where PEFT, on saving and pushing a model, has its own."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn

from ..adapter.files import CARD_NAME, AdapterMismatchError
from ..adapter.peft_hooks import wrap
from ..adapter.saving import SaveWarning, after_saving, warn_without_card
from ..training.record import remembered
from .facts import holds_adapter, read_training
from .measured import ResultError
from .page import make_card, put_card, routed_name, write_card
from .push import push_folder


def install() -> None:
    """Wrap PEFT's two methods, and add the card to what a save writes."""
    wrap(PeftModel, "create_or_update_model_card", _create_or_update_model_card)
    wrap(PeftModel, "push_to_hub", _push_to_hub)
    after_saving.append(save_card)


def _create_or_update_model_card(
    update: Any,
    self: Any,
    output_dir: str,
    *,
    results: Sequence[Any] = (),
    card: Mapping[str, Any] | None = None,
) -> None:
    """`PeftModel.create_or_update_model_card`.

    PEFT calls it before the weights, which a card is made of: `save_card` writes that one. A
    Trainer calls it with `card`, more arguments of `make_card`, whether or not the adapter has been
    saved.
    """
    name = routed_name(self)
    folder = Path(output_dir)
    if name is None:
        update(self, output_dir)
    elif card is None:
        if holds_adapter(folder):
            _write(self, folder, folder)
    elif holds_adapter(folder):
        run = remembered(self, name)
        record = run.record(self, name, read_training(folder))
        results = [*run.results, *results]
        write_card(folder, results, adapter_name=name, training=record, **card)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        put_card(folder, make_card(self, results, adapter_name=name, **card))


def _push_to_hub(
    push: Any, self: Any, repo_id: str, *args: object, results: Sequence[object] = (), **kwargs: Any
) -> Any:
    """`PeftModel.push_to_hub`.

    PEFT's own puts an empty template over the card that `save_pretrained` wrote.
    """
    name = routed_name(self)
    if name is None:
        return push(self, repo_id, *args, **kwargs)
    kwargs.pop("max_shard_size", None)  # an adapter is one file
    kwargs.setdefault("commit_message", "Upload model")
    run = remembered(self, name)
    with tempfile.TemporaryDirectory() as folder:
        self.save_pretrained(folder)
        kwargs["card"] = {
            "adapter_name": name,
            "training": run.record(self, name),
            "tags": kwargs.pop("tags", None) or (),
        }
        return push_folder(folder, repo_id, results=[*run.results, *results], **kwargs)


def save_card(model: nn.Module, stage: Path, folder: Path) -> None:
    """Write the card of a `PeftModel` that was just saved in `stage`; where it cannot be made,
    there is a warning.

    A `training.json` in `folder`, where the save will be, counts for a model that remembers none.
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
