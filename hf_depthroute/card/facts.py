"""Facts about an adapter, read from its folder without its base model and without the network.

The record of its training, `training.json`, may come from a stranger.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from ..adapter.files import (
    CONFIG_NAME,
    PEFT_TYPE,
    WEIGHTS_NAME,
    AdapterMismatchError,
    read_config,
    read_tensors,
    tensors_hash,
)
from ..config.adapter import DepthRouteConfig
from ..files.untrusted import RefusedFileError, nests_deeper, read_file
from ..routing.thresholds import ScoreQuantiles

TRAINING_NAME = "training.json"
_MAX_BYTES = 16 << 20
_MAX_DEPTH = 32
_THRESHOLDS = re.compile(
    r"(\d+)\.routing\.depth_route_(quantiles\.values|quantiles\.updates|controller\.threshold)$"
)
_BUFFER = re.compile(r"\.routing\.depth_route_(quantiles|controller|target)\.")
# Do not change what the adapter does.
_PASSING = ("weights_hash", "library_version", "inference_mode")


@dataclass(frozen=True)
class Facts:
    """The facts that a card tells of an adapter; None stands for what is not known."""

    config: DepthRouteConfig
    subfolder: str | None  # None for the folder itself
    others: dict[str, str]  # names and methods of the other adapters
    depth: int | None  # decoder layers of the base
    parameters: int | None  # that were trained
    thresholds: dict[int, float]  # by layer; empty where no threshold of a budget decides
    calibrated: bool | None  # whether the quantiles of its scores have seen text
    weights_hash: str | None
    training: Mapping[str, Any]  # the record of the run, as in `training.json`

    @property
    def shares(self) -> Mapping[str, float]:
        """The shares that ran full in calibration, by layer, of thresholds that still hold."""
        recorded = self.training.get("thresholds")
        if isinstance(recorded, Mapping):
            for layer, threshold in self.thresholds.items():
                then = recorded.get(str(layer))
                # Close and not equal: another device may have made it.
                if not is_number(then) or not math.isclose(then, threshold, rel_tol=1e-5):
                    return {}
        return self.training.get("calibrated_full_ratio") or {}

    @property
    def digest(self) -> str:
        """A hash of everything that decides what the adapter does."""
        content = {k: v for k, v in self.config.to_dict().items() if k not in _PASSING}
        text = json.dumps(content, sort_keys=True, default=str) + str(self.weights_hash)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_facts(
    folder: Path, adapter_name: str | None = None, training: Mapping[str, object] | None = None
) -> Facts:
    """The facts of a routed adapter, by default the first, in `folder` as `save_pretrained` leaves
    it; the weights may be missing. `training` is by default the adapter's `training.json`.

    Raises:
        AdapterMismatchError: There is no routed adapter, or its files are not whole.
        ConfigError: Its configuration does not hold together.
    """
    found = _adapters(folder)
    routed = [path for path, kind in found.items() if kind == PEFT_TYPE]
    if not routed:
        raise AdapterMismatchError(
            f"{folder}: holds no depth-routed adapter ({CONFIG_NAME} is missing or another's)"
        )
    place = next((p for p in routed if p != folder and p.name == adapter_name), routed[0])
    content = read_config(place / CONFIG_NAME)
    config = DepthRouteConfig(**content)
    if training is None:
        training = read_training(place)
    depth = (config.base_architecture or {}).get("num_hidden_layers")
    parameters = training.get("trainable_parameters")
    weights = place / WEIGHTS_NAME
    tensors = None
    if weights.is_file():
        tensors = read_tensors(weights, content)
        parameters = sum(t.numel() for name, t in tensors.items() if not _BUFFER.search(name))
    thresholds, calibrated = _thresholds(config, tensors, training)
    del found[place]
    return Facts(
        config=config,
        subfolder=None if place == folder else place.name,
        others={"default" if p == folder else p.name: kind for p, kind in found.items()},
        depth=depth if isinstance(depth, int) else None,
        parameters=parameters if isinstance(parameters, int) else None,
        thresholds=thresholds,
        calibrated=calibrated,
        weights_hash=config.weights_hash if tensors is None else tensors_hash(tensors),
        training=training,
    )


def holds_adapter(folder: Path) -> bool:
    """Whether `read_facts` finds a routed adapter with its weights in `folder`."""
    return any(
        k == PEFT_TYPE and (path / WEIGHTS_NAME).is_file() for path, k in _adapters(folder).items()
    )


def _adapters(folder: Path) -> dict[Path, str]:
    """Folders of adapters, with the name of their method: `folder`, then those right in it."""
    inside = (p for p in folder.glob("*/") if not p.name.startswith((".", "checkpoint-")))
    places = [place for place in (folder, *sorted(inside)) if (place / CONFIG_NAME).is_file()]
    return {place: str(read_config(place / CONFIG_NAME).get("peft_type"))[:40] for place in places}


def _thresholds(
    config: DepthRouteConfig,
    tensors: Mapping[str, torch.Tensor] | None,
    training: Mapping[str, Any],
) -> tuple[dict[int, float], bool | None]:
    if not config.takes_budget():
        return {}, None
    if tensors is None:
        recorded = {int(i): float(score) for i, score in (training.get("thresholds") or {}).items()}
        return recorded, bool(recorded) or None
    thresholds = {}
    controlled = {}
    calibrated = True
    for name, value in tensors.items():
        found = _THRESHOLDS.search(name)
        if found is None or int(found[1]) in (config.static_layers or ()):
            continue
        if found[2] == "controller.threshold":
            controlled[int(found[1])] = float(value)
        elif found[2] == "quantiles.updates":
            calibrated = calibrated and bool(value)
        else:
            table = ScoreQuantiles(1.0)
            table.set(value)
            thresholds[int(found[1])] = float(table(config.budget))
    if config.inference_rule != "threshold":
        return {}, calibrated
    return dict(sorted((thresholds | controlled).items())), calibrated


def read_training(folder: Path) -> dict[str, object]:
    """The record in a folder; empty where there is none, `AdapterMismatchError` where it is larger
    than 16 MiB, nests more than 32 deep, links out of the folder, or is no JSON object."""
    path = folder / TRAINING_NAME
    try:
        text = read_file(path, _MAX_BYTES, folder).decode("utf-8-sig")
        content = None
        if not nests_deeper(text, _MAX_DEPTH):
            content = json.loads(text)
    except FileNotFoundError:
        return {}
    except RefusedFileError as error:
        raise AdapterMismatchError(str(error)) from error
    except ValueError as error:
        raise AdapterMismatchError(
            f"{path}: cannot be read ({str(error).splitlines()[0]}); remove it"
        ) from error
    if not isinstance(content, dict):
        raise AdapterMismatchError(
            f"{path}: holds no JSON object, or one that nests too deep; remove it"
        )
    return content


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a number that a table can show."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18
