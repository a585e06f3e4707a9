"""Published methods, a row each: the adapter, and the losses,
schedules and optimizer that train it.

    config, training = preset("router-tuning", budget=0.75)
    model = get_depth_routed_model(base, config)
    arguments = DepthRouteTrainingArguments(output_dir="run", max_steps=1000, **training)

What a row does not set is yours: the text, the number of steps, the batch. Where a paper trains its
base too, or from scratch, `note` says so; here the base stays frozen.
"""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..config.adapter import ConfigError, DepthRouteConfig
from ..files.suggestions import did_you_mean
from .arguments import OWN_LOSSES

_ADAPTER = {f.name for f in fields(DepthRouteConfig)}


@dataclass(frozen=True)
class Preset:
    """A row of `PRESETS`.

    Attributes:
        title: The paper's title.
        identifier: Where to find the paper.
        adapter: Fields of `DepthRouteConfig`.
        training: Fields of `DepthRouteTrainingArguments`; of the losses all weights, so that no
            default joins in.
        note: How the paper ran it, and what is not as in the paper here.
    """

    title: str
    identifier: str
    adapter: Mapping[str, Any]
    training: Mapping[str, object]
    note: str = ""


def _losses(**weights: float) -> dict[str, object]:
    """The language-model loss and these terms, and no other."""
    named = dict.fromkeys(OWN_LOSSES, 0.0) | {"lm": 1.0} | weights
    return {f"{name}_weight": weight for name, weight in named.items()}


_DEPTH_ROUTING: dict[str, Any] = {
    "title": "Revisiting Auxiliary Losses for Conditional Depth Routing: An Empirical Study",
    "identifier": "arXiv:2604.17228",
    "note": (
        "The paper: the last 4 of 12 layers, 20,000 steps of 16 x 256 tokens in bfloat16, 1,000 of "
        "them warm-up."
    ),
}
_DEPTH_ROUTING_ADAPTER: dict[str, Any] = {
    "target": "ffn",
    "granularity": "token",
    "gate_input": "residual",
    "gate_temperature": 2.0,
    "branch": "lowrank",
    "budget": 0.5,
    "selection": "topk",
}
_DEPTH_ROUTING_TRAINING = _losses(util=1.0, rank=0.2, budget=1.0, alive=0.5) | {
    "oracle": "all_full",
    "oracle_window": 8,
    "oracle_gamma": 0.5,
    "oracle_warmup": 100,
    "oracle_interval": 5,
    "alive_min": 0.05,
    "learning_rate": 2e-4,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "warmup_steps": 0.05,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.01},
}
# Of the code that the authors of Router-Tuning, of DLO and of FlexiDepth published.
_AUTHORS_SCHEDULE: dict[str, Any] = {
    "weight_decay": 0.0,
    "warmup_steps": 0.03,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {},
}
_ROUTER_TUNING: dict[str, Any] = {
    "title": (
        "Router-Tuning: A Simple and Effective Approach for Enabling Dynamic-Depth in Transformers"
    ),
    "identifier": "arXiv:2410.13184",
    "training": _losses(capacity=0.1) | {"learning_rate": 2e-4} | _AUTHORS_SCHEDULE,
}
_ROUTER_TUNING_ADAPTER: dict[str, object] = {
    "gate": "linear",
    "gate_temperature": 1.0,
    "threshold": 0.0,
    "selection": "threshold",
    "branch": "none",
}
_TOKEN_FFN: dict[str, object] = {"target": "ffn", "granularity": "token"}
_COSINE: dict[str, object] = {
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {},
}
_GRID = "Weight and learning rate are the largest of the paper's grids (0 to 0.1, 1e-5 to 2e-4)"
_GATE_SUPERVISION: dict[str, Any] = {
    "title": (
        "Counterfactual Gate Supervision Does Not Fix Gating Credit Assignment in Engram-Style "
        "Conditional Memory"
    ),
    "identifier": "FARS, Analemma",
    "training": _losses(cgs=0.5)
    | _COSINE
    | {"cgs_warmup": 500, "cgs_interval": 4, "learning_rate": 6e-4},
}
_FROM_SCRATCH = "The paper trains the base with the routers, from scratch"

