"""Gates: from the residual stream to one score per token.

Shapes: B batch, T positions, d model width. Scores are float32 whatever the model's dtype. Adding a
gate is one class and one row of `GATES`, from this package or from another one. What a class may
declare stands in `gate.Gate`.

The MLP and the JEPA gate (G1, G3) are those of "Revisiting Auxiliary Losses for Conditional Depth
Routing: An Empirical Study" (arXiv:2604.17228); the linear gate is that of "Router-Tuning: A Simple
and Effective Approach for Enabling Dynamic-Depth in Transformers" (arXiv:2410.13184); the halting
gate that of "Adaptive Computation Depth via Learned Token Routing in Transformers"
(arXiv:2605.05222), Token-Selective Attention (TSA); that of FlexiDepth is in `flexidepth`, the
memory's in `memory`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .baseline_gates import ExitGate, RandomGate, SinkGate, StaticGate
from .branches import Deriving, MixedLinear, TensorMap, reset_linear
from .flexidepth import BottleneckGate
from .gate import Gate, GateOutput, GateSizes, ScoreHead, ScoreMaps, default_hidden
from .memory import MemoryGate
from .regression import count_of_all, fit_scores, moments, refine_scores, ridge_weights

_STEPS = 200  # of gradient descent on a gate, after its closed form


class MLPGate(Gate):
    """G1: `u = W2 SiLU(W1 a + b1) + b2`, hidden width `d/4` by default."""

    sizes = ("gate_hidden",)
    scores_experts = True
    is_fitted = True

    def __init__(self, width: int, config: GateSizes, scores: int = 1) -> None:
        super().__init__(width, config, scores)
        hidden = config.gate_hidden or default_hidden(width)
        self.hidden = MixedLinear(width, hidden)
        self.score = ScoreHead(hidden, scores)

    def forward(self, a: Tensor) -> GateOutput:  # [B, T, d] -> scores [B, T]
        return {"scores": self.score(F.silu(self.hidden(a)))}

    def for_decoding(self, dtype: torch.dtype) -> TensorMap:
        weight, bias = self.hidden.cast(dtype)
        score = self.score.for_decoding()
        return lambda a: score(F.silu(F.linear(a, weight, bias)))

    def score_maps(self) -> ScoreMaps:
        return ScoreMaps(
            self.hidden.weight, self.hidden.bias, self.score.weight.squeeze(0), self.score.bias
        )

    def fit(self, a_Nd: Tensor, y_N: Tensor, seed: int, always_Sd: Tensor | None = None) -> None:
        """In closed form (`fit_scores`, from random directions),
        then by `_STEPS` steps of gradient descent."""
        fit_scores(self.hidden, self.score, a_Nd, y_N, seed, always_Sd)
        apart = always_Sd is not None and self.hidden.out_features > 1
        units = self.hidden.out_features - apart
        refine_scores(self.hidden, self.score, a_Nd, y_N, seed, _STEPS, units)


class JEPAGate(Deriving, Gate):
    """G3: predict the outcome of both paths in a small latent space, then score the difference.

        c = W_c sg(a) + b
        q_x = P([c; e_x]) for x in (full, cheap)
        u = D([q_full, q_cheap, q_full - q_cheap])

    `P` and `D` are Linear, SiLU, Linear with hidden width `summary_dim`.
    """

    outputs = ("q_full", "q_cheap")
    sizes = ("context_dim", "summary_dim", "action_dim")
    predicts_outcomes = True

    def __init__(self, width: int, config: GateSizes, scores: int = 1) -> None:
        super().__init__(width, config, scores)
        summary = config.summary_dim
        self.context = MixedLinear(width, config.context_dim)
        self.actions = nn.Embedding(2, config.action_dim)  # row 0: full, row 1: cheap
        self.predict_hidden = MixedLinear(config.context_dim + config.action_dim, summary)
        self.predict = MixedLinear(summary, summary)
        self.decide_hidden = MixedLinear(3 * summary, summary)
        self.score = ScoreHead(summary)

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.normal_(self.actions.weight, generator=generator)
        super().reset_parameters(generator)

    def weights_per_token(self) -> int:
        """As in the other gates, with the predictor once per action, as its study counts.

        Inference folds what depends on the action alone, and the difference, and multiplies with
        about a third less.
        """
        again = self.predict_hidden.weight.numel() + self.predict.weight.numel()
        return super().weights_per_token() + again

    # [B, T, d] -> scores [B, T], q [B, T, summary_dim]
    def forward(self, a: Tensor) -> GateOutput:
        context_map, offsets, decide, decide_bias = self._parts(a)
        # [B, T, 2, summary_dim]
        q = self.predict(F.silu(self._shared(a.detach(), context_map) + offsets))
        q_full, q_cheap = q.unbind(-2)
        compared = F.linear(q.flatten(-2), decide.to(q.dtype), decide_bias.to(q.dtype))
        return {"scores": self.score(F.silu(compared)), "q_full": q_full, "q_cheap": q_cheap}

    def for_decoding(self, dtype: torch.dtype) -> TensorMap:
        parts = [part.to(dtype) for part in self._parts(self.actions.weight.detach())]
        context_map, offsets, decide, decide_bias = parts
        context, context_bias = self.context.cast(dtype)
        predict, predict_bias = self.predict.cast(dtype)
        score = self.score.for_decoding()

        def scores(a: Tensor) -> Tensor:
            shared = F.linear(F.linear(a, context, context_bias), context_map)[..., None, :]
            q = F.linear(F.silu(shared + offsets), predict, predict_bias)
            return score(F.silu(F.linear(q.flatten(-2), decide, decide_bias)))

        return scores

    def _shared(self, x: Tensor, context_map: Tensor) -> Tensor:
        """The context's part of P's first map, the same for both actions:
        `[B, T, d] -> [B, T, 1, summary_dim]`."""
        if not self.training:
            return F.linear(self.context(x), context_map.to(x.dtype))[..., None, :]
        # No nonlinearity in between: over the many tokens of a training batch, one map is cheaper
        # than two.
        with torch.autocast(x.device.type, enabled=False):
            weight = context_map @ self.context.weight
            bias = context_map @ self.context.bias
        return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))[..., None, :]

    def _parts(self, a: Tensor) -> tuple[Tensor, ...]:
        """The maps with the action embeddings folded in, for input like `a`.

        Returns:
            The context's part of P's first map; the actions' part, `[2, summary_dim]`, row 0 full,
            row 1 cheap; D's first map, linear in the difference:
            `W1 q_full + W2 q_cheap + W3 (q_full - q_cheap)`, and its bias.
        """
        predict = self.predict_hidden
        decide = self.decide_hidden
        actions = self.actions.weight
        autocast = torch.is_autocast_enabled(a.device.type)
        casts = not (autocast or self.training or torch.is_grad_enabled())

        def made() -> tuple[Tensor, ...]:
            sizes = [self.context.out_features, actions.shape[1]]
            context_map, action_map = predict.weight.split(sizes, dim=1)
            w1, w2, w3 = decide.weight.chunk(3, dim=1)
            offsets = F.linear(actions, action_map, predict.bias).to(a.dtype)
            parts = context_map, offsets, torch.cat([w1 + w3, w2 - w3], dim=1), decide.bias
            if casts:
                return tuple(part.to(a.dtype) for part in parts)
            return parts

        weights = predict.weight, predict.bias, actions, decide.weight, decide.bias
        return self.derived(made, a.dtype, *weights, keeps=not autocast)


class LinearGate(Gate):
    """Router-Tuning: `u = W x`, one row, no bias.

    Starts at `p = 1/2`, which is dense where the threshold is 0.
    """

    has_bias = False
    scores_experts = True
    default_threshold: ClassVar[float | None] = 0.0
    default_selection = "threshold"
    default_temperature = 1.0

    def __init__(self, width: int, config: GateSizes, scores: int = 1) -> None:
        super().__init__(width, config, scores)
        self.score = ScoreHead(width, scores, bias=self.has_bias)

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.score.weight)

    def for_decoding(self, dtype: torch.dtype) -> TensorMap:
        return self.score.for_decoding()

    def score_maps(self) -> ScoreMaps:
        return ScoreMaps(self.score.weight, self.score.bias)

    def forward(self, a: Tensor) -> GateOutput:  # [B, T, d] -> scores [B, T], or [B, T, E]
        return {"scores": self.score(a)}


class AffineGate(LinearGate):
    """`u = W x + b`, one row: the linear gate with a bias,
    so that scores of several layers can be compared.

    It follows the budget like the MLP gate.
    """

    has_bias = True
    scores_experts = False
    default_threshold = None
    default_selection = "topk"
    default_temperature = 2.0
    is_fitted = True

    def reset_parameters(self, generator: torch.Generator) -> None:
        reset_linear(self.score, generator)

    @torch.no_grad()
    def fit(self, a_Nd: Tensor, y_N: Tensor, seed: int, always_Sd: Tensor | None = None) -> None:
        """Ridge regression of `y`, in closed form.

        The tokens that have to run in full are rows with a `y` of 30, which weigh a tenth of the
        others together.
        """
        rows = [(a_Nd, y_N, 1.0)]
        if always_Sd is not None:
            share = float(0.1 * count_of_all(a_Nd) / count_of_all(always_Sd))
            rows.append((always_Sd, y_N.new_full((len(always_Sd),), 30.0), share))
        x = torch.cat([F.pad(part, (0, 1), value=1.0) * weight**0.5 for part, _, weight in rows])
        y = torch.cat([part * weight**0.5 for _, part, weight in rows])
        weights = ridge_weights(*moments(x, y[:, None]), 1e-3).squeeze(1)
        self.score.weight.copy_(weights[:-1])
        self.score.bias.copy_(weights[-1])


class HaltingGate(Gate):
    """TSA: the score is minus the halting logit, `u = -(W2 ReLU(W1 h + b1) + b2)`.

    `b2 = -1`: it starts active.
    """

    sizes = ("gate_hidden",)
    called = "the halting gate"
    targets = ("block",)
    granularities = ("token",)
    selections = ("soft",)
    default_selection = "soft"
    default_threshold = 0.0
    default_temperature = 1.0
    reads = "residual"
    spares_layer_0 = True
    scales_sublayers = True

    def __init__(self, width: int, config: GateSizes, scores: int = 1) -> None:
        super().__init__(width, config, scores)
        hidden = config.gate_hidden or max(16, width // 4)
        self.hidden = MixedLinear(width, hidden)
        self.score = ScoreHead(hidden)

    def reset_parameters(self, generator: torch.Generator) -> None:
        super().reset_parameters(generator)
        nn.init.constant_(self.score.bias, -1.0)

    def forward(self, a: Tensor) -> GateOutput:  # [B, T, d] -> scores [B, T]
        return {"scores": -self.score(F.relu(self.hidden(a)))}


GATES: dict[str, type[Gate]] = {
    "mlp": MLPGate,
    "jepa": JEPAGate,
    "linear": LinearGate,
    "affine": AffineGate,
    "halting": HaltingGate,
    "bottleneck": BottleneckGate,
    "random": RandomGate,
    "exit": ExitGate,
    "sinks": SinkGate,
    "none": StaticGate,
    "memory": MemoryGate,
}


class TargetProjection(nn.Linear):
    """`T: d -> summary_dim`, orthogonal, without bias, frozen: `z = sg(T(h))`.

    One per adapter, for all its layers.
    """

    def __init__(self, width: int, summary_dim: int) -> None:
        super().__init__(width, summary_dim, bias=False)
        self.weight.requires_grad_(False)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        if generator is not None:  # nn.Linear's own constructor calls this without one
            nn.init.orthogonal_(self.weight, generator=generator)

    @torch.no_grad()
    def forward(self, h: Tensor) -> Tensor:  # [B, T, d] -> [B, T, summary_dim]
        weight: Any = self.weight
        # FSDP has it sharded again outside the layer that owns it.
        if hasattr(weight, "full_tensor"):
            weight = weight.full_tensor()
        return F.linear(h.detach(), weight.to(h))  # a split model may hold it on another device
