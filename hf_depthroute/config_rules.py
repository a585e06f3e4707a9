"""What a `DepthRouteConfig` may hold: the values of every field, and what does not go together."""

from __future__ import annotations

import difflib
import functools
import math
import re
import reprlib
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from typing import TYPE_CHECKING, Any

from .adapter_file import FORMAT_VERSION
from .gates import GATES
from .shown import OneLine

if TYPE_CHECKING:
    from .config import DepthRouteConfig

TARGETS = ("ffn", "attention", "block", "experts")
GRANULARITIES = ("token", "sequence")
GATE_INPUTS = ("residual", "normed")
BRANCHES = ("lowrank", "none")
SELECTIONS = ("topk", "threshold", "soft", "gumbel", "controller")
BUDGET_SCOPES = ("layer", "global")
CAUSAL_RULES = ("quantile", "predictor")
EXPERT_GATES = ("per_expert", "per_layer")

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

_VERSION = re.compile(r"[A-Za-z0-9.+:_-]{1,128}")
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,255}")
_LAYER_RULE = re.compile(r"(last|every|before_last):([1-9][0-9]{0,3})|before_last:half|all")


class ConfigError(OneLine, ValueError):
    """A field of `DepthRouteConfig` has a value that cannot be used. The message is one line: field, value, range."""


CHOICES = {
    "target": TARGETS,
    "granularity": GRANULARITIES,
    "gate_input": GATE_INPUTS,
    "branch": BRANCHES,
    "budget_scope": BUDGET_SCOPES,
    "causal_rule": CAUSAL_RULES,
    "expert_gates": EXPERT_GATES,
}


def conflicts(c: DepthRouteConfig) -> Iterator[str]:
    """What is wrong between fields, one line each."""
    if c.gate in ("halting", "exit") and (c.target != "block" or c.granularity != "token"):
        yield f"gate={c.gate!r} decides on whole blocks, per token; use target='block' and granularity='token'"
    if c.target == "experts":
        if c.granularity == "sequence":
            yield "granularity='sequence' is not supported with target='experts'; use 'token'"
        scoring = [name for name, gate in GATES.items() if getattr(gate, "scores_experts", False)]
        if c.gate not in scoring:
            yield f"gate={c.gate!r} cannot score experts; use one of: {', '.join(scoring)}"
        if (c.gate == "none") != (c.dropped_experts is not None):
            yield "dropped_experts goes with target='experts' and gate='none', and they need it"
        if c.scale_by_gate or c.causal_rule == "predictor":
            yield "scale_by_gate and causal_rule='predictor' are not supported with target='experts'"
        if c.dropped_experts is not None and isinstance(c.layers, (list, tuple)) and list(c.layers) != sorted(c.layers):
            yield f"layers={reprlib.repr(c.layers)} must ascend, because dropped_experts has one list for each of them"
    elif c.dropped_experts is not None:
        yield "dropped_experts goes with target='experts' and gate='none'"
    if c.selection == "topk" and (c.granularity == "sequence" or c.budget_scope == "global"):
        yield "selection='topk' ranks the tokens of one sequence in one layer; use 'threshold' or 'controller' here"
    if c.gate == "halting" and c.selection != "soft":
        yield f"selection={c.selection!r}: the halting gate trains with 'soft'"
    if c.gate == "exit" and c.selection != "threshold":
        yield f"selection={c.selection!r}: early exit trains with 'threshold'"
    if c.causal_rule == "predictor" and c.selection != "topk":
        yield "causal_rule='predictor' foresees the top-k choice; use it with selection='topk'"
    if c.selection == "controller" and c.fixed_threshold is not None:
        yield "threshold is fixed, so there is nothing for selection='controller' to move; use threshold='budget'"
    if c.scale_by_gate and c.selection in ("soft", "gumbel"):
        yield f"scale_by_gate is not supported with selection={c.selection!r}; use topk, threshold or controller"


def check_budget(budget: Any) -> float:
    """Return `budget` if it is a number in (0, 1]; raise `ConfigError` otherwise."""
    return check_number("budget", budget, low=0.0, low_open=True, high=1.0)


