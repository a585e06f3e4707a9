"""A gate and a branch that read the same RMS norm, fused: their first maps are one product,
for decoding on a CPU.

With `x / rms(x)` before both, norms with weights `v` and `w` fold into the maps that follow:

    y = [W_gate diag(v); W_up diag(w)] x / rms(x) + b
    u = w2 . SiLU(y_gate) + b2
    cheap = W_down SiLU(y_up)

One operator less is worth more than the bytes of float32 weights at the widths where a step is
short. Rounding differs from that of the maps one by one. A branch of neurons has many rows and
stays apart: the gate alone is folded then.

Shapes: B batch, d model width, g rows of the gate, r branch rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .branches import LowRankBranch, RMSNorm, TensorMap
from .gate import Gate, ScoreMaps
from .neurons import NeuronBranch, NeuronStep

SHARED_ROWS = 16  # with more of them, a whole intermediate takes longer than reading its weights


class FusedGateBranch:
    """Scores and cheap updates of one new token per sequence, in float32,
    from copies of the weights as they are now.

    Args:
        scale: The weight of the norm that the gate reads, `[d]`.
        eps: The epsilon of both norms.
        gate: What the gate multiplies a token with.
        branch: None if the cheap path adds nothing, or is `neurons`.
        neurons: A branch that has a norm and maps of its own.
    """

    def __init__(
        self,
        scale: Tensor,
        eps: float,
        gate: ScoreMaps,
        branch: LowRankBranch | None,
        neurons: NeuronStep | None = None,
    ) -> None:
        self._neurons = neurons
        width = gate.weight.shape[1]
        self._eps = width * eps
        self._eps_111 = scale.new_full((1, 1, 1), width * eps, dtype=torch.float32)
        self._activated = gate.out is not None
        self._split = len(gate.weight)
        rows = [gate.weight.float() * scale.float()]
        biases = [_or_zeros(gate.bias, gate.weight)]
        self._down: tuple[Tensor, Tensor] | None = None
        if branch is not None:
            up = branch.up
            down = branch.down
            assert isinstance(branch.norm, RMSNorm)
            rows.append(up.weight.float() * branch.norm.weight.float())
            biases.append(_or_zeros(up.bias, up.weight))
            self._down = _copied(down.weight), _or_zeros(down.bias, down.weight)
        # With the root of d in the weights, the sum of squares stands for their mean.
        self._weight = (torch.cat(rows) * width**0.5).detach().contiguous()
        self._bias = torch.cat(biases).detach()
        self._out = None
        if gate.out is not None:
            self._out = _copied(gate.out)
        self._out_bias = 0.0
        if gate.out_bias is not None:
            self._out_bias = float(gate.out_bias)

    def run(
        self,
        a: Tensor,
        threshold: float | Sequence[float],
        ffn: TensorMap,
        normed: Tensor | None = None,
    ) -> tuple[Tensor, list[int]]:
        """The stream after the FFN at the rows whose score reaches `threshold`,
        after the branch at the others.

        Args:
            a: Before the FFN, `[B, 1, d]`; it may be overwritten.
            threshold: Below it a row is skipped; one for all rows, or one for each.
            ffn: From rows of `normed` to the update, `[n, 1, d] -> [n, 1, d]`.
            normed: What the FFN reads, `[B, 1, d]`; by default `a`, and `ffn` has its norm in it.

        Returns:
            The stream, `[B, 1, d]`, and the rows that ran the FFN.
        """
        scores, maps = self.scores(a)
        read = a if normed is None else normed
        bars = threshold
        if isinstance(bars, float):
            bars = [bars] * len(scores)
        chosen = [row for row, score in enumerate(scores) if score >= bars[row]]
        if len(chosen) == len(scores):
            return a + ffn(read), chosen
        if self._neurons is not None and chosen and len(scores) <= SHARED_ROWS:
            return a.add_(self._neurons.both(a, _index_of(tuple(chosen)))), chosen
        update = self.cheap(maps, a)
        if not chosen:
            return a if update is None else a.add_(update), chosen
        index = _index_of(tuple(chosen))
        full = ffn(read.index_select(0, index))
        if update is None:
            return a.index_add_(0, index, full.to(a.dtype)), chosen
        return a.add_(update.index_copy_(0, index, full.to(update.dtype))), chosen

    def scores(self, a: Tensor) -> tuple[list[float], Tensor]:
        """The score of every row of `a`, `[B, 1, d]`, on the host; and what `cheap` reads,
        float32 `[B, g + r]`."""
        x = a.view(-1, a.shape[-1]).float()
        # Three calls without a matrix, whose operators cost more than their arithmetic.
        if len(x) == 1:
            row = x.view(-1)
            squares = torch.dot(row, row).item()
            # NaN, as a norm gives.
            scale = math.nan
            if squares < math.inf:
                scale = (squares + self._eps) ** -0.5
            y = torch.addmv(self._bias, self._weight, row, alpha=scale)[None]
        else:
            squares_B11 = torch.baddbmm(self._eps_111, x[:, None], x[..., None])
            y = torch.addmm(self._bias, x * squares_B11.rsqrt_().squeeze(-1), self._weight.t())
        F.silu(y if self._activated else y[:, self._split :], inplace=True)
        if self._out is None:
            return y[:, 0].tolist(), y
        hidden = y[:, : self._split]
        if len(y) == 1:
            found = [torch.dot(hidden[0], self._out).item()]
        else:
            found = torch.mv(hidden, self._out).tolist()
        return [score + self._out_bias for score in found], y

    def cheap(self, y: Tensor, a: Tensor) -> Tensor | None:
        """The branch's updates, `[B, 1, d]`, from what `scores` returned for `a`;
        None without a branch."""
        if self._neurons is not None:
            return self._neurons(a)
        if self._down is None:
            return None
        weight, bias = self._down
        hidden = y[:, self._split :]
        if len(y) == 1:
            return torch.addmv(bias, weight, hidden[0]).view(1, 1, -1)
        return torch.addmm(bias, hidden, weight.t())[:, None]


def fuse(
    rms: tuple[Tensor, float] | None, gate: Gate, branch: nn.Module | None, dtype: torch.dtype
) -> FusedGateBranch | None:
    """The maps of a gate and of a branch as one; None if they are not of the kind that fuses.

    `rms` is the `branches.rms_of` the norm that the gate reads, `dtype` the stream's.
    """
    maps = gate.score_maps()
    if rms is None or maps is None:
        return None
    if branch is None:
        return FusedGateBranch(*rms, maps, None)
    if isinstance(branch, NeuronBranch):
        step = branch.for_decoding(dtype)
        if isinstance(step, NeuronStep):
            return FusedGateBranch(*rms, maps, None, step)
        return None
    if type(branch) is not LowRankBranch or not isinstance(branch.norm, RMSNorm):
        return None
    if branch.norm.eps != rms[1]:
        return None
    return FusedGateBranch(*rms, maps, branch)


def _copied(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.float32, copy=True)


def _or_zeros(bias: Tensor | None, weight: Tensor) -> Tensor:
    if bias is None:
        return weight.new_zeros(len(weight), dtype=torch.float32)
    return _copied(bias)


@functools.lru_cache(maxsize=1024)
def _index_of(rows: tuple[int, ...]) -> Tensor:
    """Made once: a tensor from a list takes as long as a small product."""
    return torch.tensor(rows, device="cpu")
