"""Is this folder an adapter that can be trusted to load? Reads its two files; no model, no network, no code."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .adapter_file import (
    CONFIG_NAME,
    PEFT_TYPE,
    STAGE_PREFIX,
    WEIGHTS_NAME,
    AdapterMismatchError,
    read_config,
    read_tensors,
    tensors_hash,
)
from .config import ConfigError, DepthRouteConfig
from .gates import GATES
from .quantiles import NOT_FITTED
from .shown import shown

_UPDATES = ".depth_route_quantiles.updates"
_PART = re.compile(r"(\d+)\.routing\.depth_route_([a-z]+)\.(.+)")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: `state` is `"ok"`, `"note"` or `"fault"`."""

    state: str
    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", shown(self.text))


def examine(folder: Path) -> Iterator[Finding]:
    """What can be said about the adapter in `folder`; ends at the first fault that hides the rest."""
    try:
        content = read_config(folder / CONFIG_NAME)
        if content.get("peft_type") != PEFT_TYPE:
            kind = str(content.get("peft_type"))[:64]
            yield Finding("fault", f"{CONFIG_NAME}: peft_type is {kind!r}; this is no depth-routed adapter")
            return
        config = DepthRouteConfig(**content)
    except (AdapterMismatchError, ConfigError) as error:
        yield Finding("fault", str(error))
        return
    saved_by = config.library_version or "a version before formats were numbered"
    yield Finding("ok", f"{CONFIG_NAME}: format {config.format_version}, saved by hf_depthroute {saved_by}")
    yield Finding("ok", f"routes {config.target} of layers {config.layers} with gate {config.gate}")
    yield from _examine_base(config)
    yield from _examine_weights(folder, config)
    for leftover in sorted(folder.glob(f"{STAGE_PREFIX}*")):
        yield Finding("note", f"{leftover.name}: left by a save that was killed; the next save removes it")


def _examine_base(config: DepthRouteConfig) -> Iterator[Finding]:
    base = config.base_architecture
    if not base:
        yield Finding("note", "does not say which base it belongs to; a wrong one of the same shape would load")
        return
    sizes = ", ".join(f"{name} {value}" for name, value in base.items() if isinstance(value, (str, int)))
    name = config.base_model_name_or_path or "a base without a name"
    yield Finding("ok", f"base: {name} ({sizes}; {len(base.get('sampled_weights') or ())} sampled weights)")


def _examine_weights(folder: Path, config: DepthRouteConfig) -> Iterator[Finding]:
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        yield Finding("fault", f"{path}: is missing; copy it again")
        return
    try:
        tensors = read_tensors(path, config.to_dict())
    except AdapterMismatchError as error:
        yield Finding("fault", str(error))
        return
    numbers = sum(value.numel() for value in tensors.values())
    yield Finding("ok", f"{WEIGHTS_NAME}: {len(tensors)} tensors, {numbers:,} numbers, all finite")
    if config.weights_hash is None:
        yield Finding("note", "saved without a hash: flipped bytes would not be noticed; save it again")
    elif tensors_hash(tensors) != config.weights_hash:
        yield Finding("fault", f"{path}: its hash is not the one in {CONFIG_NAME}; copy both files again")
    else:
        yield Finding("ok", f"hash {config.weights_hash[:19]}... as saved")
    yield from _examine_layers(tensors, config)
    yield from _examine_thresholds(tensors, config)


def _examine_thresholds(tensors: dict[str, torch.Tensor], config: DepthRouteConfig) -> Iterator[Finding]:
    """Whether the thresholds, where they decide, have ever been fitted to scores."""
    counts = [int(value) for name, value in tensors.items() if name.endswith(_UPDATES)]
    if not config.takes_budget():
        return
    if all(counts):
        yield Finding("ok", f"calibrated: thresholds fitted to the scores of {len(counts)} layers")
    else:
        yield Finding("note", f"not calibrated: {NOT_FITTED}")


def _examine_layers(tensors: dict[str, torch.Tensor], config: DepthRouteConfig) -> Iterator[Finding]:
    """Every routed layer has to hold the same parts, in the same shapes."""
    parts: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, value in tensors.items():
        found = _PART.search(name)
        if found is not None and found[2] != "target":  # in the first routed layer only
            parts[int(found[1])][f"{found[2]}.{found[3]}"] = tuple(value.shape)
    routed = config.layers if isinstance(config.layers, list) else sorted(parts)
    for layer in routed:
        missing = sorted(set(parts[routed[0]]) ^ set(parts[layer]))
        if missing or not parts[layer]:
            yield Finding(
                "fault", f"layer {layer} does not hold what the others hold: {', '.join(missing[:3]) or 'nothing'}"
            )
            return
        for part, shape in parts[layer].items():
            if shape != parts[routed[0]][part]:
                yield Finding("fault", f"layer {layer}: {part} has shape {shape}, in layer {routed[0]} it is another")
                return
    yield from _examine_parts(parts[routed[0]], config)
    yield Finding("ok", f"{len(routed)} layers with {len(parts[routed[0]])} tensors each")


def _examine_parts(shapes: dict[str, tuple[int, ...]], config: DepthRouteConfig) -> Iterator[Finding]:
    """Whether a layer holds the gate and the branch that the config names, in the width that it names."""
    width = (config.base_architecture or {}).get("hidden_size")
    if not isinstance(width, int) or not 0 < width <= 1 << 20:
        return
    with torch.device("meta"):
        gate = GATES[config.gate](width, config)
    wanted = {f"gate.{name}": tuple(value.shape) for name, value in gate.state_dict().items()}
    held = {name: shape for name, shape in shapes.items() if name.startswith("gate.")}
    for name in sorted(wanted.keys() | held.keys()):
        per_expert = config.target == "experts" and (name.startswith("gate.score") or name == "gate.weight")
        if name not in held or name not in wanted:
            there = "is missing" if name in wanted else "is of another gate"
            yield Finding("fault", f"gate {config.gate!r}: {name} {there}; config and weights do not belong together")
        elif held[name] != wanted[name] and not per_expert:
            yield Finding("fault", f"{name} has shape {held[name]}, the config says {wanted[name]}")
    has_branch = any(name.startswith("branch.") for name in shapes)
    if has_branch != (config.branch == "lowrank"):
        yield Finding("fault", f"branch={config.branch!r}, and the weights hold {'one' if has_branch else 'none'}")
    elif has_branch and shapes.get("branch.up.weight") != (config.branch_rank, width):
        yield Finding(
            "fault", f"the branch has shape {shapes.get('branch.up.weight')}, not ({config.branch_rank}, {width})"
        )