def check_known(given: dict[str, Any], known: list[str]) -> None:
    """Refuse a field that `DepthRouteConfig` does not have, and first a file of a newer format."""
    check_format(given.get("format_version", FORMAT_VERSION), given.get("library_version"))
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]}?" if close else "was it saved by a newer version? Then upgrade."
            hint = OTHER_METHODS.get(str(name), hint)
            raise ConfigError(f"there is no field {reprlib.repr(name)} in DepthRouteConfig; {hint}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_format(version: Any, library: Any) -> None:
    check_int("format_version", version, low=1, high=1_000_000)
    if version > FORMAT_VERSION:
        needed = (
            f"hf_depthroute {library}" if isinstance(library, str) and _VERSION.fullmatch(library) else "a newer one"
        )
        raise ConfigError(
            f"format_version={version}: hf_depthroute reads up to {FORMAT_VERSION} here; upgrade: {needed} saved this"
        )


def check_saved_fields(c: DepthRouteConfig) -> None:
    """What PEFT keeps in the config, and what a save adds: plain values, and nothing that names code to import."""
    check_format(c.format_version, c.library_version)
    for name, longest in (("base_model_name_or_path", 4096), ("revision", 256), ("peft_version", 256)):
        value = getattr(c, name)
        if value is not None and not (isinstance(value, str) and len(value) <= longest and "\0" not in value):
            raise ConfigError(f"{name}={reprlib.repr(value)} must be text of at most {longest} characters")
    for name in ("library_version", "weights_hash"):
        value = getattr(c, name)
        if value is not None and not (isinstance(value, str) and _VERSION.fullmatch(value)):
            raise ConfigError(f"{name}={reprlib.repr(value)} must be what a save wrote")
    if not isinstance(c.inference_mode, bool):
        raise ConfigError(f"inference_mode={reprlib.repr(c.inference_mode)} must be true or false")
    modules = c.modules_to_save
    listed = isinstance(modules, (list, tuple, set)) and len(modules) <= 64
    if modules is not None and not (
        listed and all(isinstance(m, str) and len(m) <= 256 and _MODULE.fullmatch(m) for m in modules)
    ):
        raise ConfigError(f"modules_to_save={reprlib.repr(modules)} must be a list of names of base modules")
    if c.auto_mapping is not None and not _is_plain_mapping(c.auto_mapping):
        raise ConfigError(
            f"auto_mapping={reprlib.repr(c.auto_mapping)}: only a class of transformers can be named; set task_type"
        )
    described = c.base_architecture
    if described is not None and not (
        isinstance(described, dict) and len(described) <= 16 and all(isinstance(key, str) for key in described)
    ):
        raise ConfigError(f"base_architecture={reprlib.repr(described)} must be what a save wrote")


def _is_plain_mapping(mapping: Any) -> bool:
    """PEFT's auto classes import `parent_library` and take `base_model_class` from it."""
    if not isinstance(mapping, dict) or not set(mapping) <= {"base_model_class", "parent_library"}:
        return False
    library = mapping.get("parent_library")
    names = all(isinstance(value, str) and _MODULE.fullmatch(value) for value in mapping.values())
    return names and (library is None or library == "transformers" or library.startswith("transformers.models."))


def check_gate(c: DepthRouteConfig) -> None:
    """A row of `GATES`, and the one that the adapter was saved with.

    `gate_package` and `gate_module` are plain text of the file: they are shown, and never imported.
    """
    for name, form in (("gate_package", _PACKAGE), ("gate_module", _MODULE)):
        value = getattr(c, name)
        if value is not None and not (isinstance(value, str) and form.fullmatch(value)):
            raise ConfigError(f"{name}={reprlib.repr(value)} must be what a save wrote")
    if c.gate_module is None or (isinstance(c.gate, str) and c.gate in GATES and module_of(GATES[c.gate]) is not None):
        check_choice("gate", c.gate, tuple(GATES))
        return
    package = "no package" if c.gate_package is None else f"the package {c.gate_package}"
    raise ConfigError(
        f"gate={reprlib.repr(c.gate)} is not hf_depthroute's own, and nothing has registered it here; the file names "
        f"{package}, module {c.gate_module}: install that if you trust it, import the module, and load again"
    )


def module_of(gate: Any) -> str | None:
    """The module of a gate that is not hf_depthroute's own; None for those of this package."""
    module: str = gate.__module__
    return None if module.partition(".")[0] == __package__ else module


@functools.cache
def package_of(module: str) -> str | None:
    """Name of the installed distribution that has `module`; None for a script, or for code on the path."""
    return next(iter(packages_distributions().get(module.partition(".")[0], ())), None)


def check_threshold(value: Any) -> None:
    if value is None or (isinstance(value, str) and value == "budget"):
        return
    if isinstance(value, str):
        raise ConfigError(f"threshold={reprlib.repr(value)} must be a finite number, or 'budget'")
    check_number("threshold", value)


def check_task(value: Any) -> None:
    """PEFT wraps a model by its task, and some tasks would train heads that no configuration named."""
    if value is not None and value != "CAUSAL_LM":
        raise ConfigError(
            f"task_type={reprlib.repr(value)} is not supported: only causal language models are routed; leave it out"
        )


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value in allowed:
        return
    raise ConfigError(f"{name}={reprlib.repr(value)} is not supported; use one of: {', '.join(allowed)}")


def check_number(
    name: str, value: Any, low: float = -math.inf, high: float = math.inf, low_open: bool = False
) -> float:
    span = f"a finite number in {'(' if low_open or low == -math.inf else '['}{low:g}, {high:g}]"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Comparisons only: math.isfinite raises OverflowError on a large int.
    if not is_number or not low <= value <= high or abs(value) > sys.float_info.max or (low_open and value == low):
        raise ConfigError(f"{name}={reprlib.repr(value)} must be {span}")
    return float(value)


def check_int(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name}={reprlib.repr(value)} must be an integer from {low} to {high}")


def check_dropped(lists: Any) -> None:
    def whole(items: Any) -> bool:
        return isinstance(items, (list, tuple)) and len(items) <= 1024

    if lists is None:
        return
    if whole(lists) and all(
        whole(experts) and len(set(map(repr, experts))) == len(experts) and all(_is_index(e) for e in experts)
        for experts in lists
    ):
        return
    raise ConfigError(
        f"dropped_experts={reprlib.repr(lists)} must be lists of distinct expert indices, one per routed layer"
    )


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 100_000


def check_layers(layers: Any) -> None:
    if layers is None or (isinstance(layers, str) and _LAYER_RULE.fullmatch(layers)):
        return
    listed = isinstance(layers, (list, tuple)) and 0 < len(layers) <= 4096
    if listed and all(_is_index(i) for i in layers) and len(set(layers)) == len(layers):
        return
    raise ConfigError(
        f"layers={reprlib.repr(layers)} must be 'last:N', 'every:N', 'before_last:N', 'before_last:half', 'all' or a "
        "list of distinct layer indices"
    )
