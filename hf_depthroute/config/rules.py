"""Rules of `DepthRouteConfig`: the values that a field may have;
combinations are in `conflicts`."""

from __future__ import annotations

import functools
import re
import reprlib
from collections.abc import Collection
from importlib.metadata import packages_distributions
from typing import TYPE_CHECKING, Any

from ..files.shown import OneLine
from ..files.suggestions import closest
from ..parts.gate import Gate
from ..parts.gates import GATES
from ..parts.memory import LEAST_SLOTS, shortest_order
from ..parts.rules import selections
from ..parts.targets import TARGETS
from .conflicts import conflicts_of
from .fields import CHOICES, PATTERNS, RoutingFields

if TYPE_CHECKING:
    from .adapter import DepthRouteConfig

FORMAT_VERSION = 1  # the form of an adapter's saved files; one of a newer form is refused
# What people know from LoRA's configuration, and what comes closest here.
OTHER_METHODS = {
    "r": "the rank of the cheap branch is branch_rank",
    "rank": "the rank of the cheap branch is branch_rank",
    "lora_alpha": "that is LoRA's; a routed adapter has no such scale",
    "lora_dropout": "that is LoRA's; a routed adapter has no dropout",
    "target_modules": "layers says which decoder layers are routed, and target which part of them",
    "exclude_modules": "layers says which decoder layers are routed, and target which part of them",
    "layers_to_transform": "layers says which decoder layers are routed",
    "bias": "that is LoRA's; name base modules that should train in modules_to_save",
    "init_lora_weights": "that is LoRA's; seed sets the initial weights here",
}

# Fields that are whole numbers, with the least and the greatest; those that are None by default may
# stay so.
_INTEGERS = {
    "context_dim": (1, 65536),
    "summary_dim": (1, 65536),
    "action_dim": (1, 65536),
    "gate_hidden": (1, 262144),
    "branch_rank": (1, 262144),
    "prompt_tail": (1, 262144),
    "memory_slots": (LEAST_SLOTS, 1 << 26),
    "memory_width": (1, 65536),
    "memory_heads": (1, 16),
    "seed": (0, 2**63 - 1),
}
_VERSION = re.compile(r"[A-Za-z0-9.+:_-]{1,128}")
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,255}")
# Fields that are text where they are set: with the most characters, or in a form.
_TEXTS = {"base_model_name_or_path": 4096, "revision": 256, "peft_version": 256}
_FORMS = {
    "library_version": _VERSION,
    "weights_hash": _VERSION,
    "gate_package": _PACKAGE,
    "gate_module": _MODULE,
}
_AS_SAVED = "must be what a save wrote"
_LAYER_RULE = re.compile(r"(last|every|before_last):([1-9][0-9]{0,3})|(before_last|last):half|all")


class ConfigError(OneLine, ValueError):
    """A field of `DepthRouteConfig` has a value that cannot be used; the message is one line."""


def require(holds: object, name: str, value: Any, what: str) -> None:
    """Raise a `ConfigError` about field `name` unless it `holds`."""
    if not holds:
        raise ConfigError(f"{name}={reprlib.repr(value)} {what}")


def check_budget(budget: Any) -> float:
    """Return `budget` if it is a number in (0, 1]; raise `ConfigError` otherwise."""
    return _check_number("budget", budget, low=0.0, low_open=True, high=1.0)


def check_static(static: list[int] | None, routed: list[int]) -> None:
    """Raise `ConfigError` unless the static layers are some of the routed ones, and not all."""
    outside = min(set(static or ()).difference(routed), default=None)
    what = f"must be routed layers, and layer {outside} is none"
    require(outside is None, "static_layers", static, what)
    what = "are all of the routed layers; use gate='none'"
    require(static is None or len(static) < len(routed), "static_layers", static, what)


def check_patterns(c: DepthRouteConfig, routed: list[int]) -> None:
    """Raise `ConfigError` unless the layers that patterns name are routed."""
    for name in PATTERNS:
        pattern = getattr(c, name)
        outside = min(set(pattern or ()).difference(routed), default=None)
        what = f"must name routed layers, and layer {outside} is none"
        require(outside is None, name, pattern, what)


def check_phases(phases: Any, granularity: str, target: str) -> str:
    """Return `phases`, or raise `ConfigError` if such an adapter cannot have it."""
    _check_choice("phases", phases, CHOICES["phases"])
    what = (
        "needs granularity='token': a sequence is decided once, on its prompt, for everything that "
        "follows it"
    )
    require(phases == "all" or granularity == "token", "phases", phases, what)
    always = TARGETS[target].fixed.get("phases", phases)
    what = f"is not for target={target!r}, where it is always {always!r}"
    require(phases == always, "phases", phases, what)
    return str(phases)


