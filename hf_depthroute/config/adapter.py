"""`DepthRouteConfig`: everything that defines an adapter, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import peft
from peft import PeftConfig

from .described import TASKS as TASKS
from .described import AdapterFields, check_task, refuses_unknown
from .fields import PATTERNS, RoutingFields, with_help
from .rules import ConfigError as ConfigError
from .rules import check_budget as check_budget
from .rules import check_phases as check_phases


@refuses_unknown
@with_help
@dataclass
class DepthRouteConfig(AdapterFields, PeftConfig):
    """Configuration of a depth-routed adapter: `RoutingFields`, and what the library writes.

    Args:
        trainable_token_indices: As in PEFT's LoRA; not supported by routed adapters, must stay
            `None`.
        gate_package: Written by the library, like the next one, for a gate from another package:
            that package's name.
        gate_module: The module of the gate's class. Both are shown where the gate is not known, and
            never imported.
        share_shifts: Written by the library, like the next four: for layers that hold a budget
            together, from its log-odds to those of the share of a layer's tokens that ran in full
            where they were calibrated. `causal_rule="running"` needs it.
        base_architecture: What the base is, and some of its weights.
        format_version: The version of the saved files' form. A newer one than this library knows is
            refused.
        library_version: The version that saved the adapter.
        weights_hash: The hash of the saved tensors; loading compares it.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    def __post_init__(self) -> None:
        check_task(self.task_type)
        super().__post_init__()
        self.peft_type = register_peft_type()
        self._check()

    def to_dict(self) -> dict[str, Any]:
        """The values to save. The weights' hash is written together with the weights."""
        return self._to_save(super().to_dict())


if DepthRouteConfig.__doc__ and RoutingFields.__doc__:  # one list of arguments for `help()`
    _asked = RoutingFields.__doc__.partition("Args:\n")[2].rstrip()
    DepthRouteConfig.__doc__ = DepthRouteConfig.__doc__.replace("Args:", f"Args:\n{_asked}", 1)


def renumber(config: DepthRouteConfig, places: Mapping[int, int]) -> None:
    """Leave only the layers in `places` routed, as `places[index]`, with what is said of them."""
    layers = cast("list[int]", config.layers)
    remaining = [at for at, index in enumerate(layers) if index in places]
    if config.dropped_experts is not None:
        config.dropped_experts = [config.dropped_experts[at] for at in remaining]
    config.layers = [places[layers[at]] for at in remaining]
    static = [places[index] for index in config.static_layers or () if index in places]
    config.static_layers = static or None
    for name in (*PATTERNS, "share_shifts"):
        pattern = getattr(config, name) or {}
        kept = {places[index]: value for index, value in pattern.items() if index in places}
        setattr(config, name, kept or None)


def register_peft_type() -> Any:
    """The `PeftType` of this method, added to PEFT's enum on the first call.

    PEFT has no public way to register a method from outside: `PeftType` is a closed enum. This is
    the only place that opens it. If PEFT ever ships its own `DEPTH_ROUTE` member or a hook, the
    first branch takes that instead.
    """
    kind: Any = peft.PeftType
    name = "DEPTH_ROUTE"
    if name in kind.__members__:
        return kind.__members__[name]
    member: Any = str.__new__(kind, name)
    member._name_ = member._value_ = name
    member.__objclass__ = kind
    member._sort_order_ = len(kind.__members__)
    kind._member_names_.append(name)
    kind._member_map_[name] = kind._value2member_map_[name] = member
    type.__setattr__(kind, name, member)
    return member
