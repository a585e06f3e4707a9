"""`DepthRouteConfig`: everything that defines an adapter, checked when it is made."""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import peft
from peft import PeftConfig

from .adapter_file import FORMAT_VERSION
from .config_rules import (
    BRANCHES,
    BUDGET_SCOPES,
    CAUSAL_RULES,
    CHOICES,
    EXPERT_GATES,
    GATE_INPUTS,
    GRANULARITIES,
    SELECTIONS,
    TARGETS,
    ConfigError,
    check_budget,
    check_choice,
    check_dropped,
    check_gate,
    check_int,
    check_known,
    check_layers,
    check_number,
    check_saved_fields,
    check_task,
    check_threshold,
    conflicts,
    module_of,
    package_of,
)
from .gates import GATES
from .version import __version__


@dataclass
class DepthRouteConfig(PeftConfig):
    """Configuration of a depth-routed adapter.

    Args:
        layers: Which decoder layers are routed: `"last:N"`, `"every:N"` (layers N-1, 2N-1, ...), `"before_last:N"`
            (the deepest but the last; `"before_last:half"`: half of all), `"all"`, or a list of indices. Default: the
            last third (halting: all but the first). Injection replaces it with the list of indices, which is saved.
        target: What an easy token skips: `"ffn"`; `"attention"` (its query, its softmax and the output projection;
            keys and values are always written); `"block"` (both); or `"experts"` of a mixture-of-experts layer, one
            (token, expert) pair at a time.
        granularity: What one decision covers: a `"token"`, or a `"sequence"`. A sequence is decided on its prompt, and
            the decision is kept with the KV cache; where it skips the attention, no keys and values are written.
        gate: `"mlp"` (G1: `u = W2 SiLU(W1 a + b1) + b2`); `"jepa"` (G3: predicts both outcomes, then compares them);
            `"linear"` (Router-Tuning: one row, starts dense); `"halting"` (TSA: reads the stream between two blocks,
            scales both updates of the block); and to compare with: `"random"` (a frozen random projection), `"exit"`
            (early exit: the LM head's confidence; a token that has left stays out) and `"none"` (static: the routed
            layers are skipped by every token). Any other row of `gates.GATES` is a value too.
        gate_hidden: Width of the MLP gate's hidden layer. Default: a quarter of the model's width.
        gate_input: `"normed"` (what the sublayer sees) or `"residual"` (the stream in front of its norm, as in
            arXiv:2604.17228). On the pretrained base of `recipes/stories260k` `"normed"` ended at a lower loss with
            the MLP and with the JEPA gate. The halting gate always reads the stream.
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
            layer's load error; it needs no budget loss (`budget_weight=0`). Default: top-k where it can be; threshold
            for the gates linear and exit, for sequences and for a global budget; soft for halting. Inference is always
            causal: a token runs in full iff its score reaches the layer's threshold.
        threshold: `"budget"`: every layer compares with the quantile of its scores that the budget asks for, from a
            table that training tracks and `calibrate` sets. A number: all layers compare with it, whatever the
            budget. Default: the budget; for linear and halting, where `selection` is left out too, 0 (`p >= 0.5`).
        scale_by_gate: Mixture-of-Depths: multiply the full path's update by `p`, in training and in inference.
        causal_rule: What decides at inference: `"quantile"` (the score against the threshold) or `"predictor"`
            (Mixture-of-Depths: a second gate that is trained to foresee the top-k choice).
        expert_gates: Target experts: `"per_expert"` (one row per expert, as in Router-Tuning) or `"per_layer"`.
        dropped_experts: Target experts with gate `"none"`: the experts that are dropped, one list per routed layer.
        seed: Seed of the adapter's initial weights, independent of the global generator.
        modules_to_save: As in PEFT: names of base modules that train and are saved in full.
        trainable_token_indices: As in PEFT's LoRA; not supported by routed adapters, must stay `None`.
        gate_package: Written by the library, like the next one, for a gate from another package: that package's name.
        gate_module: The module of the gate's class. Both are shown where the gate is not known, and never imported.
        base_architecture: Written by the library, like the next three: what the base is, and some of its weights.
        format_version: The version of the saved files' form. A newer one than this library knows is refused.
        library_version: The version that saved the adapter.
        weights_hash: The hash of the saved tensors; loading compares it.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    layers: str | list[int] | None = field(default=None, metadata={"help": "last:N, every:N, all, or indices"})
    target: str = field(default="ffn", metadata={"help": f"one of {TARGETS}"})
    granularity: str = field(default="token", metadata={"help": f"one of {GRANULARITIES}"})
    gate: str = field(default="mlp", metadata={"help": f"one of {tuple(GATES)}"})
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
    threshold: float | str | None = field(default=None, metadata={"help": "budget, or a fixed score threshold"})
    scale_by_gate: bool = field(default=False, metadata={"help": "multiply the full path's update by p"})
    causal_rule: str = field(default="quantile", metadata={"help": f"one of {CAUSAL_RULES}"})
    expert_gates: str = field(default="per_expert", metadata={"help": f"target experts: one of {EXPERT_GATES}"})
    dropped_experts: list[list[int]] | None = field(
        default=None, metadata={"help": "target experts, gate none: dropped experts of each routed layer"}
    )
    seed: int = field(default=0, metadata={"help": "seed of the initial adapter weights"})
    modules_to_save: list[str] | None = field(default=None, metadata={"help": "base modules trained and saved"})
    trainable_token_indices: list[int] | None = field(default=None, metadata={"help": "must stay None"})
    gate_package: str | None = field(
        default=None, repr=False, metadata={"help": "of an outside gate; filled when saved"}
    )
    gate_module: str | None = field(
        default=None, repr=False, metadata={"help": "of an outside gate; filled when saved"}
    )
    base_architecture: dict[str, Any] | None = field(
        default=None,
        repr=False,
        metadata={"help": "architecture, sizes and sampled weights of the base; filled at injection"},
    )
    format_version: int = field(default=FORMAT_VERSION, metadata={"help": "of the adapter's files"})
    library_version: str | None = field(default=None, metadata={"help": "hf_depthroute that saved it; filled then"})
    weights_hash: str | None = field(default=None, metadata={"help": "of the adapter's tensors; filled when saved"})

    def __post_init__(self) -> None:
        check_task(self.task_type)
        super().__post_init__()
        self.peft_type = register_peft_type()
        check_saved_fields(self)
        check_gate(self)
        for name, allowed in CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        if not isinstance(self.scale_by_gate, bool):
            raise ConfigError(f"scale_by_gate={reprlib.repr(self.scale_by_gate)} must be true or false")
        self._fill_in()
        check_choice("selection", self.selection, SELECTIONS)
        check_budget(self.budget)
        check_number("gate_temperature", self.gate_temperature, low=0.0, low_open=True)
        check_threshold(self.threshold)
        for name in ("context_dim", "summary_dim", "action_dim"):
            check_int(name, getattr(self, name), low=1, high=65536)
        for name in ("gate_hidden", "branch_rank"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low=1, high=262144)
        check_int("seed", self.seed, low=0, high=2**63 - 1)
        check_layers(self.layers)
        check_dropped(self.dropped_experts)
        for fault in conflicts(self):
            raise ConfigError(fault)
        if self.trainable_token_indices is not None:
            raise ConfigError("trainable_token_indices is not supported by depth-routed adapters; leave it None")

    def to_dict(self) -> dict[str, Any]:
        """What is saved. The weights' hash is written by the save that writes the weights."""
        saved = super().to_dict() | {"library_version": __version__, "weights_hash": None}
        module = module_of(GATES[self.gate])
        if module is None:  # the fields are unknown to versions that had no gates from outside
            return {name: value for name, value in saved.items() if name not in ("gate_package", "gate_module")}
        return saved | {"gate_package": package_of(module), "gate_module": module}

    @property
    def fixed_threshold(self) -> float | None:
        """The score that every routed layer compares with; None where the layer's own table gives it."""
        return None if isinstance(self.threshold, str) else self.threshold

    def takes_budget(self) -> bool:
        """Whether inference follows the budget: there is a gate, and its threshold comes from a quantile table."""
        return self.gate != "none" and self.fixed_threshold is None and self.causal_rule == "quantile"

    def ranks_tokens(self) -> bool:
        """Whether top-k over the tokens of a sequence is a rule for this adapter."""
        return self.granularity == "token" and self.budget_scope == "layer" and self.gate not in ("exit", "none")

    def _fill_in(self) -> None:
        """The defaults that depend on other fields; the saved configuration holds what they came to."""
        self.task_type = self.task_type or "CAUSAL_LM"  # PEFT wraps a model by it
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
            rule, number = self.layers.split(":")
            count = max(1, depth // 2) if number == "half" else int(number)
            end = depth - 1 if rule == "before_last" else depth
            if count > end:
                raise ConfigError(f"layers={self.layers!r}: the model has only {depth} decoder layers")
            return list(range(depth))[count - 1 :: count] if rule == "every" else list(range(end - count, end))
        outside = [i for i in self.layers if i >= depth]
        if outside:
            raise ConfigError(
                f"layers={self.layers}: {outside[0]} is out of range; the model has layers 0 to {depth - 1}"
            )
        return sorted(self.layers)


def _refuse_unknown(init: Callable[..., None]) -> Callable[..., None]:
    """`__init__` that names a field that does not exist; PEFT would drop it from a file with a warning."""

    @functools.wraps(init)
    def __init__(self: DepthRouteConfig, *args: Any, **kwargs: Any) -> None:
        check_known(kwargs, [f.name for f in dataclasses.fields(DepthRouteConfig) if f.init])
        init(self, *args, **kwargs)

    return __init__


DepthRouteConfig.__init__ = _refuse_unknown(DepthRouteConfig.__init__)  # type: ignore[method-assign]


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
