"""Pieces that gates share: their sizes, the float32 score head, and a gate as data.

Shapes: B batch, T positions, E experts, d model width, g rows of the gate.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from .branches import TensorMap

GateOutput = dict[str, torch.Tensor]


class GateSizes(Protocol):
    """The fields of `DepthRouteConfig` that gates read."""

    gate_hidden: int | None
    context_dim: int
    summary_dim: int
    action_dim: int


class ScoreMaps(NamedTuple):
    """A gate as `u = out . SiLU(weight x + bias) + out_bias`; without `out`, `u` is the one row of the first map.

    Attributes:
        weight: `[g, d]`.
        bias: `[g]`, or None.
        out: `[g]`, or None.
        out_bias: `[1]`, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor | None = None
    out_bias: torch.Tensor | None = None


class ScoreHead(nn.Linear):
    """Float32 scores, also under autocast and over a bfloat16 model: `u = W x + b`, one per row of `W`."""

    def __init__(self, features: int, outputs: int = 1, bias: bool = True) -> None:
        super().__init__(features, outputs, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., features] -> [...], or [..., outputs] where several
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self._score(x)
        return self._score(x)

    def _score(self, x: torch.Tensor) -> torch.Tensor:
        if self.out_features > 1:
            return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())
        rows, weight = x.float().reshape(-1, x.shape[-1]), self.weight.float().squeeze(0)
        if self.bias is None:
            return torch.mv(rows, weight).view(x.shape[:-1])
        # Not `len(rows)`: an exported program of any length must not take this one for the only length.
        return torch.addmv(self.bias.float().expand(rows.shape[0]), rows, weight).view(x.shape[:-1])

    def for_decoding(self) -> TensorMap:
        """The one score of each row, `[B, 1, features] -> [B]`, with the weights as they are now."""
        weight = self.weight.detach().float().squeeze(0)
        if self.bias is None:
            return lambda x: torch.mv(x.float().view(-1, x.shape[-1]), weight)
        bias = self.bias.detach().float()
        return lambda x: torch.addmv(bias, x.float().view(-1, x.shape[-1]), weight)


def default_hidden(width: int, divisor: int = 4) -> int:
    """Hidden width of a gate where the configuration names none; `d/4` in the MLP gate, as in arXiv:2604.17228."""
    return max(1, width // divisor)
