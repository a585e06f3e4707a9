"""Targets: what of a decoder layer an easy token skips.

A row of `TARGETS` says what is known of a target without a model; its class in `execution.sites.SITES`, under the same
name, runs it. Adding a target is one row and one class, from this package or from another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Target:
    """The traits of a target.

    Attributes:
        skips: What an easy token skips, in the order that it runs: `"attention"`, `"ffn"`, or `"experts"` (those of the
            FFN, whose own router runs for every token). Costs are counted from it. `"memory"` is no part of the base.
        called: How a message names what one decision is about, in the plural.
        decides: By granularity, what one decision settles, as a model card says it. A target that cannot be decided
            per `"token"` or per `"sequence"` leaves it out.
        norm: The sublayer whose norm the cheap branch copies, `"attention"` or `"ffn"`.
        per_pair: Whether a decision is about a token and one of its experts, and not about a token.
        reads_ids: Whether it needs the token ids; the layers are then given the n-grams that end at each token.
        fixed: Fields of `DepthRouteConfig` that have one value with this target: it stands in for the field's default,
            and any other value is refused.
    """

    skips: tuple[str, ...]
    called: str
    decides: Mapping[str, str]
    norm: str
    per_pair: bool = False
    reads_ids: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def skips_attention(self) -> bool:
        return "attention" in self.skips

    @property
    def skips_ffn(self) -> bool:
        """Whether the whole FFN is skipped; of the target `"experts"` its router stays."""
        return "ffn" in self.skips


TARGETS: dict[str, Target] = {
    "ffn": Target(
        skips=("ffn",),
        called="FFNs",
        decides={"token": "whether it enters the FFN.", "sequence": "whether it enters the FFN."},
        norm="ffn",
    ),
    "attention": Target(
        skips=("attention",),
        called="attention",
        decides={
            "token": "whether it attends. A token that does not still writes its key and value.",
            "sequence": "whether its attention runs. Where it does not, no keys and values are written.",
        },
        norm="attention",
    ),
    "block": Target(
        skips=("attention", "ffn"),
        called="whole blocks",
        decides={
            "token": "whether it enters the block, attention and FFN. A token that does not still writes its key and "
            "value.",
            "sequence": "whether its block runs, attention and FFN. Where it does not, no keys and values are written.",
        },
        norm="attention",
    ),
    "experts": Target(
        skips=("experts",),
        called="experts",
        decides={"token": "which of the experts that the base chose are run."},
        norm="ffn",
        per_pair=True,
    ),
    "memory": Target(
        skips=("memory",),
        called="memory",
        decides={"token": "how much of what a table of hashed n-grams holds for it is added before the attention."},
        norm="attention",
        reads_ids=True,
        fixed={
            "gate": "memory",
            "branch": "none",
            "budget": 1.0,
            "budget_scope": "layer",
            "selection": "soft",
            "threshold": 0.0,
            "gate_temperature": 1.0,
            "scale_by_gate": False,
            "phases": "all",
            "causal_rule": "quantile",
        },
    ),
}