PRESETS: dict[str, Preset] = {
    "conditional-depth-routing": Preset(
        adapter=_DEPTH_ROUTING_ADAPTER | {"gate": "mlp"},
        training=_DEPTH_ROUTING_TRAINING,
        **_DEPTH_ROUTING,
    ),
    "conditional-depth-routing-jepa": Preset(
        adapter=_DEPTH_ROUTING_ADAPTER
        | {"gate": "jepa", "context_dim": 128, "summary_dim": 64, "action_dim": 16},
        training=_DEPTH_ROUTING_TRAINING | {"jepa_weight": 1.0},
        **_DEPTH_ROUTING,
    ),
    "token-selective-attention": Preset(
        "Adaptive Computation Depth via Learned Token Routing in Transformers",
        "arXiv:2605.05222",
        {
            "gate": "halting",
            "target": "block",
            "granularity": "token",
            "gate_temperature": 1.0,
            "threshold": 0.0,
            "gate_input": "residual",
            "selection": "soft",
            "branch": "none",
        },
        _losses(depth=0.001) | _COSINE | {"learning_rate": 3e-4},
        f"{_FROM_SCRATCH}: 5,000 steps of 64 x 128 characters. The learning rate is that of its "
        "synthetic tasks; of the others it gives none, and no warm-up.",
    ),
    "router-tuning": Preset(
        adapter=_ROUTER_TUNING_ADAPTER
        | {
            "target": "attention",
            "granularity": "sequence",
            "layers": "before_last:half",
            "budget": 0.5,
            # Equations 1 and 3: R and F read the x to which F's output is added.
            "gate_input": "residual",
        },
        note=(
            f"{_GRID}; a few thousand samples. At small scale it took weights of 4 to 10 to reach "
            "the budget. The authors' code gives the router the normed input instead: "
            "gate_input='normed'."
        ),
        **_ROUTER_TUNING,
    ),
    "router-tuning-experts": Preset(
        adapter=_ROUTER_TUNING_ADAPTER
        | {
            "target": "experts",
            "granularity": "token",
            "expert_gates": "per_expert",
            "layers": "all",
            "budget": 0.75,
            # Equations 6 to 8: R reads the x of the expert, which the FFN's norm has made.
            "gate_input": "normed",
        },
        note=f"{_GRID}. A base with experts; a quarter of the pairs are skipped.",
        **_ROUTER_TUNING,
    ),
    "mixture-of-depths": Preset(
        "Mixture-of-Depths: Dynamically allocating compute in transformer-based language models",
        "arXiv:2404.02258",
        {
            "gate": "linear",
            "target": "block",
            "granularity": "token",
            "gate_input": "residual",
            "selection": "topk",
            "scale_by_gate": True,
            "causal_rule": "predictor",
            "branch": "none",
            "layers": "every:2",
            "budget": 0.125,
        },
        _losses(predictor=1.0),
        f"{_FROM_SCRATCH}. Two things differ here: a skipped token's keys and values are written, "
        "so that later tokens see it, and the update is multiplied by the sigmoid of the router's "
        "score, not by the score.",
    ),
    "dlo": Preset(
        "DLO: Dynamic Layer Operation for Efficient Vertical Scaling of LLMs",
        "arXiv:2407.11030",
        _TOKEN_FFN
        | {
            "gate": "linear",
            "gate_input": "residual",
            "gate_temperature": 1.0,
            "selection": "topk",
            "threshold": 0.0,
            "branch": "none",
            "layers": "all",
            "budget": 0.9,
        },
        _losses(similarity=1.0)
        | {"learning_rate": 2e-5}
        | _AUTHORS_SCHEDULE
        | {"budget_start": 1.0, "budget_schedule_steps": 1000},
        "Numbers of the authors' code, which also trains the base, after adding layers to it. "
        "There the router reads the stream before the attention, here before the FFN; there the "
        "budget is shared out over layers and sequences, here each layer holds it in each "
        "sequence.",
    ),
    "flexidepth": Preset(
        "Adaptive Layer-skipping in Pre-trained LLMs",
        "arXiv:2503.23798",
        {
            "gate": "bottleneck",
            "target": "block",
            "granularity": "token",
            "selection": "threshold",
            "threshold": 1e-7,
            "branch": "swiglu",
            "layers": "last:half",
        },
        _losses(squared_depth=1e-4)
        | {"learning_rate": 1e-4, "adam_beta2": 0.95}
        | _AUTHORS_SCHEDULE,
        "Numbers of the authors' code (luoxuan-cs/Flexidepth): an epoch of tulu-v3-sft-mixture at "
        "this penalty, then one of open-perfectblend at 1e-5, 32 sequences a step. There the "
        "branch reads the base's own norm before the FFN, here a copy, which trains with it. "
        "hf-depthroute convert reads the published checkpoint.",
    ),
    "counterfactual-gate-supervision": Preset(
        adapter=_TOKEN_FFN
        | {"gate": "mlp", "gate_input": "normed", "branch": "lowrank", "selection": "topk"},
        note=(
            "The paper supervises the gates of a memory; here 'on' is the full path. 5,000 steps, "
            "batch 16."
        ),
        **_GATE_SUPERVISION,
    ),
    "counterfactual-gate-supervision-memory": Preset(
        adapter={
            "target": "memory",
            "granularity": "token",
            "layers": [2, 4, 6],
            "memory_slots": 500_000,
            "memory_width": 32,
            "memory_heads": 4,
            "ngram_order": 3,
        },
        note=f"{_FROM_SCRATCH}, of 12 layers; 5,000 steps, batch 16.",
        **_GATE_SUPERVISION,
    ),
    "loss-free-balancing": Preset(
        "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts",
        "arXiv:2408.15664",
        _TOKEN_FFN
        | {"gate": "mlp", "gate_input": "normed", "branch": "lowrank", "selection": "controller"},
        _losses() | {"controller_step": 0.01},
        "The paper balances experts; here the same step against the load error holds each layer's "
        "budget. Its step of 0.001 is one of sigmoids; 0.01 before a sigmoid of temperature 2 is "
        "0.00125 after it.",
    ),
}


def find_preset(name: str) -> Preset:
    """The row of `PRESETS`; `ConfigError` where there is none."""
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS)
        raise ConfigError(
            f"there is no preset {reprlib.repr(name)}{hint}; use one of: {', '.join(PRESETS)}"
        )
    return PRESETS[name]


def preset(name: str, **changes: object) -> tuple[DepthRouteConfig, dict[str, Any]]:
    """A published method: its configuration, and the values for `DepthRouteTrainingArguments`.

    Args:
        name: A row of `PRESETS`.
        **changes: Fields to set otherwise; those of `DepthRouteConfig` go to the configuration, all
            others to the training arguments, and `seed` to both.

    Raises:
        ConfigError: There is no such row, or a change does not fit.
    """
    row = copy.deepcopy(find_preset(name))
    adapter = {field: value for field, value in changes.items() if field in _ADAPTER}
    training = {
        field: value for field, value in changes.items() if field not in _ADAPTER or field == "seed"
    }
    return DepthRouteConfig(**{**row.adapter, **adapter}), {**row.training, **training}
