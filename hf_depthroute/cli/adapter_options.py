"""The options of `train` that define a new adapter: the fields of `DepthRouteConfig`, readable without PEFT.

A test compares names and defaults with the configuration's. `seed` is the run's own option; what a save writes
(`format_version`, `weights_hash`, ...) and what PEFT adds is not for the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import CliError
from .options import parse_layers

OTHER_NAMES = {"gate_temperature": "temperature", "learning_rate": "lr"}  # fields whose option has another name


@dataclass
class AdapterOptions:
    """One option per field."""

    layers: str | None = field(
        default=None, metadata={"help": "last:N, every:N, all or 2,3,5. Default: the last third."}
    )
    target: str = field(default="ffn", metadata={"help": "ffn, attention, block or experts."})
    granularity: str = field(default="token", metadata={"help": "token or sequence."})
    gate: str = field(default="mlp", metadata={"help": "mlp, jepa, linear, halting, random, exit or none."})
    gate_input: str = field(default="normed", metadata={"help": "normed or residual."})
    gate_hidden: int | None = field(default=None, metadata={"help": "Hidden width of the MLP gate. Default: d/4."})
    temperature: float | None = field(default=None, metadata={"help": "Gate temperature tau. Default: 2, or 1."})
    context_dim: int = field(default=128, metadata={"help": "JEPA gate: width of the compressed context."})
    summary_dim: int = field(default=64, metadata={"help": "JEPA gate: width of the predicted outcomes."})
    action_dim: int = field(default=16, metadata={"help": "JEPA gate: width of the action embeddings."})
    branch: str = field(default="lowrank", metadata={"help": "lowrank or none."})
    branch_rank: int | None = field(default=None, metadata={"help": "Rank of the cheap branch. Default: d/8."})
    budget: float = field(default=0.5, metadata={"help": "Fraction of tokens that run in full, in (0, 1]."})
    budget_scope: str = field(default="layer", metadata={"help": "layer, or global (the mean over layers holds it)."})
    selection: str | None = field(
        default=None, metadata={"help": "Training rule: topk, threshold, soft, gumbel or controller."}
    )
    threshold: str | None = field(
        default=None, metadata={"help": "A fixed score threshold, or budget. Default: the budget's, or 0."}
    )
    scale_by_gate: bool = field(default=False, metadata={"help": "Multiply the full update by p.", "flag": True})
    causal_rule: str = field(default="quantile", metadata={"help": "Inference rule: quantile or predictor."})
    expert_gates: str = field(default="per_expert", metadata={"help": "Target experts: per_expert or per_layer."})
    dropped_experts: str | None = field(
        default=None, metadata={"help": "Target experts, gate none: dropped experts of each routed layer: 0,3/1,2."}
    )
    modules_to_save: str | None = field(
        default=None, metadata={"help": "Base modules that train and are saved in full, comma-separated."}
    )


def config_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `DepthRouteConfig` from the options of a command.

    Raises:
        CliError: A list or a number cannot be read.
    """
    options = {name: values[name] for name in AdapterOptions.__dataclass_fields__}
    options["gate_temperature"] = options.pop(OTHER_NAMES["gate_temperature"])
    modules = options["modules_to_save"]
    return options | {
        "layers": parse_layers(options["layers"]),
        "threshold": _threshold(options["threshold"]),
        "dropped_experts": _dropped(options["dropped_experts"]),
        "modules_to_save": None if modules is None else [name.strip() for name in modules.split(",")],
    }


def _threshold(text: str | None) -> float | str | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text  # the configuration knows which words it takes


def _dropped(text: str | None) -> list[list[int]] | None:
    """`"0,3/1,2"` -> `[[0, 3], [1, 2]]`; an empty part drops nothing in its layer."""
    try:
        return None if text is None else [[int(n) for n in part.split(",") if n.strip()] for part in text.split("/")]
    except ValueError as error:
        raise CliError(f"--dropped-experts {text!r}: write whole numbers, such as 0,3/1,2") from error