def check_known(given: dict[str, Any], known: list[str]) -> None:
    """Refuse a field that `DepthRouteConfig` does not have, and first a file of a newer format."""
    _check_format(given.get("format_version", FORMAT_VERSION), given.get("library_version"))
    for name in given:
        if name not in known:
            hint = "was it saved by a newer version? Then upgrade."
            if close := closest(str(name), known):
                hint = f"did you mean {close}?"
            hint = OTHER_METHODS.get(str(name), hint)
            raise ConfigError(f"there is no field {reprlib.repr(name)} in DepthRouteConfig; {hint}")


def _check_format(version: Any, library: Any) -> None:
    _check_int("format_version", version, 1, 1_000_000)
    if version > FORMAT_VERSION:
        known = isinstance(library, str) and _VERSION.fullmatch(library)
        needed = "a newer one"
        if known:
            needed = f"hf_depthroute {library}"
        raise ConfigError(
            f"format_version={version}: hf_depthroute reads up to {FORMAT_VERSION} here; upgrade: "
            f"{needed} saved this"
        )


def check_given(c: DepthRouteConfig) -> None:
    """Check each field alone, before defaults are filled in; none may name code to import."""
    _check_format(c.format_version, c.library_version)
    for name, longest in _TEXTS.items():
        value = getattr(c, name)
        fits = isinstance(value, str) and len(value) <= longest and "\0" not in value
        what = f"must be text of at most {longest} characters"
        require(value is None or fits, name, value, what)
    for name, form in _FORMS.items():
        value = getattr(c, name)
        fits = isinstance(value, str) and form.fullmatch(value) is not None
        require(value is None or fits, name, value, _AS_SAVED)
    for name in ("inference_mode", "scale_by_gate"):
        require(isinstance(getattr(c, name), bool), name, getattr(c, name), "must be true or false")
    modules: Any = c.modules_to_save
    listed = modules is None or (isinstance(modules, (list, tuple, set)) and len(modules) <= 64)
    named = listed and all(isinstance(m, str) and _MODULE.fullmatch(m) for m in modules or ())
    require(named, "modules_to_save", modules, "must be a list of names of base modules")
    if c.auto_mapping is not None and not _is_plain_mapping(c.auto_mapping):
        raise ConfigError(
            f"auto_mapping={reprlib.repr(c.auto_mapping)}: only a class of transformers can be "
            "named; set task_type"
        )
    base: Any = c.base_architecture
    few = isinstance(base, dict) and len(base) <= 16
    described = base is None or (few and all(isinstance(key, str) for key in base))
    require(described, "base_architecture", base, _AS_SAVED)
    _check_gate(c)
    _check_by_layer(c)
    for name, allowed in CHOICES.items():
        _check_choice(name, getattr(c, name), allowed)


def _check_by_layer(c: DepthRouteConfig) -> None:
    """The fields that map indices of layers to values."""
    for name in PATTERNS:
        pattern = getattr(c, name)
        _check_layers_of(name, pattern, "must map layer indices to values, or be left out")
        values = CHOICES.get(name.removesuffix("_pattern"))
        known = "an integer from 1 to 262144"
        if values is not None:
            known = f"one of: {', '.join(values)}"
        for value in (pattern or {}).values():
            fits = _is_int(value, 1, 262144) if values is None else value in list(values)
            require(fits, name, pattern, f"has {reprlib.repr(value)}; use {known}")
    _check_layers_of("share_shifts", c.share_shifts, _AS_SAVED)
    for shift in (c.share_shifts or {}).values():
        _check_number("share_shifts", shift, low=-100.0, high=100.0)


def _check_layers_of(name: str, pattern: Any, what: str) -> None:
    mapped = isinstance(pattern, dict) and pattern and _are_indices([*pattern], 4096)
    require(pattern is None or mapped, name, pattern, what)


