"""`DepthRouteConfig`: everything that defines an adapter, checked when it is made."""

from __future__ import annotations

import math
import re
import reprlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import peft
from peft import PeftConfig

TARGETS = ("ffn", "attention", "block", "experts")
GRANULARITIES = ("token", "sequence")
GATE_NAMES = ("mlp", "jepa", "linear", "halting", "random", "exit", "none")
GATE_INPUTS = ("residual", "normed")
BRANCHES = ("lowrank", "none")
SELECTIONS = ("topk", "threshold", "soft", "gumbel", "controller")
BUDGET_SCOPES = ("layer", "global")
CAUSAL_RULES = ("quantile", "predictor")
EXPERT_GATES = ("per_expert", "per_layer")

_LAYER_RULE = re.compile(r"(last|every):([1-9][0-9]{0,3})|all")


class ConfigError(ValueError):
    """A field of `DepthRouteConfig` has a value that cannot be used. The message is one line: field, value, range."""


@dataclass
class DepthRouteConfig(PeftConfig):
    """Configuration of a depth-routed adapter.

    Args:
        layers: Which decoder layers are routed: `"last:N"`, `"every:N"` (layers N-1, 2N-1, ...), `"all"`, or a list
            of indices. Default: the last third (halting: all but the first). Injection replaces it with the list of
            indices, which is what is saved.
        target: What an easy token skips: `"ffn"`; `"attention"` (its query, its softmax and the output projection;
            keys and values are always written); `"block"` (both); or `"experts"` of a mixture-of-experts layer, one
            (token, expert) pair at a time.
        granularity: What one decision covers: a `"token"`, or a `"sequence"`. A sequence is decided on its prompt, and
            the decision is kept with the KV cache; where it skips the attention, no keys and values are written.
        gate: `"mlp"` (G1: `u = W2 SiLU(W1 a + b1) + b2`); `"jepa"` (G3: predicts both outcomes, then compares them);
            `"linear"` (Router-Tuning: one row, starts dense); `"halting"` (TSA: reads the stream between two blocks,
            scales both updates of the block); and to compare with: `"random"` (a frozen random projection), `"exit"`
            (early exit: the LM head's confidence; a token that has left stays out) and `"none"` (static: the routed
            layers are skipped by every token).
        gate_hidden: Width of the MLP gate's hidden layer. Default: a quarter of the model's width.
        gate_input: `"normed"` (what the sublayer sees) or `"residual"` (the stream in front of its norm, as in the
            paper). On a pretrained base whose residual norms grow with depth, `"normed"` ends at a lower loss with
            either gate: see `recipes/stories260k`. The halting gate always reads the stream.
        gate_temperature: `tau` in `p = sigmoid(u / tau)`. It scales the gradient and the losses, never the decision.
            Default: 2; for linear and halting 1.
        context_dim: JEPA gate: width of the compressed context.
        summary_dim: JEPA gate: width of the predicted outcomes `q`.
        action_dim: JEPA gate: width of the two action embeddings.
        branch: `"lowrank"` (easy tokens take `W_down SiLU(W_up LN(a))`) or `"none"` (they keep the residual stream).
        branch_rank: Rank of the low-rank branch. Default: an eighth of the model's width.
        budget: Fraction of tokens (of pairs, of sequences) that run in full, in (0, 1].
        budget_scope: `"layer"`: every layer holds the budget. `"global"`: all routed layers share one threshold, and
            their mean holds it.
        selection: The training rule. `"topk"`: the `ceil(budget * n)` highest scores of each sequence. `"threshold"`:
            the inference rule, in training too. `"soft"`: both paths weighted by `p`. `"gumbel"`: the threshold on
            scores with logistic noise. `"controller"`: a threshold that moves by a fixed step against the sign of the
            layer's load error, without any budget loss. Default: top-k where it can be; threshold for the gates linear
            and exit, for sequences and for a global budget; soft for halting. Inference is always causal: a token runs
            in full iff its score reaches the layer's threshold.
        threshold: A fixed score threshold for every routed layer. Default: the quantile table of the layer, which
            training tracks and `calibrate` sets; for linear and halting, where `selection` is left out too, 0
            (`p >= 0.5`).
        scale_by_gate: Mixture-of-Depths: multiply the full path's update by `p`, in training and in inference.
        causal_rule: What decides at inference: `"quantile"` (the score against the threshold) or `"predictor"`
            (Mixture-of-Depths: a second gate that is trained to foresee the top-k choice).
        expert_gates: Target experts: `"per_expert"` (one row per expert, as in Router-Tuning) or `"per_layer"`.
        dropped_experts: Target experts with gate `"none"`: the experts that are dropped, one list per routed layer.
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
    gate_temperature: float | None = field(default=None, metadata={"help": "tau in p = sigmoid(u / tau)"})
    context_dim: int = field(default=128, metadata={"help": "JEPA gate: context width"})
    summary_dim: int = field(default=64, metadata={"help": "JEPA gate: summary width"})
    action_dim: int = field(default=16, metadata={"help": "JEPA gate: action embedding width"})
    branch: str = field(default="lowrank", metadata={"help": f"one of {BRANCHES}"})
    branch_rank: int | None = field(default=None, metadata={"help": "rank of the cheap branch (default d/8)"})
    budget: float = field(default=0.5, metadata={"help": "fraction of tokens that run the full FFN"})
    budget_scope: str = field(default="layer", metadata={"help": f"one of {BUDGET_SCOPES}"})
    selection: str | None = field(default=None, metadata={"help": f"training rule, one of {SELECTIONS}"})
    threshold: float | None = field(default=None, metadata={"help": "fixed score threshold"})
    scale_by_gate: bool = field(default=False, metadata={"help": "multiply the full path's update by p"})
    causal_rule: str = field(default="quantile", metadata={"help": f"one of {CAUSAL_RULES}"})
    expert_gates: str = field(default="per_expert", metadata={"help": f"target experts: one of {EXPERT_GATES}"})
    dropped_experts: list[list[int]] | None = field(
        default=None, metadata={"help": "target experts, gate none: dropped experts of each routed layer"}
    )
    seed: int = field(default=0, metadata={"help": "seed of the initial adapter weights"})
    modules_to_save: list[str] | None = field(default=None, metadata={"help": "base modules trained and saved"})
    trainable_token_indices: list[int] | None = field(default=None, metadata={"help": "must stay None"})
    base_architecture: dict[str, Any] | None = field(
        default=None, metadata={"help": "architecture and sizes of the base model; filled at injection"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = register_peft_type()
        for name, allowed in _CHOICES.items():
            _check_choice(name, getattr(self, name), allowed)
        if not isinstance(self.scale_by_gate, bool):
            raise ConfigError(f"scale_by_gate={reprlib.repr(self.scale_by_gate)} must be true or false")
        self._fill_in()
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
        _check_dropped(self.dropped_experts)
        for fault in _conflicts(self):
            raise ConfigError(fault)
        if self.trainable_token_indices is not None:
            raise ConfigError("trainable_token_indices is not supported by depth-routed adapters; leave it None")

    def takes_budget(self) -> bool:
        """Whether inference follows the budget: there is a gate, and its threshold comes from a quantile table."""
        return self.gate != "none" and self.threshold is None and self.causal_rule == "quantile"

    def ranks_tokens(self) -> bool:
        """Whether top-k over the tokens of a sequence is a rule for this adapter."""
        return self.granularity == "token" and self.budget_scope == "layer" and self.gate not in ("exit", "none")

    def _fill_in(self) -> None:
        """The defaults that depend on other fields; the saved configuration holds what they came to."""
        fixed = self.gate in ("linear", "halting")
        if self.gate == "halting":
            self.gate_input = "residual"
        if self.gate_temperature is None:
            self.gate_temperature = 1.0 if fixed else 2.0
        if self.selection is None:
            if fixed and self.threshold is None:  # a saved threshold of None comes with its selection, and stays
                self.threshold = 0.0
            whole = self.granularity == "sequence" or self.budget_scope == "global"
            causal = whole or self.gate in ("linear", "exit", "none")
            self.selection = "soft" if self.gate == "halting" else "threshold" if causal else "topk"

    def routed_layers(self, depth: int) -> list[int]:
        """Indices of the routed layers of a model with `depth` decoder layers, ascending.

        Raises:
            ConfigError: An index or a count is out of range, or not for this gate.
        """
        routed = self._named_layers(depth)
        if self.gate == "halting" and (not routed or routed[0] == 0):
            raise ConfigError(f"layers={self.layers!r}: the halting gate never routes layer 0; leave layers unset")
        if self.dropped_experts is not None and len(self.dropped_experts) != len(routed):
            raise ConfigError(
                f"dropped_experts has {len(self.dropped_experts)} lists for {len(routed)} routed layers; give one each"
            )
        return routed

    def _named_layers(self, depth: int) -> list[int]:
        if self.layers is None:
            if self.gate == "halting":
                return list(range(1, depth))
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


_CHOICES = {
    "target": TARGETS,
    "granularity": GRANULARITIES,
    "gate": GATE_NAMES,
    "gate_input": GATE_INPUTS,
    "branch": BRANCHES,
    "budget_scope": BUDGET_SCOPES,
    "causal_rule": CAUSAL_RULES,
    "expert_gates": EXPERT_GATES,
}


def _conflicts(c: DepthRouteConfig) -> Iterator[str]:
    """What is wrong between fields, one line each."""
    if c.gate in ("halting", "exit") and (c.target != "block" or c.granularity != "token"):
        yield f"gate={c.gate!r} decides on whole blocks, per token; use target='block' and granularity='token'"
    if c.target == "experts":
        if c.granularity == "sequence":
            yield "granularity='sequence' is not supported with target='experts'; use 'token'"
        if c.gate not in ("mlp", "linear", "random", "none"):
            yield f"gate={c.gate!r} cannot score experts; use one of: mlp, linear, random, none"
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
    if c.selection == "controller" and c.threshold is not None:
        yield "threshold is fixed, so there is nothing for selection='controller' to move; leave it None"
    if c.scale_by_gate and c.selection in ("soft", "gumbel"):
        yield f"scale_by_gate is not supported with selection={c.selection!r}; use topk, threshold or controller"


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
    raise ConfigError(f"{name}={reprlib.repr(value)} is not supported; use one of: {', '.join(allowed)}")


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


def _check_dropped(lists: Any) -> None:
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


def _check_layers(layers: Any) -> None:
    if layers is None or (isinstance(layers, str) and _LAYER_RULE.fullmatch(layers)):
        return
    listed = isinstance(layers, (list, tuple)) and 0 < len(layers) <= 4096
    if listed and all(_is_index(i) for i in layers) and len(set(layers)) == len(layers):
        return
    raise ConfigError(
        f"layers={reprlib.repr(layers)} must be 'last:N', 'every:N', 'all' or a list of distinct layer indices"
    )
