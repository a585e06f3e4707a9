"""Strict loading: an adapter file holds exactly the adapter's tensors, or it is refused,
on every loading path.

PEFT and transformers load what fits and log the rest: a missing tensor leaves a router random, and
a tensor with the name of a base weight overwrites it.

Checkpoint key: base_model.model.model.layers.3.routing.depth_route_gate.hidden.weight
Model key:      base_model.model.model.layers.3.routing.depth_route_gate.default.hidden.weight
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ..base.contexts import kept_modes
from ..base.stack import unwrapped
from ..config.adapter import ConfigError, DepthRouteConfig
from ..config.fields import MEMORY_FIELDS, RoutingFields
from ..files.shown import reason
from ..files.untrusted import RefusedFileError, read_file
from ..parts.neurons import NEURONS, NeuronBranch
from ..routing.routing import ROUTING, Routing
from .files import (
    PEFT_TYPE,
    AdapterMismatchError,
    check_folder,
    read_config,
    read_tensors,
    tensors_hash,
)
from .injection import leave
from .labels import unhook_labels
from .modules_to_save import key_in_file, unwrap
from .source import read_whole, settle
from .tensor_rules import WRAPPER, fault_of_values

P = ParamSpec("P")
R = TypeVar("R")

PREFIX = "depth_route_"
_OWN_KEY = re.compile(rf"\.{ROUTING}\.{PREFIX}[a-z]+\.")
_FLOATS = {torch.float32, torch.bfloat16, torch.float16}  # one for another
_SETTINGS = ("budget", "phases", "selection")  # may be others than when the adapter was saved
# And where the whole configuration is given anew.
_OF_CALLER = ("threshold", "prompt_tail", "causal_rule", "budget_scope", "gate_temperature")
_SEEN_IN_TENSORS = (
    "layers",
    "static_layers",
    "branch_rank",
    "rank_pattern",
    "gate_hidden",
    "modules_to_save",
)
# The static method with which transformers reads an adapter file.
_READER = "_load_pretrained_model"
# The second group is empty where the method cannot be told: spelt with escapes, or with long gaps.
_METHOD = re.compile(rb'"peft_type"(\s{0,99}:\s{0,99}"([A-Z0-9_]{1,99})")?|\\u00[4-7]')
_MAX_BYTES_OF_OTHERS = 1 << 26  # of the config of another method


def own_tensors(
    state_dict: Mapping[str, torch.Tensor], adapter_name: str
) -> dict[str, torch.Tensor]:
    """The entries of a model's state dict that belong to adapter `adapter_name`."""
    mine = re.compile(rf"{_OWN_KEY.pattern}{re.escape(adapter_name)}\.")
    return {key: value for key, value in state_dict.items() if mine.search(key)}


def without_adapter_name(key: str, adapter_name: str) -> str | None:
    """A model key as the checkpoint has it; None when it is not one of ours."""
    found = _OWN_KEY.search(key)
    if found is None:
        return None
    return key[: found.end()] + key[found.end() :].removeprefix(f"{adapter_name}.")


