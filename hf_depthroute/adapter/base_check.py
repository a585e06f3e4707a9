"""Which base model an adapter belongs to: architecture, sizes, and a few of its weights.

A base of the same shape with other weights takes any adapter's tensors and gives other text. So the adapter's config
holds one value of each weight of three decoder layers, rounded to what bfloat16 keeps, and loading compares them.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from ..base.families import find_decoder, find_family
from .files import AdapterMismatchError

SAMPLED = "sampled_weights"
_SIZES = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
_READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # quantised weights are left out
_allowed: ContextVar[bool] = ContextVar("allow_base_mismatch", default=False)


@contextmanager
def allow_base_mismatch() -> Iterator[None]:
    """Inside the block, adapters load onto bases of the same architecture, width and depth with other weights.

    Works on every path: `PeftModel.from_pretrained`, `load_adapter`, `AutoModelForCausalLM.from_pretrained`. An adapter
    that is saved afterwards belongs to the base that it was saved with.
    """
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


def describe_base(model: Any) -> dict[str, Any]:
    """Architecture, sizes and sampled weights that an adapter depends on; saved with it."""
    config = model.config
    read = config.get if isinstance(config, dict) else lambda name: getattr(config, name, None)
    return {**{name: read(name) for name in _SIZES}, SAMPLED: sampled_weights(model)}


def remember_base(model: Any, config: Any) -> None:
    """Note in `config` which base its adapter is saved with: its weights may have been trained since injection."""
    described = config.base_architecture or {}
    # What cannot be read now, because it is sharded or offloaded, stays as it was.
    config.base_architecture = {**described, SAMPLED: {**(described.get(SAMPLED) or {}), **sampled_weights(model)}}


def check_base(model: Any, wanted: dict[str, Any]) -> None:
    """Refuse a base that is not the one that `wanted`, from `describe_base`, describes.

    Raises:
        AdapterMismatchError: A size or a weight differs.
    """
    here = describe_base(model)
    for key, value in wanted.items():
        if key == SAMPLED or (key == "vocab_size" and _allowed.get()):
            continue
        if key not in here or here[key] != value:
            raise AdapterMismatchError(
                f"this adapter was made for another base model: {key[:64]} is {reprlib.repr(value)}, "
                f"this model has {here.get(key)!r}"
            )
    expected = wanted.get(SAMPLED)
    if _allowed.get() or not isinstance(expected, dict):
        return
    common = [name for name in expected if name in here[SAMPLED]]
    differing = [name for name in common if not _alike(expected[name], here[SAMPLED][name])]
    if differing:
        raise AdapterMismatchError(
            f"this adapter was made for another base model: {len(differing)} of {len(common)} sampled weights differ, "
            f"such as {differing[0]}; load its own base, or accept another with hf_depthroute.allow_base_mismatch()"
        )


def sampled_weights(model: Any) -> dict[str, float]:
    """One value of each weight of the first, the middle and the last decoder layer and of the embeddings, by name.

    Adapter weights are not the base's; names are those that the base had without them. Left out is what cannot be
    read: offloaded, sharded and quantised weights.
    """
    family = find_family(model)
    layers = getattr(find_decoder(model, family), family.layers)
    read = [("embeddings", model.get_input_embeddings())]
    read += [(f"{family.layers}.{i}", layers[i]) for i in sorted({0, len(layers) // 2, len(layers) - 1})]
    found = {}
    for prefix, module in read:
        for name, weight in sorted(_base_weights(prefix, module), key=lambda item: item[0]):
            data = weight.data
            if type(data) is not torch.Tensor or data.is_meta or not data.numel() or data.dtype not in _READABLE:
                continue
            position = int.from_bytes(name.encode()[-6:], "big") % data.numel()
            value = float(data.reshape(-1)[position].to(torch.bfloat16))
            if math.isfinite(value):
                found[name] = value
    return found


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


def _alike(one: Any, other: Any) -> bool:
    """Equal up to the rounding of a model that is loaded in another of the 16-bit dtypes."""
    if not isinstance(one, (int, float)) or isinstance(one, bool):
        return False
    return math.isclose(one, other, rel_tol=2**-7, abs_tol=1e-6)
