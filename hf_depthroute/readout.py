"""From the residual stream to logits, as the model does it: final norm, LM head, and what comes after the head."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from .families import find_decoder, find_family


class ReadOut:
    """`logits = f(head(norm(stream)))`: `[..., d] -> [..., V]`, `f` a scale or a soft cap where the family has one.

    Args:
        model: A transformers model of a supported family with an LM head, or a `PeftModel` around one.

    Attributes:
        norm: The decoder stack's final norm.
        head: The LM head.
    """

    def __init__(self, model: nn.Module) -> None:
        family = find_family(model)
        self.norm: nn.Module = getattr(find_decoder(model, family), family.final_norm)
        self.head = cast(nn.Module, cast(Any, model).get_output_embeddings())
        self.change = logit_change(model)

    def __call__(self, stream: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(stream))
        if self.change is None:
            return logits
        kind, value = self.change
        if kind == "softcap":
            return torch.tanh(logits / value) * value
        return logits * value if kind == "multiply" else logits / value


def logit_change(model: nn.Module) -> tuple[str, float] | None:
    """What the model does to its LM head's output, `("multiply" | "divide" | "softcap", value)`; None for nothing."""
    row = find_family(model).logits
    value = None if row is None else getattr(model.config, row[1], None)
    return None if row is None or value is None else (row[0], float(value))
