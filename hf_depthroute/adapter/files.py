"""An adapter's two files, read strictly and without a model: `adapter_config.json` and `adapter_model.safetensors`.

PEFT takes what Python's JSON reader makes of a config and whatever tensors a file holds. Here a file is what a save of
this library wrote, whole, or it is refused with one line that names the file, what is wrong and what to do.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..files.shown import OneLine
from ..files.untrusted import RefusedFileError, nests_deeper, read_file

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
CARD_NAME = "README.md"
PEFT_TYPE = "DEPTH_ROUTE"
STAGE_PREFIX = ".saving-"  # folders inside an adapter's folder that hold a save in progress

MAX_CONFIG_BYTES = 1 << 20
_MAX_DEPTH = 8
_MAX_README_BYTES = 1 << 20
_WRAPPER = "base_model.model."
_OWN_NAME = re.compile(r"(?:\w+\.)+?(\d{1,6})\.routing\.depth_route_[a-z]+\.[\w.]+")
_DTYPES = ("F32", "BF16", "F16")
_COUNTER = ".depth_route_quantiles.updates"  # the one tensor of integers
_MAX_NAME = 256
_TABLE = ".depth_route_memory.table"


class AdapterMismatchError(OneLine, ValueError):
    """An adapter does not belong to this model, or its files do not hold exactly what a save wrote."""


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        AdapterMismatchError: It is no such file; it is larger than 1 MiB, nested more than 8 deep, repeats a key, or
            holds a number that JSON does not know.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise AdapterMismatchError(f"{path}: field {key[:100]!r} is there twice; remove one")
            found[key] = value
        return found

    def no_constant(name: str) -> Any:
        raise AdapterMismatchError(
            f"{path}: holds the value {name}, which JSON does not have; write a finite number or null"
        )

    try:
        text = read_file(path, MAX_CONFIG_BYTES).decode("utf-8")
        if nests_deeper(text, _MAX_DEPTH):
            raise AdapterMismatchError(f"{path}: nested more than {_MAX_DEPTH} deep; no adapter config is")
        found = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except AdapterMismatchError:
        raise
    except FileNotFoundError as error:
        raise AdapterMismatchError(f"{path}: cannot be read: {error.strerror}") from error
    except RefusedFileError as error:
        raise AdapterMismatchError(str(error)) from error
    except ValueError as error:
        raise AdapterMismatchError(f"{path} is corrupt, not JSON ({error}); download or copy it again") from error
    if not isinstance(found, dict):
        raise AdapterMismatchError(f"{path}: holds no JSON object; is it an adapter config?")
    return found


def read_readme(folder: Path) -> bytes:
    """The content of a folder's README.

    Raises:
        FileNotFoundError: There is none.
        AdapterMismatchError: It links out of the folder, cannot be read, or is larger than 1 MiB.
    """
    try:
        return read_file(folder / CARD_NAME, _MAX_README_BYTES, folder)
    except RefusedFileError as error:
        raise AdapterMismatchError(str(error)) from error


def check_folder(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse an adapter folder whose weights are not those that `config` was saved with. No weights: nothing to check.

    Raises:
        AdapterMismatchError: The weights are corrupt, hold a tensor that is no adapter's, or are another save's.
    """
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        if (folder / "adapter_model.bin").is_file():
            raise AdapterMismatchError(f"{folder}: adapter_model.bin is a pickle; only safetensors are read")
        return
    tensors = read_tensors(path, config)
    wanted = config.get("weights_hash")
    if wanted is not None and tensors_hash(tensors) != wanted:
        raise AdapterMismatchError(
            f"{path}: corrupt, or of another save than {CONFIG_NAME}: its hash is not the one there; "
            "copy both files again, or save again"
        )


def read_tensors(path: Path, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of an adapter's weights file; names, dtypes and layers are checked before any value is read.

    Raises:
        AdapterMismatchError: As `check_folder`.
    """
    saved_modules = config.get("modules_to_save") or ()
    layers = config.get("layers")
    routed = set(layers) if isinstance(layers, list) else None
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            for name in names:
                part = file.get_slice(name)
                fault = _fault_of(name, part.get_dtype(), saved_modules, routed)
                fault = fault or _fault_of_table(name, part.get_shape(), config)
                if fault is not None:
                    raise AdapterMismatchError(f"{path}: {fault}")
            # Copies: what is checked is what is used, even if the file is written to meanwhile.
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except (SafetensorError, OSError) as error:
        raise AdapterMismatchError(
            f"{path}: corrupt or not in safetensors format ({error}); download or copy it again"
        ) from error
    for name, value in tensors.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise AdapterMismatchError(f"{path}: tensor {name} holds values that are not finite; train it again")
    return tensors


def _fault_of(name: str, dtype: str, saved_modules: Iterable[str], routed: set[Any] | None) -> str | None:
    """Why an adapter's file cannot hold this tensor: it is neither a router's nor of a base module saved whole."""
    own = _OWN_NAME.fullmatch(name) if len(name) <= _MAX_NAME else None
    if own is None and not any(f"{module}." in name.removeprefix(_WRAPPER) for module in saved_modules):
        return f"unexpected tensor {name[:100]}; no routed adapter has it"
    if own is not None and routed is not None and int(own[1]) not in routed:
        return f"tensor {name} is of a layer that is not routed; the config says layers={reprlib.repr(sorted(routed))}"
    if dtype not in _DTYPES and not (dtype == "I64" and name.endswith(_COUNTER)):
        return f"tensor {name} has dtype {dtype}; use one of: {', '.join(_DTYPES)}"
    return None


def _fault_of_table(name: str, shape: list[int], config: Mapping[str, Any]) -> str | None:
    """Why this is not the memory's table that the config speaks of; asked before one of its size is made."""
    wanted = [config.get("memory_slots"), config.get("memory_width")]
    if not name.endswith(_TABLE) or wanted == shape:
        return None
    return f"tensor {name[:_MAX_NAME]} has shape {shape}, the config says {reprlib.repr(wanted)}"


def tensors_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """`sha256:...` over names, dtypes, shapes and bytes, whatever the order and PEFT's prefix of the names."""
    digest = hashlib.sha256()
    for name, value in sorted((name.removeprefix(_WRAPPER), value) for name, value in tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"
