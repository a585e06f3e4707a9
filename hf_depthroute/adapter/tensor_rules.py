"""The tensors that an adapter may have: names, dtypes and sizes by a file's header,
and the values of each kind.

A tensor of the right shape can still do harm: a count of -1 divides by zero when training goes on,
a table that falls has no quantiles, a value of 1e38 is infinite after the first sum. So every kind
of tensor has a range, here and nowhere else, and a header is compared with the configuration before
memory is taken for either.
"""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..parts.neurons import NEURONS
from ..parts.targets import TARGETS

WRAPPER = "base_model.model."
MAX_HEADER_BYTES = 4 << 20  # of a safetensors file; one of 126 layers has some 400 kB
_MOST_OF_A_LAYER = 256  # tensors; ours have some 30, a gate of another package may have more
_MOST_OF_SAVED_MODULES = 4096
_MAX_NAME = 256
_OWN_NAME = re.compile(r"(?:\w+\.)+?(\d{1,6})\.routing\.depth_route_[a-z]+\.[\w.]+")
_FLOATS = ("F32", "BF16", "F16")
_COUNTER = ".depth_route_quantiles.updates"
_NEURONS = f".depth_route_branch{NEURONS}"
_TABLE = ".depth_route_memory.table"
_LARGEST = 1e30  # sums and differences of numbers up to it are finite in float32
_MOST_UPDATES = 1 << 40
_ROUNDING = 2.0**-7  # of bfloat16: by so much a rounded table may fall


class Entry(NamedTuple):
    """A tensor as a file's header announces it."""

    dtype: str
    shape: list[int]


def fault_of_header(header: Mapping[str, Entry], config: Mapping[str, Any]) -> str | None:
    """Why a file with this `header` is not the adapter of this `adapter_config.json`; or None."""
    saved_modules = config.get("modules_to_save") or ()
    layers = config.get("layers")
    routed = set(layers) if isinstance(layers, list) else None
    found: Counter[int | None] = Counter()
    for name, entry in header.items():
        own = None
        if len(name) <= _MAX_NAME:
            own = _OWN_NAME.fullmatch(name)
        layer = None if own is None else int(own[1])
        bare = name.removeprefix(WRAPPER)
        if own is None and not any(f"{module}." in bare for module in saved_modules):
            return f"unexpected tensor {name[:100]}; no routed adapter has it"
        if layer is not None and routed is not None and layer not in routed:
            listed = reprlib.repr(sorted(routed))
            return (
                f"tensor {name} is of a layer that is not routed; the config says layers={listed}"
            )
        whole = entry.dtype == "I64" and name.endswith((_COUNTER, _NEURONS))
        if entry.dtype not in _FLOATS and not whole:
            known = ", ".join(_FLOATS)
            return f"tensor {name[:_MAX_NAME]} has dtype {entry.dtype}; use one of: {known}"
        found[layer] += 1
        if found[layer] > (_MOST_OF_SAVED_MODULES if own is None else _MOST_OF_A_LAYER):
            where = "modules_to_save"
            if own is not None:
                where = f"layer {layer}"
            return (
                f"holds more than {found[layer] - 1:,} tensors of {where}; no routed adapter does"
            )
    return _fault_of_memory(header, config, routed)


def layers_without(names: Iterable[str], config: Mapping[str, Any]) -> list[int]:
    """The layers that a saved `adapter_config.json` routes and that no tensor is of, by the names
    that a `PeftModel` gives them."""
    found = [_OWN_NAME.fullmatch(name) for name in names if name.startswith(WRAPPER)]
    have = {int(own[1]) for own in found if own}
    return sorted(set(config["layers"]) - have)


def _fault_of_memory(
    header: Mapping[str, Entry], config: Mapping[str, object], routed: set[object] | None
) -> str | None:
    """Why the tables of n-grams are not those that the configuration has room made for."""
    wanted = [config.get("memory_slots"), config.get("memory_width")]
    for name, entry in header.items():
        if name.endswith(_TABLE) and entry.shape != wanted:
            said = reprlib.repr(wanted)
            return f"tensor {name[:_MAX_NAME]} has shape {entry.shape}, the config says {said}"
    target = TARGETS.get(str(config.get("target")))
    if config.get("branch") != "memory" and not (target is not None and target.reads_ids):
        return None
    if routed is None:
        return (
            "the config does not list its layers, so their tables cannot be compared; save the "
            "adapter again"
        )
    tables = [_OWN_NAME.fullmatch(name) for name in header if name.endswith(_TABLE)]
    have = {int(own[1]) for own in tables if own}
    missing = sorted(routed - have, key=str)
    if missing:
        return f"memory.table of layer {missing[0]} is missing; copy both files again"
    return None


def fault_of_values(name: str, value: torch.Tensor) -> str | None:
    """Why an adapter's tensor cannot hold these values: `"holds values that are not finite"`."""
    kinds = (rule for kind, rule in RULES.items() if name.endswith(kind))
    return next(kinds, _fault_of_weight)(value)


def _fault_of_weight(value: torch.Tensor) -> str | None:
    if value.is_floating_point() and not value.isfinite().all():
        return "holds values that are not finite"
    return None


def _fault_of_score(value: torch.Tensor) -> str | None:
    if fault := _fault_of_weight(value):
        return fault
    if value.numel() and float(value.abs().max()) > _LARGEST:
        return f"holds values beyond {_LARGEST:g}; no score is"
    return None


def _fault_of_quantiles(value: torch.Tensor) -> str | None:
    if fault := _fault_of_score(value):
        return fault
    flat = value.double().reshape(-1)
    slack = _ROUNDING * flat[1:].abs().clamp(min=1.0)
    if bool((flat.diff() >= -slack).all()):
        return None
    return "falls; quantiles ascend"


def _fault_of_count(value: torch.Tensor) -> str | None:
    if value.is_floating_point():
        return f"has dtype {value.dtype}, and is a count"
    if value.numel() and not 0 <= int(value.min()) <= int(value.max()) <= _MOST_UPDATES:
        return f"is a count, from 0 to {_MOST_UPDATES:,}"
    return None


def _fault_of_neurons(value: torch.Tensor) -> str | None:
    if value.is_floating_point():
        return f"has dtype {value.dtype}, and is of indices"
    if value.numel() and int(value.min()) < 0:
        return "holds a negative index"
    return None


# What tensors are held to besides being finite, by the ends of their names.
RULES: dict[str, Callable[[torch.Tensor], str | None]] = {
    ".depth_route_quantiles.values": _fault_of_quantiles,
    _COUNTER: _fault_of_count,
    _NEURONS: _fault_of_neurons,
    ".depth_route_controller.threshold": _fault_of_score,
}


def first_fault(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The first fault of an adapter's values, with the tensor's name."""
    faults = ((name, fault_of_values(name, value)) for name, value in tensors)
    return next((f"tensor {name} {fault}" for name, fault in faults if fault is not None), None)
