"""Which base model an adapter belongs to: architecture, sizes, and a few of its weights.

A base of the same shape with other weights takes any adapter's tensors and gives other text. So the
adapter's config holds one value of each weight of three decoder layers, rounded to what bfloat16
keeps, and loading compares them.
"""

from __future__ import annotations

import math
import reprlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors import safe_open
from torch import nn

from ..base.families import field_of, text_config
from ..base.gguf import gguf_file_of
from ..base.stack import stack_of
from .files import SAMPLED, AdapterMismatchError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GGUF_FILE = "gguf_file"  # its name, in the description of a base that was loaded from one
_SIZES = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
# Quantised weights are left out.
_READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Median relative difference of a quantised copy (about 0.1 in 4 bits); of another model, about 1.
_NEAR = 0.5
_allowed: ContextVar[bool] = ContextVar("allow_base_mismatch", default=False)


class BaseDiffersWarning(UserWarning):
    """The base is not quite the one that the adapter was made with, and is near enough to load."""


@contextmanager
def allow_base_mismatch() -> Iterator[None]:
    """Inside the block, adapters load onto bases of the same architecture,
    width and depth with other weights.

    Works on every path: `PeftModel.from_pretrained`, `load_adapter`,
    `AutoModelForCausalLM.from_pretrained`. An adapter that is saved afterwards belongs to the base
    that it was saved with.
    """
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


def describe_base(
    model: Any, files: Iterable[Path] | None = None, vocabulary: int | None = None
) -> dict[str, Any]:
    """Architecture, sizes and sampled weights that an adapter depends on; saved with it.

    With safetensors `files`, the weights are read there: `model` may be on the meta device. With
    `vocabulary`, the embeddings are sampled where a model with that many rows has them sampled.
    """
    config = text_config(model.config)
    described: dict[str, Any] = {name: field_of(config, name) for name in _SIZES}
    file = gguf_file_of(model.config)
    if file is not None:
        described[GGUF_FILE] = file
    if files is None:
        return described | {SAMPLED: sampled_weights(model, vocabulary)}
    return described | {SAMPLED: stored_weights(model, files, vocabulary)}


def remember_base(model: nn.Module, config: PreTrainedConfig) -> None:
    """Note in `config` the base as it is now: its weights may have been trained since injection."""
    before = (config.base_architecture or {}).get(SAMPLED) or {}
    now = describe_base(model)
    # What cannot be read now, because it is sharded or offloaded, stays as it was.
    config.base_architecture = {**now, SAMPLED: {**before, **now[SAMPLED]}}


def check_base(model: Any, wanted: Mapping[str, Any], files: Iterable[Path] | None = None) -> None:
    """Refuse a base that is not the one that `wanted`, from `describe_base`, describes.

    Routers read hidden states: a vocabulary that has grown, shrunk or been padded is another base
    only if its other weights are, and there is a warning.

    Raises:
        AdapterMismatchError: A size or a weight differs; or `files`, of which weights are to be
            read, hold none.
    """
    vocabulary = wanted.get("vocab_size")
    resized = type(vocabulary) is int and vocabulary > 0
    here = describe_base(model, files, vocabulary if resized else None)
    resized = resized and here["vocab_size"] != vocabulary
    for key, value in wanted.items():
        if key in (SAMPLED, GGUF_FILE) or (key == "vocab_size" and (resized or _allowed.get())):
            continue
        if key not in here or here[key] != value:
            raise AdapterMismatchError(
                f"this adapter was made for another base model: {key[:64]} is "
                f"{reprlib.repr(value)}, this model has {here.get(key)!r}"
            )
    expected = wanted.get(SAMPLED, {})
    if not isinstance(expected, dict):
        raise AdapterMismatchError(
            f"base_architecture: {SAMPLED} is no list of weights by name; copy the config again"
        )
    if _allowed.get():
        return
    common = [name for name in expected if name in here[SAMPLED]]
    if resized and not common:
        raise AdapterMismatchError(
            f"this adapter was made for another base model: vocab_size is {vocabulary!r}, this "
            f"model has {here['vocab_size']!r}, and no weight can be compared; accept it with "
            "hf_depthroute.allow_base_mismatch()"
        )
    if files is not None and expected and not common:
        raise AdapterMismatchError(
            "none of the weights that tell this adapter's base model from others is in the base's "
            "safetensors files; is it quantised, or saved in another form?"
        )
    _check_weights(wanted, here, common)
    if resized:
        warnings.warn(
            f"this adapter was made with vocab_size {vocabulary}, this model has "
            f"{here['vocab_size']}; its routers do not depend on the vocabulary, so it loads",
            BaseDiffersWarning,
            stacklevel=2,
        )


