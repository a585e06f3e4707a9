"""Gates that nothing trains: baselines to compare a router with.

Shapes as in `gates.py`: B batch, T positions, E experts, d model width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.distributed import rows_of_all
from ..base.lm_head import LMHead
from .gate import Gate, GateOutput, Thresholds
from .regression import norms_and_sinks

_NO_SINKS = 69.0  # of a bound that no stream reaches, about 1e30
_NOTHING = 1e-30


class RandomGate(Gate):
    """A fixed random projection: what routing is worth when nothing was learned.

    Nothing here trains.
    """

    scores_experts = True

    def __init__(self, width: int, config: object, scores: int = 1) -> None:
        super().__init__(width, config, scores)
        self.weight: Tensor
        self.register_buffer("weight", torch.zeros(scores, width))

    def reset_parameters(self, generator: torch.Generator) -> None:
        self.weight.normal_(std=self.weight.shape[-1] ** -0.5, generator=generator)

    def weights_per_token(self) -> int:
        return self.weight.numel()

    def forward(self, a: Tensor) -> GateOutput:  # [B, T, d] -> scores [B, T], or [B, T, E]
        with torch.autocast(a.device.type, enabled=False):
            scores = F.linear(a.float(), self.weight.float())
        return {"scores": scores.squeeze(-1) if self.weight.shape[0] == 1 else scores}


class ExitGate(Gate):
    """Early exit: `u = -max softmax(head(norm(h)))`.

    A token that the LM head is sure of leaves; nothing trains.
    """

    called = "early exit"
    targets = ("block",)
    granularities = ("token",)
    selections = ("threshold",)
    default_selection = "threshold"
    exits = True
    reads_logits = True

    def __init__(self, width: int, config: object, scores: int = 1) -> None:
        super().__init__(width, config, scores)
        self._lm_head: tuple[LMHead, ...] = ()  # owned by the base

    def connect(self, lm_head: LMHead) -> None:
        self._lm_head = (lm_head,)

    def weights_per_token(self) -> int:
        weight: Any = self._lm_head[0].head.weight
        return int(weight.numel())

    @torch.no_grad()
    def forward(self, a: Tensor) -> GateOutput:  # [B, T, d] -> scores [B, T]
        logits = self._lm_head[0](a).float()
        return {"scores": -(logits.amax(-1) - logits.logsumexp(-1)).exp()}


class SinkGate(Thresholds, Gate):
    """`u = ln(rms(h) / bound)`: attention sinks run in full,
    every other token takes the cheap path. Nothing trains.

    The stream of a few tokens, such as a sequence's first, is 100 times as large as that of the
    rest (Sun et al., "Massive Activations in Large Language Models", arXiv:2402.17762). Later
    tokens find them by it.
    """

    called = "the gate of attention sinks"
    targets = ("ffn", "attention", "block")
    granularities = ("token",)
    selections = ("threshold",)
    default_selection = "threshold"
    default_threshold = 0.0
    reads = "residual"
    spares = "attention sinks"

    def __init__(self, width: int, config: object, scores: int = 1) -> None:
        super().__init__(width, config, scores)
        self.log_bound: Tensor
        self.register_buffer("log_bound", torch.tensor(_NO_SINKS))

    def forward(self, a: Tensor) -> GateOutput:  # [B, T, d] -> scores [B, T]
        size = a.float().square().mean(-1).clamp(min=_NOTHING).log() / 2
        return {"scores": size - self.log_bound.float()}

    def set_bound(self, stream_Nd: Tensor) -> None:
        """Half-way, on a logarithmic scale, between the stream's sinks and other tokens."""
        sizes_N, sinks_N = norms_and_sinks(stream_Nd)
        sizes_N = rows_of_all(sizes_N)
        sinks_N = rows_of_all(sinks_N)
        if sinks_N.any():
            self.log_bound.copy_((sizes_N[sinks_N].min().log() + sizes_N[~sinks_N].max().log()) / 2)


class StaticGate(Gate):
    """No gate: every token of the layer takes the cheap path."""

    scores_experts = True
    default_selection = "threshold"
    static = True

    def __init__(self, width: int, config: object, scores: int = 1) -> None:
        super().__init__(width, config, scores)
        self._scores = scores

    def forward(self, a: Tensor) -> GateOutput:  # [B, T, d] -> scores [B, T], or [B, T, E]
        shape: tuple[int, ...] = a.shape[:-1]
        if self._scores != 1:
            shape = (*shape, self._scores)
        return {"scores": a.new_zeros(shape, dtype=torch.float32)}
