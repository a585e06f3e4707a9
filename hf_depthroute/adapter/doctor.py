"""Is this folder an adapter that can be trusted to load? Reads its two files; no model,
no network, no code."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from ..config.described import SavedAdapter
from ..config.rules import ConfigError
from ..execution import targets as targets  # the rows of `TARGETS`
from ..files.shown import counted, shown
from ..parts.gates import GATES
from ..parts.memory import NgramMemory
from ..parts.targets import TARGETS
from ..routing.description import budget_words
from ..routing.thresholds import NOT_FITTED
from .files import (
    CONFIG_NAME,
    PEFT_TYPE,
    SAMPLED,
    STAGE_PREFIX,
    WEIGHTS_NAME,
    AdapterMismatchError,
    read_config,
    read_tensors,
    tensors_hash,
)
from .source import read_whole

_TABLE = "memory.table"
_UPDATES = ".depth_route_quantiles.updates"
_PART = re.compile(r"(\d+)\.routing\.depth_route_([a-z]+)\.(.+)")


class Finding(NamedTuple):
    """One thing looked at: `state` is `"ok"`, `"note"` or `"fault"`; `text` is one line."""

    state: str
    text: str


def examine(folder: Path) -> list[Finding]:
    """Findings about the adapter in `folder`; stops at the first fault that hides the others.

    What another process saves into the folder meanwhile is looked at from the beginning.
    """
    found: list[Finding] = []

    def look() -> None:
        found[:] = [Finding(state, shown(text)) for state, text in _examine(folder)]
        faults = [finding.text for finding in found if finding.state == "fault"]
        if faults:
            raise AdapterMismatchError(faults[0])

    with suppress(AdapterMismatchError):
        read_whole(folder, look)
    return found


def _examine(folder: Path) -> Iterator[tuple[str, str]]:
    try:
        content = read_config(folder / CONFIG_NAME)
        if content.get("peft_type") != PEFT_TYPE:
            kind = str(content.get("peft_type"))[:64]
            yield "fault", f"{CONFIG_NAME}: peft_type is {kind!r}; this is no depth-routed adapter"
            return
        config = _read(content)
    except (AdapterMismatchError, ConfigError) as error:
        yield "fault", str(error)
        return
    saved_by = config.library_version or "a version before formats were numbered"
    yield "ok", f"{CONFIG_NAME}: format {config.format_version}, saved by hf_depthroute {saved_by}"
    routes = f"routes {' and '.join(config.targets())} of layers {config.layers} with gate "
    routes += config.gate
    if config.static_layers:
        routes += f"; static, without one: {config.static_layers}"
    yield "ok", routes
    sampled = (config.base_architecture or {}).get(SAMPLED, {})
    if not isinstance(sampled, dict):
        yield "fault", f"{CONFIG_NAME}: base_architecture: {SAMPLED} is no list of weights by name"
        return
    if base := config.base_architecture:
        sizes = ", ".join(
            f"{name} {value}" for name, value in base.items() if isinstance(value, (str, int))
        )
        name = config.base_model_name_or_path or "a base without a name"
        yield "ok", f"base: {name} ({sizes}; {len(sampled)} sampled weights)"
        depth = base.get("num_hidden_layers")
        if config.takes_budget() and isinstance(depth, int) and isinstance(config.layers, list):
            yield "ok", f"budget: {budget_words(config, depth)}"
    else:
        what = "does not say which base it belongs to"
        yield "note", f"{what}; a wrong one of the same shape would load"
    yield from _examine_weights(folder / WEIGHTS_NAME, config)
    for leftover in sorted(folder.glob(f"{STAGE_PREFIX}*")):
        yield "note", f"{leftover.name}: left by a save that was killed; the next save removes it"


def _read(content: dict[str, Any]) -> SavedAdapter:
    """The configuration; as loading reads it where fields are unknown here, as a newer PEFT's."""
    if content.keys() <= {field.name for field in fields(SavedAdapter)}:
        return SavedAdapter(**content)
    from ..config.adapter import DepthRouteConfig

    return cast(Any, DepthRouteConfig(**content))


def _examine_weights(path: Path, config: SavedAdapter) -> Iterator[tuple[str, str]]:
    if not path.is_file():
        yield "fault", f"{path}: is missing; copy it again"
        return
    try:
        tensors = read_tensors(path, config.to_dict())
    except AdapterMismatchError as error:
        yield "fault", str(error)
        return
    numbers = sum(value.numel() for value in tensors.values())
    yield "ok", f"{WEIGHTS_NAME}: {len(tensors)} tensors, {numbers:,} numbers, all finite"
    if config.weights_hash is None:
        yield "note", "saved without a hash: flipped bytes would not be noticed; save it again"
    elif tensors_hash(tensors) != config.weights_hash:
        yield "fault", f"{path}: its hash is not the one in {CONFIG_NAME}; copy both files again"
    else:
        yield "ok", f"hash {config.weights_hash[:19]}... as saved"
    yield from _examine_layers(tensors, config)
    if config.takes_budget():  # thresholds decide: have they ever been fitted to scores?
        static = tuple(f".{layer}.routing{_UPDATES}" for layer in config.static_layers or ())
        tables = [name for name in tensors if name.endswith(_UPDATES) and not name.endswith(static)]
        counts = [int(tensors[name]) for name in tables]
        layers = counted(len(counts), "layer")
        if all(counts):
            yield "ok", f"calibrated: thresholds fitted to the scores of {layers}"
        else:
            yield "note", f"not calibrated: {NOT_FITTED}"


