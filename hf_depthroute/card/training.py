"""The record of a run, `training.json`: anybody may have written it, and a card shows what it understands of it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from ..adapter_file import AdapterMismatchError
from ..adapter_folder import RefusedFileError, nests_deeper, read_file
from .results import ResultError, read_losses

TRAINING_NAME = "training.json"
_MAX_BYTES = 16 << 20
_MAX_DEPTH = 32


def read_training(folder: Path) -> dict[str, Any]:
    """The record in a folder; empty where there is none.

    Raises:
        AdapterMismatchError: It is larger than 16 MiB, nests more than 32 deep, links out of the folder, or is no JSON
            object.
    """
    path = folder / TRAINING_NAME
    try:
        text = read_file(path, _MAX_BYTES, folder).decode("utf-8-sig")
        content = None if nests_deeper(text, _MAX_DEPTH) else json.loads(text)
    except FileNotFoundError:
        return {}
    except RefusedFileError as error:
        raise AdapterMismatchError(str(error)) from error
    except ValueError as error:
        raise AdapterMismatchError(f"{path}: cannot be read ({str(error).splitlines()[0]}); remove it") from error
    if not isinstance(content, dict):
        raise AdapterMismatchError(f"{path}: holds no JSON object, or one that nests too deep; remove it")
    return content


def understood(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a card can show of a record: fields of another kind than training writes are left out, with a warning."""
    kept = {name: value for name, value in record.items() if name not in _KINDS or _KINDS[name](value)}
    left = [name for name, value in record.items() if name not in kept and value is not None]
    if left:
        warnings.warn(
            f"left out of the model card: {', '.join(left)} in {TRAINING_NAME}, not in the form that training writes",
            stacklevel=2,
        )
    return kept


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a number that a table can show."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and is_number(value)


def _is_fields(value: Any) -> bool:
    return isinstance(value, Mapping)


def _by_layer(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        str(layer).isdecimal() and len(str(layer)) < 7 and is_number(figure) for layer, figure in value.items()
    )


def _is_log(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)


def _is_evaluation(value: Any) -> bool:
    try:
        return bool(read_losses({"rows": value}))
    except (ResultError, KeyError, TypeError, AttributeError, IndexError, OverflowError):
        return False


_KINDS: dict[str, Callable[[Any], bool]] = {
    "arguments": _is_fields,
    "calibrated_full_ratio": _by_layer,
    "command": lambda value: isinstance(value, list),
    "dataset": lambda value: isinstance(value, str),
    "evaluation": _is_evaluation,
    "examples": _is_count,
    "hyperparameters": _is_fields,
    "log_history": _is_log,
    "seconds": is_number,
    "thresholds": _by_layer,
    "trainable_parameters": _is_count,
    "versions": _is_fields,
}
