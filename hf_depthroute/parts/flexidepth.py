"""The gate and the branch of FlexiDepth: "Adaptive Layer-skipping in Pre-trained LLMs"
(arXiv:2503.23798).

With the norms of the base's layer `LN1` (before the attention) and `LN2` (before the FFN):

    u = W_head W_dec tanh(RMSNorm(W_enc LN1(h)));   p = sigmoid(u)
    p > 1/2:   a = h + attention(LN1(h));   h <- a + p FFN(LN2(a))
    else:      h <- h + (1 - p) W_down (SiLU(W_gate y) * W_up y),   y = LN2(h)

The keys and values of every token are written. The paper leaves the order of norm and tanh, and
what `p` multiplies, to its code; here both are as the published checkpoint
(xuan-luo/FlexiDepth-Llama-3-8B-Instruct) needs them.

Shapes: B batch, T positions, d model width, b bottleneck width, r branch width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.intermediate import SILU, intermediate_of
from .branches import LowRankBranch, MixedLinear, RMSNorm, TensorMap, reset_linear
from .gate import Gate, GateOutput, GateSizes, ScoreHead, default_hidden
from .neurons import NeuronBranch

EPSILON = 1e-5  # of the gate's norm, as in Llama 3
_REDUCTION = 16  # of the model's width in the bottleneck, of the FFN's in the branch


class BottleneckGate(Gate):
    """`u = W_head W_dec tanh(RMSNorm(W_enc x))`, with a bottleneck of `d/16` by
    default and no biases.

    `p` multiplies the FFN's update of a token that runs, `1 - p` the branch's of one that does not:
    so the language-model loss reaches the gate.
    """

    sizes = ("gate_hidden",)
    hidden_divisor = _REDUCTION
    called = "the bottleneck gate"
    targets = ("block",)
    granularities = ("token",)
    selections = ("threshold", "topk", "controller")
    default_selection = "threshold"
    default_temperature = 1.0
    # The reference asks for p > 1/2, and float32's sigmoid(u) is 1/2 below it.
    default_threshold = 1e-7
    reads = "normed"
    scales_ffn = True

    def __init__(self, width: int, config: GateSizes, scores: int = 1) -> None:
        super().__init__(width, config, scores)
        hidden = config.gate_hidden or default_hidden(width, _REDUCTION)
        self.enc = MixedLinear(width, hidden, bias=False)
        self.norm = RMSNorm(nn.Parameter(torch.ones(hidden)), EPSILON)
        self.dec = MixedLinear(hidden, width, bias=False)
        self.score = ScoreHead(width, scores, bias=False)

    def forward(self, a: Tensor) -> GateOutput:  # [B, T, d] -> scores [B, T]
        return {"scores": self.score(self.dec(torch.tanh(self.norm(self.enc(a))).to(a.dtype)))}

    def for_decoding(self, dtype: torch.dtype) -> TensorMap:
        # No nonlinearity lies between the last two maps: they become one vector `[b]`.
        weight, _ = self.enc.cast(dtype)
        score = self.score.weight.detach().float().squeeze(0)
        row = torch.mv(self.dec.weight.detach().float().t(), score)
        norm = self.norm.for_decoding()
        return lambda a: torch.mv(torch.tanh(norm(F.linear(a, weight))).view(-1, len(row)), row)


class SwiGLUBranch(LowRankBranch):
    """`W_down (SiLU(W_gate y) * W_up y)` with `y = LN(a)`: a small FFN,
    by default a sixteenth of the base's.

    Arguments and start are those of `LowRankBranch`; `copy_neurons` is another start.
    """

    def __init__(
        self, norm: nn.Module, width: int, rank: int, bias: bool, copy_values: bool = True
    ) -> None:
        super().__init__(norm, width, rank, bias, copy_values)
        self.gate = MixedLinear(width, rank, bias=bias)

    def reset_parameters(self, generator: torch.Generator) -> None:
        super().reset_parameters(generator)
        reset_linear(self.gate, generator)

    @torch.no_grad()
    def copy_neurons(self, neurons: NeuronBranch) -> None:
        """Begin as these neurons of a SwiGLU FFN, with input weights of its own from now on."""
        for linear, (weight, bias) in zip((self.gate, self.up), neurons.input_weights()):
            linear.weight.copy_(weight)
            if linear.bias is not None:
                linear.bias.copy_(bias)

    def hidden(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)

    def for_decoding(self, dtype: torch.dtype) -> TensorMap:
        gate, gate_bias = self.gate.cast(dtype)
        up, up_bias = self.up.cast(dtype)
        down, down_bias = self.down.cast(dtype)
        norm = self.norm_for_decoding()

        def update(a: Tensor) -> Tensor:
            y = norm(a).to(dtype)
            hidden = F.silu(F.linear(y, gate, gate_bias)) * F.linear(y, up, up_bias)
            return F.linear(hidden, down, down_bias)

        return update


def has_swiglu(ffn: nn.Module) -> bool:
    """Whether an FFN's neurons are those of a SwiGLU branch: `SiLU(W_gate y) * W_up y`."""
    form = intermediate_of(ffn)
    return form is not None and form.parts == 2 and isinstance(ffn._modules[form.activation], SILU)


def default_width(ffn_width: int) -> int:
    """`r` where none is configured: a sixteenth of the FFN's width, as in arXiv:2503.23798."""
    return max(1, ffn_width // _REDUCTION)
