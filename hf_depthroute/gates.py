"""Gates: from the residual stream to one score per token.

Shapes: B batch, T positions, d model width. Scores are float32 whatever the model's dtype. Adding a gate is one class
and one row of `GATES`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .branches import MixedLinear, reset_linear
from .config import DepthRouteConfig

GateOutput = dict[str, torch.Tensor]


class ScoreHead(nn.Linear):
    """One float32 score per row, also under autocast and over a bfloat16 model: `u = w . x + b`."""

    def __init__(self, features: int) -> None:
        super().__init__(features, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., features] -> [...]
        # Elementwise, because autocast would run a matmul in low precision.
        return (x.float() * self.weight.float().squeeze(0)).sum(-1) + self.bias.float()


class MLPGate(nn.Module):
    """G1: `u = W2 SiLU(W1 a + b1) + b2`, hidden width `d/4` by default."""

    outputs: tuple[str, ...] = ()

    def __init__(self, width: int, config: DepthRouteConfig) -> None:
        super().__init__()
        hidden = config.gate_hidden or default_hidden(width)
        self.hidden = MixedLinear(width, hidden)
        self.score = ScoreHead(hidden)

    def reset_parameters(self, generator: torch.Generator) -> None:
        reset_linear(self.hidden, generator)
        reset_linear(self.score, generator)

    def weights_per_token(self) -> int:
        """Weights that one decision multiplies with, biases left out."""
        return self.hidden.weight.numel() + self.score.weight.numel()

    def forward(self, a: torch.Tensor) -> GateOutput:  # [B, T, d] -> scores [B, T]
        return {"scores": self.score(F.silu(self.hidden(a)))}


class JEPAGate(nn.Module):
    """G3: predict the outcome of both paths in a small latent space, then score the difference.

        c = W_c sg(a) + b;   q_x = P([c; e_x]) for x in (full, cheap);   u = D([q_full, q_cheap, q_full - q_cheap])

    `P` and `D` are Linear, SiLU, Linear with hidden width `summary_dim`.
    """

    outputs: tuple[str, ...] = ("q_full", "q_cheap")

    def __init__(self, width: int, config: DepthRouteConfig) -> None:
        super().__init__()
        summary = config.summary_dim
        self.context = MixedLinear(width, config.context_dim)
        self.actions = nn.Embedding(2, config.action_dim)  # row 0: full, row 1: cheap
        self.predict_hidden = MixedLinear(config.context_dim + config.action_dim, summary)
        self.predict = MixedLinear(summary, summary)
        self.decide_hidden = MixedLinear(3 * summary, summary)
        self.score = ScoreHead(summary)

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.normal_(self.actions.weight, generator=generator)
        for linear in (self.context, self.predict_hidden, self.predict, self.decide_hidden, self.score):
            reset_linear(linear, generator)

    def weights_per_token(self) -> int:
        """Weights that one decision multiplies with, biases left out; the predictor runs once per action."""
        predictor = self.predict_hidden.weight.numel() + self.predict.weight.numel()
        decision = self.decide_hidden.weight.numel() + self.score.weight.numel()
        return self.context.weight.numel() + 2 * predictor + decision

    def forward(self, a: torch.Tensor) -> GateOutput:  # [B, T, d] -> scores [B, T], q [B, T, summary_dim]
        q = self.predict(F.silu(self._shared(a.detach()) + self._offsets(a.dtype)))  # [B, T, 2, summary_dim]
        q_full, q_cheap = q.unbind(-2)
        # D's first map is linear in the difference: W1 q_full + W2 q_cheap + W3 (q_full - q_cheap).
        w1, w2, w3 = self.decide_hidden.weight.chunk(3, dim=1)
        decide = torch.cat([w1 + w3, w2 - w3], dim=1).to(q.dtype)
        compared = F.linear(q.flatten(-2), decide, self.decide_hidden.bias.to(q.dtype))
        return {"scores": self.score(F.silu(compared)), "q_full": q_full, "q_cheap": q_cheap}

    def _shared(self, x: torch.Tensor) -> torch.Tensor:  # [B, T, d] -> [B, T, 1, summary_dim]
        """The context's part of P's first map, the same for both actions."""
        context_map = self.predict_hidden.weight[:, : self.context.out_features]
        if not self.training:
            return F.linear(self.context(x), context_map.to(x.dtype))[..., None, :]
        # No nonlinearity in between: over the many tokens of a training batch, one map is cheaper than two.
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = context_map @ self.context.weight, context_map @ self.context.bias
        return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))[..., None, :]

    def _offsets(self, dtype: torch.dtype) -> torch.Tensor:  # [2, summary_dim]
        """The actions' part of P's first map; row 0 full, row 1 cheap."""
        action_map = self.predict_hidden.weight[:, self.context.out_features :]
        return F.linear(self.actions.weight, action_map, self.predict_hidden.bias).to(dtype)


GATES: dict[str, type[MLPGate] | type[JEPAGate]] = {"mlp": MLPGate, "jepa": JEPAGate}


class TargetProjection(nn.Linear):
    """`T: d -> summary_dim`, orthogonal, without bias, frozen: `z = sg(T(h))`. One per adapter, for all its layers."""

    def __init__(self, width: int, summary_dim: int) -> None:
        super().__init__(width, summary_dim, bias=False)
        self.weight.requires_grad_(False)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        if generator is not None:  # nn.Linear's own constructor calls this without one
            nn.init.orthogonal_(self.weight, generator=generator)

    @torch.no_grad()
    def forward(self, h: torch.Tensor) -> torch.Tensor:  # [B, T, d] -> [B, T, summary_dim]
        return F.linear(h.detach(), self.weight.to(h))  # a split model may hold it on another device


def default_hidden(width: int) -> int:
    """Hidden width of the MLP gate when the config names none: `d/4`, as in the paper."""
    return max(1, width // 4)
