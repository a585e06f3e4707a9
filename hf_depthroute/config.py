"""`DepthRouteConfig`: everything that defines an adapter, checked when it is made."""

from __future__ import annotations

import math
import re
import reprlib
import sys
from dataclasses import dataclass, field
from typing import Any

import peft
from peft import PeftConfig

TARGETS = ("ffn",)
GRANULARITIES = ("token",)
GATE_NAMES = ("mlp", "jepa")
GATE_INPUTS = ("residual", "normed")
BRANCHES = ("lowrank", "none")
SELECTIONS = ("topk", "threshold", "soft")

# Named in the configuration's design, not in this release. They get their own message.
_LATER = {"attention", "block", "experts", "sequence", "linear", "halting"}
_LAYER_RULE = re.compile(r"(last|every):([1-9][0-9]{0,3})|all")


class ConfigError(ValueError):
    """A field of `DepthRouteConfig` has a value that cannot be used. The message is one line: field, value, range."""


@dataclass
class DepthRouteConfig(PeftConfig):
    """Configuration of a depth-routed adapter.

    Args:
        layers: Which decoder layers are routed: `"last:N"`, `"every:N"` (layers N-1, 2N-1, ...), `"all"`, or a list
            of indices. Default: the last third. Injection replaces it with the list of indices, which is what is saved.
        target: What an easy token skips. `"ffn"`.
        granularity: What one decision covers. `"token"`.
        gate: `"mlp"` (G1: `u = W2 SiLU(W1 a + b1) + b2`) or `"jepa"` (G3: predicts both outcomes, then compares them).
        gate_hidden: Width of the MLP gate's hidden layer. Default: a quarter of the model's width.
        gate_input: `"normed"` (what the FFN sees) or `"residual"` (the stream after attention, as in the paper). On a
            pretrained base whose residual norms grow with depth, `"normed"` ends at a lower loss with either gate:
            see `recipes/stories260k`.
        gate_temperature: `tau` in `p = sigmoid(u / tau)`. It scales the gradient and the losses, never the decision.
        context_dim: JEPA gate: width of the compressed context.
        summary_dim: JEPA gate: width of the predicted outcomes `q`.
        action_dim: JEPA gate: width of the two action embeddings.
        branch: `"lowrank"` (easy tokens take `W_down SiLU(W_up LN(a))`) or `"none"` (they keep the residual stream).
        branch_rank: Rank of the low-rank branch. Default: an eighth of the model's width.
        budget: Fraction of tokens that run the full FFN, in (0, 1].
        selection: The training rule. `"topk"`: the `ceil(budget * n)` highest scores of each sequence. `"threshold"`:
            the inference rule, in training too. `"soft"`: both paths weighted by `p`. Inference is always causal: a
            token runs full iff its score reaches the layer's threshold.
        threshold: A fixed score threshold for every routed layer. Default: the quantile table of the layer, which
            training tracks and `calibrate` sets.
        seed: Seed of the adapter's initial weights, independent of the global generator.
        modules_to_save: As in PEFT: names of base modules that train and are saved in full.
        trainable_token_indices: As in PEFT's LoRA; not supported by routed adapters, must stay `None`.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    layers: str | list[int] | None = field(default=None, metadata={"help": "last:N, every:N, all, or indices"})
    target: str = field(default="ffn", metadata={"help": f"one of {TARGETS}"})
    granularity: str = field(default="token", metadata={"help": f"one of {GRANULARITIES}"})
    gate: str = field(default="mlp", metadata={"help": f"one of {GATE_NAMES}"})
    gate_hidden: int | None = field(default=None, metadata={"help": "MLP gate: hidden width (default d/4)"})
    gate_input: str = field(default="normed", metadata={"help": f"one of {GATE_INPUTS}"})
    gate_temperature: float = field(default=2.0, metadata={"help": "tau in p = sigmoid(u / tau)"})
    context_dim: int = field(default=128, metadata={"help": "JEPA gate: context width"})
    summary_dim: int = field(default=64, metadata={"help": "JEPA gate: summary width"})
    action_dim: int = field(default=16, metadata={"help": "JEPA gate: action embedding width"})
    branch: str = field(default="lowrank", metadata={"help": f"one of {BRANCHES}"})
    branch_rank: int | None = field(default=None, metadata={"help": "rank of the cheap branch (default d/8)"})
    budget: float = field(default=0.5, metadata={"help": "fraction of tokens that run the full FFN"})
    selection: str = field(default="topk", metadata={"help": f"training rule, one of {SELECTIONS}"})
    threshold: float | None = field(default=None, metadata={"help": "fixed score threshold"})
    seed: int = field(default=0, metadata={"help": "seed of the initial adapter weights"})
    modules_to_save: list[str] | None = field(default=None, metadata={"help": "base modules trained and saved"})
    trainable_token_indices: list[int] | None = field(default=None, metadata={"help": "must stay None"})
    base_architecture: dict[str, Any] | None = field(
        default=None, metadata={"help": "architecture and sizes of the base model; filled at injection"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = register_peft_type()
        _check_choice("target", self.target, TARGETS)
        _check_choice("granularity", self.granularity, GRANULARITIES)
        _check_choice("gate", self.gate, GATE_NAMES)
        _check_choice("gate_input", self.gate_input, GATE_INPUTS)
        _check_choice("branch", self.branch, BRANCHES)
        _check_choice("selection", self.selection, SELECTIONS)
        check_budget(self.budget)
        _check_number("gate_temperature", self.gate_temperature, low=0.0, low_open=True)
        if self.threshold is not None:
            _check_number("threshold", self.threshold)
        for name in ("context_dim", "summary_dim", "action_dim"):
            _check_int(name, getattr(self, name), low=1, high=65536)
        for name in ("gate_hidden", "branch_rank"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low=1, high=262144)
        _check_int("seed", self.seed, low=0, high=2**63 - 1)
        _check_layers(self.layers)
        if self.trainable_token_indices is not None:
            raise ConfigError("trainable_token_indices is not supported by depth-routed adapters; leave it None")

    def routed_layers(self, depth: int) -> list[int]:
        """Indices of the routed layers of a model with `depth` decoder layers, ascending.

        Raises:
            ConfigError: An index or a count is out of range.
        """
        if self.layers is None:
            return list(range(depth - max(1, depth // 3), depth))
        if isinstance(self.layers, str):
            if self.layers == "all":
                return list(range(depth))
            rule, count = self.layers.split(":")
            if int(count) > depth:
                raise ConfigError(f"layers={self.layers!r}: the model has only {depth} decoder layers")
            return (
                list(range(depth - int(count), depth))
                if rule == "last"
                else list(range(depth))[int(count) - 1 :: int(count)]
            )
        outside = [i for i in self.layers if i >= depth]
        if outside:
            raise ConfigError(
                f"layers={self.layers}: {outside[0]} is out of range; the model has layers 0 to {depth - 1}"
            )
        return sorted(self.layers)


def check_budget(budget: Any) -> float:
    """Return `budget` if it is a number in (0, 1]; raise `ConfigError` otherwise."""
    return _check_number("budget", budget, low=0.0, low_open=True, high=1.0)


def register_peft_type() -> Any:
    """The `PeftType` of this method, added to PEFT's enum on the first call.

    PEFT has no public way to register a method from outside: `PeftType` is a closed enum. This is the only place that
    opens it. If PEFT ever ships its own `DEPTH_ROUTE` member or a hook, the first branch takes that instead.
    """
    members = peft.PeftType.__members__
    if "DEPTH_ROUTE" in members:
        return members["DEPTH_ROUTE"]
    kind: Any = peft.PeftType
    member: Any = str.__new__(kind, "DEPTH_ROUTE")
    member._name_, member._value_ = "DEPTH_ROUTE", "DEPTH_ROUTE"
    member.__objclass__ = kind
    member._sort_order_ = len(members)
    kind._member_names_.append("DEPTH_ROUTE")
    kind._member_map_["DEPTH_ROUTE"] = member
    kind._value2member_map_["DEPTH_ROUTE"] = member
    type.__setattr__(kind, "DEPTH_ROUTE", member)
    return member


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value in allowed:
        return
    later = " (planned, not in this release)" if isinstance(value, str) and value in _LATER else ""
    raise ConfigError(f"{name}={reprlib.repr(value)} is not supported{later}; use one of: {', '.join(allowed)}")


def _check_number(
    name: str, value: Any, low: float = -math.inf, high: float = math.inf, low_open: bool = False
) -> float:
    span = f"a finite number in {'(' if low_open or low == -math.inf else '['}{low:g}, {high:g}]"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Comparisons only: math.isfinite raises OverflowError on a large int.
    if not is_number or not low <= value <= high or abs(value) > sys.float_info.max or (low_open and value == low):
        raise ConfigError(f"{name}={reprlib.repr(value)} must be {span}")
    return float(value)


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name}={reprlib.repr(value)} must be an integer from {low} to {high}")


def _check_layers(layers: Any) -> None:
    if layers is None or (isinstance(layers, str) and _LAYER_RULE.fullmatch(layers)):
        return
    if isinstance(layers, (list, tuple)) and 0 < len(layers) <= 4096:
        whole = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 100_000 for i in layers)
        if whole and len(set(layers)) == len(layers):
            return
    raise ConfigError(
        f"layers={reprlib.repr(layers)} must be 'last:N', 'every:N', 'all' or a list of distinct layer indices"
    )