def _check_weights(wanted: Mapping[str, Any], here: Mapping[str, Any], common: list[str]) -> None:
    """Refuse, or warn of, a base whose weights of these names are not those that are `wanted`."""
    pairs = {name: (wanted[SAMPLED][name], here[SAMPLED][name]) for name in common}
    differing = [name for name, pair in pairs.items() if not _alike(*pair)]
    off = _distance(list(pairs.values()))
    files_named = [str(base[GGUF_FILE])[:64] for base in (wanted, here) if GGUF_FILE in base]
    if differing and files_named and off < _NEAR:
        warnings.warn(
            f"this base's weights are off by {off:.1%} (median of {len(common)} samples) from "
            "those that the adapter was made with, as those of a quantised copy are "
            f"({', '.join(files_named)}): it loads, but may lose more",
            BaseDiffersWarning,
            stacklevel=3,
        )
    elif differing:
        raise AdapterMismatchError(
            f"this adapter was made for another base model: {len(differing)} of {len(common)} "
            f"sampled weights differ, such as {differing[0]}, by {off:.0%} (median of all); load "
            "its own base (a copy that was fine-tuned, or quantised to another form than GGUF, is "
            "another one), or accept this one with hf_depthroute.allow_base_mismatch()"
        )


def sampled_weights(model: nn.Module, vocabulary: int | None = None) -> dict[str, float]:
    """One value of each weight of three decoder layers and of the embeddings, by name.

    With `vocabulary`, the embeddings' value is the one that a model with that many rows is sampled
    at, if it is there.

    Adapter weights are not the base's; names are those that the base had without them. Left out is
    what cannot be read: offloaded, sharded and quantised weights.
    """
    found = {}
    for name, weight in _sampled(model):
        data = weight.data
        plain = type(data) is torch.Tensor and not data.is_meta and data.dtype in _READABLE
        # A weight of FSDP1 is this process's piece of it.
        if not plain or not data.numel() or getattr(weight, "_fsdp_flattened", False):
            continue
        position = _position(name, data.shape, vocabulary)
        if position < data.numel():
            found[name] = float(data.reshape(-1)[position].to(torch.bfloat16))
    return {name: value for name, value in found.items() if math.isfinite(value)}


def stored_weights(
    model: nn.Module, files: Iterable[Path], vocabulary: int | None = None
) -> dict[str, float]:
    """`sampled_weights` of a model in safetensors `files`, read without loading them.

    Left out is what the files have in another form: under another name or shape, or quantised.
    """
    prefix = f"{model.base_model_prefix}."
    bare = {id(weight): name.removeprefix(prefix) for name, weight in model.named_parameters()}
    weights = [(name, weight) for name, weight in _sampled(model) if weight.numel()]
    wanted = {bare[id(weight)]: (name, weight.shape) for name, weight in weights}
    found = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():  # noqa: SIM118
                if stored.removeprefix(prefix) not in wanted:
                    continue
                name, shape = wanted[stored.removeprefix(prefix)]
                part = file.get_slice(stored)
                position = _position(name, shape, vocabulary)
                if tuple(part.get_shape()) != tuple(shape) or position >= math.prod(shape):
                    continue
                place = np.unravel_index(position, tuple(shape))
                value = part[tuple(slice(int(index), int(index) + 1) for index in place)]
                if value.dtype in _READABLE:
                    found[name] = float(value.to(torch.bfloat16))
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _sampled(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights of which one value is looked at, by the names that they have in a description."""
    stack = stack_of(model)
    family = stack.family
    layers = stack.layers
    places = sorted({0, len(layers) // 2, len(layers) - 1})
    read = [("embeddings", model.get_input_embeddings())]
    read += [(f"{family.layers}.{index}", layers[index]) for index in places]
    for prefix, module in read:
        yield from sorted(_base_weights(prefix, module), key=lambda item: item[0])


def _position(name: str, shape: torch.Size, vocabulary: int | None) -> int:
    """Which of a weight's values is looked at; of embeddings, as if they had `vocabulary` rows."""
    rows = shape[0]
    if vocabulary is not None and name.startswith("embeddings."):
        rows = vocabulary
    return int.from_bytes(name.encode()[-6:], "big") % (rows * math.prod(shape[1:]))


def _base_weights(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The base's own parameters below `module`, past what PEFT methods wrapped around them."""
    if isinstance(module, AuxiliaryTrainingWrapper):
        yield from _base_weights(prefix, module.original_module)
    elif isinstance(module, BaseTunerLayer):
        base = module._modules.get("base_layer")
        if base is not None:
            yield from _base_weights(prefix, base)
    else:
        yield from module.named_parameters(prefix, recurse=False)
        for name, child in module.named_children():
            yield from _base_weights(f"{prefix}.{name}", child)


def _distance(pairs: Sequence[tuple[object, float]]) -> float:
    """The median of `|a - b| / max(|a|, |b|)`: 0 for equal weights, about 1 for unrelated ones."""
    off = [abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if isinstance(a, float) and (a or b)]
    return float(np.median(off)) if off else 1.0


def _alike(one: Any, other: Any) -> bool:
    """Equal up to the rounding of a model that is loaded in another of the 16-bit dtypes."""
    if not isinstance(one, (int, float)) or isinstance(one, bool):
        return False
    try:
        return math.isclose(one, other, rel_tol=2**-7, abs_tol=1e-6)
    except OverflowError:  # an integer beyond all floats
        return False
