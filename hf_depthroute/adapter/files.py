"""An adapter's two files, read strictly and without a model:
`adapter_config.json` and `adapter_model.safetensors`.

PEFT takes what Python's JSON reader makes of a config and whatever tensors a file holds. Here a
file is what a save of this library wrote, whole, or it is refused with one line that names the
file, what is wrong and what to do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..files.shown import OneLine
from ..files.untrusted import RefusedFileError, nests_deeper, read_file
from .tensor_rules import MAX_HEADER_BYTES, WRAPPER, Entry, fault_of_header, first_fault

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
CARD_NAME = "README.md"
PEFT_TYPE = "DEPTH_ROUTE"
SAMPLED = "sampled_weights"  # of `base_architecture`: numbers of some weights, by name
STAGE_PREFIX = ".saving-"  # folders inside an adapter's folder that hold a save in progress

MAX_CONFIG_BYTES = 1 << 20
_LFS_POINTER = b"version "  # how the text begins that Git leaves where LFS is not installed
_MAX_DEPTH = 8
_MAX_README_BYTES = 1 << 20


class AdapterMismatchError(OneLine, ValueError):
    """An adapter is not this model's, or its files do not hold exactly what a save wrote."""


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        AdapterMismatchError: It is no such file; it is larger than 1 MiB, nested more than 8 deep,
            repeats a key, or holds a number that JSON does not know.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in pairs:
            if key in found:
                raise AdapterMismatchError(
                    f"{path}: field {key[:100]!r} is there twice; remove one"
                )
            found[key] = value
        return found

    def no_constant(name: str) -> Any:
        raise AdapterMismatchError(
            f"{path}: holds the value {name}, which JSON does not have; write a finite number or "
            "null"
        )

    try:
        text = read_file(path, MAX_CONFIG_BYTES).decode("utf-8")
        if nests_deeper(text, _MAX_DEPTH):
            raise AdapterMismatchError(
                f"{path}: nested more than {_MAX_DEPTH} deep; no adapter config is"
            )
        found = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except AdapterMismatchError:
        raise
    except FileNotFoundError as error:
        raise AdapterMismatchError(f"{path}: cannot be read: {error.strerror}") from error
    except RefusedFileError as error:
        raise AdapterMismatchError(str(error)) from error
    except ValueError as error:
        raise AdapterMismatchError(
            f"{path} is corrupt, not JSON ({error}); download or copy it again"
        ) from error
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


def check_folder(folder: Path, config: Mapping[str, object]) -> None:
    """Refuse an adapter folder whose weights are not those that `config` was saved with.

    No weights: nothing to check.

    Raises:
        AdapterMismatchError: The weights are corrupt, hold a tensor that is no adapter's, or are
            another save's.
    """
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        if (folder / "adapter_model.bin").is_file():
            raise AdapterMismatchError(
                f"{folder}: adapter_model.bin is a pickle; only safetensors are read"
            )
        return
    _check_hash(path, read_tensors(path, config), config)


def _check_hash(
    path: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, object]
) -> None:
    wanted = config.get("weights_hash")
    if wanted is not None and tensors_hash(tensors) != wanted:
        raise AdapterMismatchError(
            f"{path}: corrupt, or of another save than {CONFIG_NAME}: its hash is not the one "
            "there; copy both files again, or save again"
        )


def check_header(path: Path, config: Mapping[str, object]) -> None:
    """Refuse weights whose names, dtypes and sizes do not fit `config`; no value is read.

    Raises:
        AdapterMismatchError: As `check_folder`, or there is no such file.
    """
    with _checked(path, config):
        pass


def read_tensors(path: Path, config: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The tensors of an adapter's weights file; its header is checked before any value is read.

    Raises:
        AdapterMismatchError: As `check_folder`.
    """
    with _checked(path, config) as (file, header):
        # Copies: what is checked is what is used, even if the file is written to meanwhile.
        tensors = {name: file.get_tensor(name).clone() for name in header}
    if fault := first_fault(tensors.items()):
        _check_hash(path, tensors, config)  # not the tensors that were saved
        raise AdapterMismatchError(f"{path}: {fault}; train it again")
    return tensors


@contextmanager
def _checked(path: Path, config: Mapping[str, object]) -> Iterator[tuple[Any, dict[str, Entry]]]:
    """A safetensors file and its header, which is that of the adapter in `config`."""
    try:
        with path.open("rb") as raw:
            start = raw.read(8)
        if start == _LFS_POINTER:
            raise AdapterMismatchError(
                f"{path}: a pointer of Git LFS, not the file; run git lfs pull, or download it"
            )
        size = int.from_bytes(start, "little")
        if size > MAX_HEADER_BYTES:
            raise AdapterMismatchError(
                f"{path}: corrupt, or no adapter: its header says that it has {size:,} bytes; "
                "download or copy it again"
            )
        with safe_open(path, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in list(file.keys())}
            header = {
                name: Entry(part.get_dtype(), part.get_shape()) for name, part in parts.items()
            }
            if fault := fault_of_header(header, config):
                raise AdapterMismatchError(f"{path}: {fault}")
            yield file, header
    except FileNotFoundError as error:
        raise AdapterMismatchError(f"{path}: is missing; copy it again") from error
    except (SafetensorError, OSError) as error:
        raise AdapterMismatchError(
            f"{path}: corrupt or not in safetensors format ({error}); download or copy it again"
        ) from error


def tensors_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """`sha256:...` over names without PEFT's prefix, in order, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, value in sorted(
        (name.removeprefix(WRAPPER), value) for name, value in tensors.items()
    ):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"