def _examine_layers(
    tensors: dict[str, torch.Tensor], config: SavedAdapter
) -> Iterator[tuple[str, str]]:
    """Every routed layer has to hold the same parts in the same shapes; static ones no gate."""
    parts: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, value in tensors.items():
        match = _PART.search(name)
        if match is not None and match[2] != "target":  # in the first routed layer only
            parts[int(match[1])][f"{match[2]}.{match[3]}"] = tuple(value.shape)
    routed = config.layers if isinstance(config.layers, list) else sorted(parts)
    if not routed:
        yield "fault", f"{WEIGHTS_NAME}: holds no tensor of any layer; copy it again"
        return
    gated = [layer for layer in routed if layer not in (config.static_layers or ())] or routed
    branches: dict[int, dict[str, Any]] = {}
    for layer in routed:
        names = [name for name in parts[layer] if name.startswith("branch.")]
        branches[layer] = {name: parts[layer].pop(name) for name in names}
    first = parts[gated[0]]
    ungated = {part for part in first if not part.startswith(("gate.", "controller."))}
    for layer in routed:
        missing = sorted((set(first) if layer in gated else ungated) ^ set(parts[layer]))
        if missing or not (parts[layer] or branches[layer]):
            named = ", ".join(missing[:3]) or "nothing"
            yield "fault", f"layer {layer} does not hold what the others hold: {named}"
            return
        for part, shape in parts[layer].items():
            if shape != first[part]:
                found = f"{part} has shape {shape}"
                yield "fault", f"layer {layer}: {found}, in layer {gated[0]} it is another"
                return
    width = (config.base_architecture or {}).get("hidden_size")
    if isinstance(width, int) and 0 < width <= 1 << 20:
        yield from _examine_parts(first, config, width)
        for layer in routed:
            yield from _examine_branch(branches[layer], config, layer, width)
    static = [layer for layer in routed if layer not in gated]
    for layers, kind, held in ((gated, "layer", first), (static, "static layer", ungated)):
        if layers:
            counts = sorted({len(held) + len(branches[layer]) for layer in layers})
            numbers = " or ".join(map(str, counts))
            yield "ok", f"{counted(len(layers), kind)} with {numbers} tensors each"
    if config.has_memory:
        yield from _examine_slots(tensors)


def _examine_slots(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """How much of every layer's table training has reached: a slot is zero until then."""
    shares = {}
    for name, value in tensors.items():
        found = _PART.search(name)
        if found is not None and f"{found[2]}.{found[3]}" == _TABLE:
            shares[int(found[1])] = float(value.ne(0).any(dim=-1).float().mean())
    said = ", ".join(f"layer {layer} {share:.1%}" for layer, share in sorted(shares.items()))
    yield "ok", f"memory: slots that training has reached: {said}"


def _examine_parts(
    shapes: dict[str, tuple[int, ...]], config: SavedAdapter, width: int
) -> Iterator[tuple[str, str]]:
    """Whether a layer holds the gate and the memory that the config names, in their sizes."""
    with torch.device("meta"):
        gate, wider = (GATES[config.gate](width, config, scores).state_dict() for scores in (1, 2))
        memory = NgramMemory(width, config).state_dict() if config.has_memory else {}
    wanted = {f"gate.{name}": tuple(value.shape) for name, value in gate.items()}
    wanted |= {f"memory.{name}": tuple(value.shape) for name, value in memory.items()}
    of_any_shape = set()
    if TARGETS[config.target].per_pair:  # how many experts there are is not known
        of_any_shape = {f"gate.{name}" for name in gate if gate[name].shape != wider[name].shape}
    held = {name: shape for name, shape in shapes.items() if name.startswith(("gate.", "memory."))}
    for name in sorted(wanted.keys() | held.keys()):
        if name not in held or name not in wanted:
            there = f"{name} {'is missing' if name in wanted else 'is not of it'}"
            remark = "config and weights do not belong together"
            yield "fault", f"gate {config.gate!r}: {there}; {remark}"
        elif held[name] != wanted[name] and name not in of_any_shape:
            yield "fault", f"{name} has shape {held[name]}, the config says {wanted[name]}"


def _examine_branch(
    shapes: dict[str, tuple[int, ...]], config: SavedAdapter, layer: int, width: int
) -> Iterator[tuple[str, str]]:
    """Whether a layer holds the branch that the config names for it, in that size."""
    branch = config.branch_of(layer)
    rank = config.rank_of(layer)
    up = shapes.get("branch.up.weight")
    gate = shapes.get("branch.gate.weight")
    fault = None
    if bool(shapes) != (branch != "none"):
        fault = f"branch={branch!r}, and the weights hold {'one' if shapes else 'none'}"
    elif branch == "neurons":
        chosen = shapes.get("branch.neurons")
        down = shapes.get("branch.down.weight")
        if chosen != (rank,) or down != (width, rank):
            fault = f"the branch has {chosen} neurons and an output {down}, not {rank} neurons"
    elif shapes and up != (rank, width):
        fault = f"the branch has shape {up}, not ({rank}, {width})"
    elif gate != ((rank, width) if branch == "swiglu" else None):
        fault = f"branch={branch!r}, and its gate has shape {gate}"
    if fault is not None:
        yield "fault", f"layer {layer}: {fault}"
