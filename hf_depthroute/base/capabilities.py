"""The savings of routing in each model family, by the family table and configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .families import FAMILIES, VARIANTS, row_of

LEGEND = {
    "skipped": "not computed for the tokens that the gate calls easy",
    "masked": (
        "computed for every token and left out afterwards: the model is the same, nothing is saved"
    ),
    "ffn only": "the FFN is skipped, the attention masked",
    "-": "the family has no experts",
}


@dataclass(frozen=True)
class Support:
    """One family, or one variant of it; each target is `"skipped"`, `"masked"`,
    `"ffn only"` or `"-"`.

    Attributes:
        family: The model type.
        variant: Name of the variant in `VARIANTS`, `""` for the family's usual layers.
        layout: How a layer adds its sublayers up, as in `hf_depthroute.base.families`.
        ffn: Target `"ffn"` per token; the same per sequence.
        attention: Target `"attention"` per token; keys and values are written for every token.
        block: Target `"block"` per token.
        experts: Target `"experts"`, per pair of a token and an expert.
        sequence: Targets `"attention"` and `"block"` per sequence, where a layer attends to
            everything before.
        sliding: The same in layers with a sliding window; `"-"` for a family whose usual
            configuration has none.
    """

    family: str
    variant: str
    layout: str
    ffn: str
    attention: str
    block: str
    experts: str
    sequence: str
    sliding: str


def support_table() -> list[Support]:
    """Every supported family with its variants, by name.

    Reads configurations only: no model is built, none loaded.
    """
    from transformers import AutoConfig

    table = []
    for name in sorted(FAMILIES):
        config: Any = AutoConfig.for_model(name)
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        for variant, fields, _ in (("", {}, {}), *VARIANTS.get(name, ())):
            row = row_of({"model_type": name} | fields)
            known = row.queries is not None
            support = Support(
                family=name,
                variant=variant,
                layout=row.layout,
                ffn="skipped",
                attention="skipped" if known else "masked",
                block="skipped" if known else "ffn only",
                experts="skipped" if experts else "-",
                sequence="skipped",
                sliding="masked" if getattr(config, "sliding_window", None) else "-",
            )
            table.append(support)
    return table
