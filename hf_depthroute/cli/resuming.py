"""`train --resume`: the checkpoint to go on from, and whether it is of the run that the
options describe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from ..card.facts import read_training
from ..config.adapter import DepthRouteConfig
from ..config.fields import RoutingFields
from ..files.shown import say
from ..training.checkpoints import CheckpointError, last_complete
from . import loading
from . import options as o
from .errors import CliError, refused

ARGUMENTS = "arguments"  # of a training record: the options of its command
# Options that change nothing of what is trained.
_FREE = {
    "out",
    "overwrite",
    "resume",
    "debug",
    "config",
    "logging_steps",
    "report_to",
    "save_steps",
    "trust_remote_code",
}
# Options whose value may differ for a good reason: a folder was renamed, a run is to be longer.
_SAID = {"steps", "dataset", "eval_dataset", "model", "adapter"}
_TRAINERS = {  # arguments of a Trainer, and the options that set them
    "learning_rate": "lr",
    "seed": "seed",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "accumulate",
}


def checkpoint_to_resume(out: Path) -> Path | None:
    """The last whole checkpoint in `out`; None if there is none at all."""
    found = None
    skipped: Sequence[str] = ()
    with refused("--resume: ", CheckpointError):
        if out.is_dir():
            found, skipped = last_complete(out)
    for line in skipped:
        say(f"passed over {line}")
    if found is None:
        say(f"no checkpoint in {out}: training begins at the first step")
    return found


def check_same_run(
    checkpoint: Path, config: DepthRouteConfig, arguments: Mapping[str, object]
) -> None:
    """Refuse a checkpoint of another adapter than `config` describes,
    or of a run with other options.

    A Trainer goes on with the checkpoint's optimizer and schedule: a learning rate that is given
    now would be recorded and not used.
    """
    saved = loading.load_adapter_config(str(checkpoint))
    for field in fields(RoutingFields):
        before = getattr(saved, field.name)
        now = getattr(config, field.name)
        if before != now:
            raise CliError(
                f"--resume: {checkpoint} was trained with {field.name}={before}, not {now}; give "
                "it again"
            )
    adapter = {o.key_of(field.name) for field in fields(RoutingFields)} - {"seed"}
    earlier = _arguments_in(checkpoint)
    for name, now in json.loads(json.dumps(dict(arguments))).items():
        if name not in earlier or earlier[name] == now or name in _FREE | adapter:
            continue
        option = f"--{o.option_name(name)}"
        if name not in _SAID:
            what = (
                f"was trained with {option} {earlier[name]}, not {now}; give it again, or start in "
                "another --out"
            )
            raise CliError(f"--resume: {checkpoint} {what}")
        say(f"note: {option} is {now} from here on; {checkpoint} was trained with {earlier[name]}")


def _arguments_in(checkpoint: Path) -> dict[str, object]:
    """The options that a checkpoint was trained with, or else what its Trainer noted."""
    record = read_training(checkpoint)
    noted = record.get(ARGUMENTS)
    if isinstance(noted, dict):
        return noted
    trainers = record.get("hyperparameters")
    if not isinstance(trainers, dict):
        return {}
    return {_TRAINERS[name]: value for name, value in trainers.items() if name in _TRAINERS}