def match_tensors(
    model: nn.Module, config: Any, adapter_name: str, state_dict: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by model key.

    Raises:
        AdapterMismatchError: A tensor is missing, left over, of another shape or kind, or not
            finite; or they are not those that the config was saved with.
    """
    # Copies: what is checked is what is loaded, even if the file is written to meanwhile.
    state_dict = {key: value.detach().clone() for key, value in state_dict.items()}
    given = {
        key_in_file(key.removeprefix(WRAPPER), adapter_name): value
        for key, value in state_dict.items()
    }
    held = model.state_dict()
    copies = {key: value for key, value in held.items() if key_in_file(key, adapter_name) != key}
    matched = {}
    for key, expected in (own_tensors(held, adapter_name) | copies).items():
        bare = without_adapter_name(key, adapter_name) or key_in_file(key, adapter_name)
        bare = bare.removeprefix(WRAPPER)
        value = given.pop(bare, None)
        if value is None:
            fault = "is missing"
        elif value.shape != expected.shape:
            fault = f"has shape {tuple(value.shape)}, expected {tuple(expected.shape)}"
        elif value.dtype != expected.dtype and not {value.dtype, expected.dtype} <= _FLOATS:
            fault = f"has dtype {value.dtype}, expected {expected.dtype}"
        elif wrong := fault_of_values(bare, value) or fault_of_values(
            bare, value.to(expected.dtype)
        ):
            fault = wrong
        elif key.endswith(NEURONS) and not _branch_at(model, key).has(value):
            fault = "holds neurons that the base's FFN does not have; is it another base's adapter?"
        else:
            matched[key] = value
            continue
        raise AdapterMismatchError(f"adapter file: tensor {bare} {fault}")
    for bare in given:
        raise AdapterMismatchError(f"adapter file: unexpected tensor {bare}")
    if config.weights_hash is not None:
        # PEFT has put the adapter's name into the keys of modules_to_save by now.
        named = {key_in_file(key, adapter_name): value for key, value in state_dict.items()}
        if tensors_hash(named) != config.weights_hash:
            raise AdapterMismatchError(
                "adapter file: its tensors are not those that the config was saved with; copy both "
                "files again"
            )
        # It was about that file; what the model holds may change from here on.
        config.weights_hash = None
    return matched


def _branch_at(model: nn.Module, key: str) -> NeuronBranch:
    return cast(NeuronBranch, model.get_submodule(key.removesuffix(NEURONS)))


def check_same(config: DepthRouteConfig, saved: DepthRouteConfig, given: bool = False) -> None:
    """Raise `AdapterMismatchError` where the weights of adapter `saved` would do something else
    with `config`, which is in the model, or `given` for them."""
    skipped = {*_SETTINGS, *_SEEN_IN_TENSORS}
    other = "the one in the model"
    remedy = "load it under a name of its own"
    if given:
        skipped |= {*_OF_CALLER}
        other = "the config that was given"
        remedy = "leave config out, or change the one of PeftConfig.from_pretrained"
    if not (config.has_memory and saved.has_memory):
        skipped |= {"seed", *MEMORY_FIELDS}
    for name in [field.name for field in fields(RoutingFields) if field.name not in skipped]:
        here = getattr(config, name)
        there = getattr(saved, name)
        if name == "threshold":  # None is "budget"
            here = config.fixed_threshold
            there = saved.fixed_threshold
        if here != there:
            raise AdapterMismatchError(
                f"the adapter in the files has {name}={there!r}, {other} {here!r}; {remedy}"
            )


def discard(model: nn.Module, adapter_name: str) -> None:
    """Take out an adapter that was not loaded; without another one, the model is as before."""
    base = unwrapped(model)
    routings = [module for module in base.modules() if isinstance(module, Routing)]
    for routing in routings:
        routing.delete_adapter(adapter_name)
    unwrap(base, adapter_name)
    configs = getattr(base, "peft_config", {})
    configs.pop(adapter_name, None)
    if not any(len(routing.depth_route_gate) for routing in routings):
        take_out(base)
    if not configs:
        for name in ("peft_config", "_hf_peft_config_loaded"):
            base.__dict__.pop(name, None)


def take_out(model: nn.Module) -> None:
    """Undo what injection did to the model besides adding an adapter: `enter`, `guard` and
    `hook_labels`."""
    leave(model)
    model.__dict__.pop(_READER, None)
    unhook_labels(model)


def guard(model: nn.Module) -> None:
    """Make transformers' own ways to load an adapter as strict as PEFT's.

    They read the file without asking the PEFT method, by a static method looked up on the instance:
    an attribute of the instance shadows it. `take_out` removes it.
    """
    if isinstance(model, PreTrainedModel):
        setattr(model, _READER, _read_strictly)


def _read_strictly(
    model: PreTrainedModel,
    state_dict: Any,
    checkpoint_files: list[str] | None,
    load_config: Any,
    **kwargs: object,
) -> Any:
    # transformers renames `depth_route_*` to `depth_route_*.<name>` where the load is for a routed
    # adapter.
    mapping = load_config.weight_mapping or ()
    ours = (e for e in mapping if any(PREFIX in pattern for pattern in e.source_patterns))
    if (entry := next(ours, None)) is not None:
        name = entry.target_patterns[0].removeprefix(r"\1.")
        config: Any = model.peft_config[name]
        state_dict = state_dict or {  # not read again after the checks
            key: value
            for path in checkpoint_files or ()
            for key, value in read_tensors(Path(path), config.to_dict()).items()
        }
        match_tensors(model, config, name, state_dict)
        load_config = replace(load_config, device_map=_kept_in_place(model, load_config.device_map))
    return getattr(type(model), _READER)(model, state_dict, checkpoint_files, load_config, **kwargs)


def _kept_in_place(model: nn.Module, device_map: Mapping[str, object] | None) -> dict[str, object]:
    """A device map for reading an adapter: its parts stay where they are.

    Otherwise those of an offloaded layer would be left at their first values: nothing would fetch
    them from disk.
    """
    places = dict(device_map or {})
    for name, module in model.named_modules():
        if isinstance(module, Routing) and (first := next(module.parameters(), None)) is not None:
            places[name] = first.device
    return places


@contextlib.contextmanager
def unchanged_on_error(model: nn.Module, adapter_name: str = "default") -> Iterator[None]:
    """Whatever the block raises, take out adapter `adapter_name` if it is new.

    Which parameters train, and which modules are in training mode, is then as before, too.
    """
    before = has_adapter(model, adapter_name)
    restore_trained = kept_trained(model)
    restore_modes = kept_modes(model)
    try:
        yield
    except BaseException:
        if not before and has_adapter(model, adapter_name):
            discard(model, adapter_name)
        restore_trained()
        restore_modes()
        raise


def kept_trained(model: nn.Module) -> Callable[[], None]:
    """A function that lets those parameters train that train now, or will once routing is on."""
    trains = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    later = [(module, module.trained) for module in model.modules() if isinstance(module, Routing)]

    def restore() -> None:
        for parameter, trained in trains:
            parameter.requires_grad_(trained)
        for routing, names in later:
            routing.trained = names

    return restore


def restoring(
    function: Callable[Concatenate[nn.Module, P], R],
) -> Callable[Concatenate[nn.Module, P], R]:
    """`function` in `unchanged_on_error` of its first argument, a model."""

    @functools.wraps(function)
    def called(model: nn.Module, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with unchanged_on_error(model):
            return function(model, *args, **kwargs)

    return called


def has_adapter(model: nn.Module, adapter_name: str) -> bool:
    """Whether a routed adapter of that name is in `model`."""
    return any(
        isinstance(m, Routing) and adapter_name in m.depth_route_gate for m in model.modules()
    )


def from_json_file(read: Any, cls: Any, path_json_file: str, **kwargs: Any) -> Any:
    """`PeftConfig.from_json_file`, here `read`, by which every path reads a config first."""
    path = Path(path_json_file)
    if not path.exists():
        return read(cls, path_json_file, **kwargs)  # PEFT says why
    methods = _methods_in(path)
    # Without a method that is found like this it may be ours: read in bounds first.
    if PEFT_TYPE not in methods and (methods or read_config(path).get("peft_type") != PEFT_TYPE):
        return read(cls, path_json_file, **kwargs)
    try:
        return _read_ours(path)
    except AdapterMismatchError:
        settle(path.parent)
        return read_whole(path.parent, lambda: _read_ours(path))


def _methods_in(path: Path) -> set[str]:
    """The PEFT methods that a config names, by its text; empty if one cannot be told.

    Lists of target modules make the configs of other methods large; what is ours, or does not say
    whose it is, has the bounds of `read_config`, which also says why a file cannot be read.
    """
    found: set[str] = set()
    with contextlib.suppress(FileNotFoundError, RefusedFileError):
        for match in _METHOD.finditer(read_file(path, _MAX_BYTES_OF_OTHERS)):
            if match[2] is None:
                return set()
            found.add(match[2].decode())
    return found


def _read_ours(path: Path) -> dict[str, Any]:
    config = read_config(path)
    try:
        DepthRouteConfig(**config)
    except (ValueError, TypeError) as error:  # ours, and what PEFT says about its own fields
        raise ConfigError(f"{path}: {reason(error)}") from error
    check_folder(path.parent, config)
    return config