def check_complete(c: DepthRouteConfig) -> None:
    """The remaining checks, with defaults filled in: numbers, layers, and combinations."""
    _check_choice("selection", c.selection, selections())
    check_budget(c.budget)
    check_phases(c.phases, c.granularity, c.target)
    # Scores divided by it stay finite.
    _check_number("gate_temperature", c.gate_temperature, low=1e-6, high=1e6)
    if isinstance(c.threshold, str):
        what = "must be a finite number, or 'budget'"
        require(c.threshold == "budget", "threshold", c.threshold, what)
    elif c.threshold is not None:
        # A float32, with room for differences.
        _check_number("threshold", c.threshold, low=-1e30, high=1e30)
    for name, (low, high) in _INTEGERS.items():
        if getattr(c, name) is not None or getattr(RoutingFields, name) is not None:
            _check_int(name, getattr(c, name), low, high)
    _check_int("ngram_order", c.ngram_order, shortest_order(c), 5)
    rule = c.layers is None or (isinstance(c.layers, str) and _LAYER_RULE.fullmatch(c.layers))
    rules = "'last:N', 'last:half', 'every:N', 'before_last:N', 'before_last:half', 'all'"
    what = f"must be {rules} or a list of distinct layer indices"
    require(rule or (_are_indices(c.layers, 4096) and c.layers), "layers", c.layers, what)
    static = c.static_layers is None or (_are_indices(c.static_layers, 4096) and c.static_layers)
    what = "must be a list of distinct layer indices, or left out"
    require(static, "static_layers", c.static_layers, what)
    if isinstance(c.layers, (list, tuple)):
        check_static(c.static_layers, list(c.layers))
        check_patterns(c, list(c.layers))
    lists: Any = c.dropped_experts
    listed = lists is None or (isinstance(lists, (list, tuple)) and len(lists) <= 1024)
    indices = listed and all(_are_indices(experts, 1024) for experts in lists or ())
    what = "must be lists of distinct expert indices, one per routed layer"
    require(indices, "dropped_experts", lists, what)
    for fault in conflicts_of(c):
        raise ConfigError(fault)
    if c.trainable_token_indices is not None:
        raise ConfigError(
            "trainable_token_indices is not supported by depth-routed adapters; leave it None"
        )


def _is_plain_mapping(mapping: Any) -> bool:
    """PEFT's auto classes import `parent_library` and take `base_model_class` from it."""
    if not isinstance(mapping, dict) or not set(mapping) <= {"base_model_class", "parent_library"}:
        return False
    library = mapping.get("parent_library")
    names = all(isinstance(value, str) and _MODULE.fullmatch(value) for value in mapping.values())
    if library is None or library == "transformers":
        return names
    return names and library.startswith("transformers.models.")


def _check_gate(c: DepthRouteConfig) -> None:
    """A row of `GATES`, and the one that the adapter was saved with.

    `gate_package` and `gate_module` are plain text of the file: they are shown, and never imported.
    """
    if c.gate_module is None or _is_registered(c.gate):
        _check_choice("gate", c.gate, GATES)
        derives = isinstance(GATES[c.gate], type) and issubclass(GATES[c.gate], Gate)
        what = "is no subclass of hf_depthroute.parts.gate.Gate; derive its class from it"
        require(derives, "gate", c.gate, what)
        return
    package = "no package"
    if c.gate_package is not None:
        package = f"the package {c.gate_package}"
    raise ConfigError(
        f"gate={reprlib.repr(c.gate)} is not hf_depthroute's own, and nothing has registered it "
        f"here; the file names {package}, module {c.gate_module}: install that if you trust it, "
        "import the module, and load again"
    )


def _is_registered(gate: Any) -> bool:
    """Whether another package has added the gate of this name."""
    return isinstance(gate, str) and gate in GATES and module_of(GATES[gate]) is not None


def module_of(gate: Any) -> str | None:
    """The module of a gate that is not hf_depthroute's own; None for those of this package."""
    module: str = gate.__module__
    own = module.partition(".")[0] == __name__.partition(".")[0]
    return None if own else module


@functools.cache
def package_of(module: str) -> str | None:
    """The installed distribution that has `module`; None for a script, or code on the path."""
    return next(iter(packages_distributions().get(module.partition(".")[0], ())), None)


def _check_choice(name: str, value: Any, allowed: Collection[str]) -> None:
    # In a list: a value that cannot be hashed is refused like another.
    what = f"is not supported; use one of: {', '.join(allowed)}"
    require(value in list(allowed), name, value, what)


def _check_number(name: str, value: Any, low: float, high: float, low_open: bool = False) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Comparisons only: math.isfinite raises OverflowError on a large int.
    fits = is_number and low <= value <= high and not (low_open and value == low)
    what = f"must be a finite number in {'(' if low_open else '['}{low:g}, {high:g}]"
    require(fits, name, value, what)
    return float(value)


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    require(_is_int(value, low, high), name, value, f"must be an integer from {low} to {high}")


def _is_int(value: Any, low: int = 0, high: int = 99_999) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _are_indices(values: Any, most: int) -> bool:
    listed = isinstance(values, (list, tuple)) and len(values) <= most
    return listed and all(map(_is_int, values)) and len(set(values)) == len(values)
