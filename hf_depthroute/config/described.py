"""`AdapterFields`: what defines an adapter and what follows from it;
`SavedAdapter` reads it without PEFT.

PEFT imports much of transformers: a check of two files took 5.1 s of processor time with it, and
takes 2.4 s without.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from ..files.shown import counted
from ..parts.gates import GATES
from ..parts.targets import TARGETS
from ..version import __version__
from .fields import MEMORY_FIELDS, PATTERNS, RoutingFields
from .rules import (
    FORMAT_VERSION,
    ConfigError,
    check_complete,
    check_given,
    check_known,
    check_patterns,
    check_static,
    module_of,
    package_of,
    require,
)

Owner = TypeVar("Owner", bound=type)

# The tasks by which PEFT wraps a model, with the auto class that loads its base and the Hub's name
# of it.
TASKS = {
    "CAUSAL_LM": ("AutoModelForCausalLM", "text-generation"),
    "SEQ_CLS": ("AutoModelForSequenceClassification", "text-classification"),
    "TOKEN_CLS": ("AutoModelForTokenClassification", "token-classification"),
    "FEATURE_EXTRACTION": ("AutoModel", "feature-extraction"),
}


def refuses_unknown(owner: Owner) -> Owner:
    """Class decorator: a field that the dataclass lacks is refused, where PEFT only warns."""
    init: Any = owner.__init__  # type: ignore[misc]
    names = [f.name for f in dataclasses.fields(owner) if f.init]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        check_known(kwargs, names)
        init(self, *args, **kwargs)

    owner.__init__ = checked  # type: ignore[misc]
    return owner


@dataclass
class AdapterFields(RoutingFields):
    """`RoutingFields`, and what the library writes; `DepthRouteConfig` says what each field is."""

    trainable_token_indices: list[int] | None = None
    gate_package: str | None = field(default=None, repr=False)
    gate_module: str | None = field(default=None, repr=False)
    share_shifts: dict[int, float] | None = field(default=None, repr=False)
    base_architecture: dict[str, Any] | None = field(default=None, repr=False)
    format_version: int = FORMAT_VERSION
    library_version: str | None = None
    weights_hash: str | None = None

    @property
    def has_memory(self) -> bool:
        """Whether there is a table of n-grams, as the target or in the branch; it needs the ids."""
        return self.branch == "memory" or TARGETS[self.target].reads_ids

    @property
    def fixed_threshold(self) -> float | None:
        """The score that every routed layer compares with; None: the layer's own table gives it."""
        if isinstance(self.threshold, str):
            return None
        return self.threshold

    @property
    def last_in_full(self) -> int:
        """How many of a sequence's last tokens run in full with `phases="prefill"`."""
        return self.prompt_tail or 1

    @property
    def undecided(self) -> str:
        """Which tokens skip without a router's decision, in words; empty if a router decides."""
        gate = GATES[self.gate]
        if gate.follows_budget():
            return ""
        who = "every token"
        if self.phases == "prefill":
            last = f" {self.last_in_full}" if self.last_in_full > 1 else ""
            who = f"every token of a prompt but the last{last}"
        return f"{who}, {gate.spares} left out," if gate.spares else who

    def gate_of(self, layer_index: int) -> str:
        """The gate of a routed layer: `"none"` in a static one."""
        if layer_index in (self.static_layers or ()):
            return "none"
        return self.gate

    def target_of(self, layer_index: int) -> str:
        """The target of a routed layer."""
        return (self.target_pattern or {}).get(layer_index, self.target)

    def branch_of(self, layer_index: int) -> str:
        """The branch of a routed layer."""
        return (self.branch_pattern or {}).get(layer_index, self.branch)

    def rank_of(self, layer_index: int) -> int | None:
        """The `branch_rank` of a routed layer; None before injection has filled it in."""
        return (self.rank_pattern or {}).get(layer_index, self.branch_rank)

    def experts_dropped_in(self, layer_index: int) -> tuple[int, ...]:
        """The experts that a routed layer drops; none without `dropped_experts`."""
        if self.dropped_experts is None:
            return ()
        assert isinstance(self.layers, list), "injection lists the layers"
        return tuple(self.dropped_experts[self.layers.index(layer_index)])

    def targets(self) -> list[str]:
        """All targets of an adapter, in the order of `TARGETS`."""
        used = {self.target, *(self.target_pattern or {}).values()}
        return [name for name in TARGETS if name in used]

    def gated_layers(self) -> list[int]:
        """The routed layers that are not static, of an injected adapter."""
        routed = cast("list[int]", self.layers)
        return [index for index in routed if index not in (self.static_layers or ())]

    def share_of_all(self, depth: int, share: float) -> float:
        """The share of all `depth` layers' calls in full, if `share` of the gated layers' calls is.

        A budget is a share of the gated layers' calls, the `keep` of `fit_router` one of all
        layers' calls. Static layers run none of theirs, and layers without routing all.
        """
        routed = self.routed_layers(depth)
        gated = len(set(routed) - set(self.static_layers or ()))
        return (share * gated + depth - len(routed)) / depth

    def takes_budget(self) -> bool:
        """Whether inference follows the budget: gates and the quantiles of their scores decide."""
        static = GATES[self.gate].static
        return not static and self.fixed_threshold is None and self.causal_rule != "predictor"

    def share_shift(self, layer_index: int) -> float:
        """From a budget's log-odds to those of a gated layer's share, held with the others'.

        Raises:
            ConfigError: It is not known what the layer's share is.
        """
        if self.budget_scope == "layer":
            return 0.0
        if self.share_shifts is None or layer_index not in self.share_shifts:
            raise ConfigError(
                "causal_rule='running' needs the share of each layer, since budget_scope='global' "
                "has one budget for all of them; call calibrate(model, batches)"
            )
        return self.share_shifts[layer_index]

    @property
    def inference_rule(self) -> str:
        """The row of `RULES` by which inference decides."""
        rule = self.causal_rule  # read once: another thread may set it
        return "threshold" if rule == "quantile" else rule

    def ranks_tokens(self) -> bool:
        """Whether top-k over the tokens of a sequence is a rule for this adapter."""
        gate = GATES[self.gate]
        by_token = self.granularity == "token" and self.budget_scope == "layer"
        return by_token and not (gate.exits or gate.static)

    def _fill_in(self) -> None:
        """The defaults that depend on other fields; the saved configuration holds their values."""
        for name, value in TARGETS[self.target].fixed.items():
            if getattr(self, name) == getattr(RoutingFields, name):
                setattr(self, name, value)
        gate = GATES[self.gate]
        self.gate_input = gate.reads or self.gate_input
        if self.gate_temperature is None:
            self.gate_temperature = gate.default_temperature
        if self.selection is None:
            # A saved threshold of None comes with its selection, and stays.
            if self.threshold is None:
                self.threshold = gate.default_threshold
            self.selection = gate.default_selection
            ranked = self.granularity == "token" and self.budget_scope == "layer"
            if self.selection == "topk" and not ranked:
                self.selection = "threshold"

    def routed_layers(self, depth: int) -> list[int]:
        """Indices of the routed layers of a model with `depth` decoder layers, ascending.

        Raises:
            ConfigError: An index or a count is out of range, or not for this gate.
        """
        routed = self._named_layers(depth)
        gate = GATES[self.gate]
        if gate.spares_layer_0 and (not routed or routed[0] == 0):
            raise ConfigError(
                f"layers={self.layers!r}: {gate.called} never routes layer 0; leave layers unset"
            )
        if self.dropped_experts is not None and len(self.dropped_experts) != len(routed):
            raise ConfigError(
                f"dropped_experts has {len(self.dropped_experts)} lists for {len(routed)} routed "
                "layers; give one each"
            )
        check_static(self.static_layers, routed)
        check_patterns(cast(Any, self), routed)
        return routed

    def _named_layers(self, depth: int) -> list[int]:
        if self.layers is None:
            if GATES[self.gate].spares_layer_0:
                return list(range(1, depth))
            return list(range(depth - max(1, depth // 3), depth))
        if isinstance(self.layers, str):
            if self.layers == "all":
                return list(range(depth))
            rule, number = self.layers.split(":")
            count = max(1, depth // 2) if number == "half" else int(number)
            end = depth - 1 if rule == "before_last" else depth
            if count > end:
                raise ConfigError(
                    f"layers={self.layers!r}: the model has only {counted(depth, 'decoder layer')}"
                )
            if rule == "every":
                return list(range(depth))[count - 1 :: count]
            return list(range(end - count, end))
        outside = [i for i in self.layers if i >= depth]
        if outside:
            raise ConfigError(
                f"layers={self.layers}: {outside[0]} is out of range; the model has layers 0 to "
                f"{depth - 1}"
            )
        return sorted(self.layers)

    def _check(self) -> None:
        """Check all fields, and fill in those that depend on others; raises `ConfigError`."""
        config: Any = self
        for name in (*PATTERNS, "share_shifts"):
            setattr(self, name, _by_index(getattr(self, name)))
        check_given(config)
        self._fill_in()
        check_complete(config)

    def _to_save(self, saved: dict[str, Any]) -> dict[str, Any]:
        """`saved`, all fields, as they are written; the weights' hash comes with the weights."""
        saved = saved | {"library_version": __version__, "weights_hash": None}
        # Fields that older versions do not have are left out where nothing uses them: so these read
        # what they can run.
        newer = ("static_layers", "prompt_tail", *PATTERNS)
        unused = [name for name in newer if saved[name] is None]
        if self.phases == "all":
            unused.append("phases")
        if self.causal_rule != "running" or self.share_shifts is None:
            unused.append("share_shifts")
        if not self.has_memory:
            unused.extend(MEMORY_FIELDS)
        module = module_of(GATES[self.gate])
        if module is None:
            unused += ["gate_package", "gate_module"]
        else:
            saved |= {"gate_package": package_of(module), "gate_module": module}
        return {name: value for name, value in saved.items() if name not in unused}


@refuses_unknown
@dataclass
class SavedAdapter(AdapterFields):
    """An adapter's saved configuration, with PEFT's fields as what they are in a file.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    task_type: str | None = None
    peft_type: str | None = None
    auto_mapping: dict[str, Any] | None = None
    peft_version: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    inference_mode: bool = False

    def __post_init__(self) -> None:
        check_task(self.task_type)
        self._check()

    def to_dict(self) -> dict[str, Any]:
        """The values to save."""
        return self._to_save(dataclasses.asdict(self))


def check_task(task_type: Any) -> None:
    """Raise `ConfigError` for a task that PEFT has no wrapper for, or none that fits."""
    what = f"is not supported; use one of: {', '.join(TASKS)}, or leave it out"
    require(task_type is None or task_type in list(TASKS), "task_type", task_type, what)


def _by_index(pattern: Any) -> Any:
    """A pattern with integers for keys, in ascending order; JSON has text."""
    if not isinstance(pattern, dict):
        return pattern
    if not all(re.fullmatch(r"[0-9]{1,5}", str(key)) for key in pattern):
        return pattern
    return dict(sorted((int(key), value) for key, value in pattern.items())) or None
