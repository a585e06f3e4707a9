"""A cheap branch from the FFN's own neurons: some columns of the intermediate,
and an output of its own.

With the FFN `W_down (act(W_gate x) * W_up x)` and `S` the neurons that matter most, the branch is

    FFN_cheap(x) = W (act(W_gate[S] x) * W_up[S] x) + b

and without `W_up` of an FFN that has none.

Which neurons a token needs is the question of "MoEfication: Transformer Feed-forward Layers are
Mixtures of Experts" (arXiv:2110.01786); here they are the same for every token, and least squares
makes up for the others.

Shapes: N rows, d model width, m width of the FFN, r neurons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.distributed import total
from ..base.intermediate import intermediate_of, is_readable_linear, output_weight
from ..base.readable import is_watched, is_whole
from .branches import Deriving, MixedLinear, TensorMap, rms_of

NEURONS = ".neurons"  # the end of a branch's key of the indices, in a state dict
_COMPUTES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_READ = 4096  # rows that tell which neurons matter
_ROWS = 2048  # of the whole intermediate that exist at one time


class NeuronBranch(Deriving):
    """The branch.

    It holds which neurons it has and the output `W`, `b`; the rest are rows of the base's own
    weights.

    Where the base's weights cannot be read directly (quantised, offloaded, hooked, under LoRA:
    `is_readable`), the base's projections are called for the whole intermediate: the result is the
    same, and nothing is saved. The base's norm before the FFN, if it has one, and its FFN stay the
    base's: neither is a child of the branch. `width` is `d`, `count` `r`.
    """

    def __init__(self, norm: nn.Module | None, ffn: nn.Module, width: int, count: int) -> None:
        super().__init__()
        self._base: tuple[Any, Any] = (norm, ffn)
        form = intermediate_of(ffn)
        assert form is not None
        self._form = form
        self.neurons: Tensor
        self.register_buffer("neurons", torch.arange(count))
        self.down = MixedLinear(count, width)

    def sources(self) -> tuple[nn.Module, ...]:
        """The base's norm, if any, and FFN."""
        return tuple(module for module in self._base if module is not None)

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, a: Tensor) -> Tensor:  # [..., d] -> [..., d]
        return self.down(self.features(self.normed(a)).to(a.dtype))

    def normed(self, a: Tensor) -> Tensor:  # [..., d] -> [..., d]
        norm = self._base[0]
        return a if norm is None else norm(a)

    def features(self, x: Tensor) -> Tensor:  # [..., d] -> [..., r]
        if not self._may_read(x.device):
            return self.whole(x)[..., self.neurons]
        weight, bias = self.rows()
        projected = F.linear(x.to(weight.dtype), weight, bias)
        return self._activated(projected.chunk(self._form.parts, -1))

    def for_decoding(self, dtype: torch.dtype) -> TensorMap:
        """The branch for decoding, `[B, 1, d] -> [B, 1, d]`,
        from what `borrowed` names as it is now.

        Where nothing may be read, it is the branch itself, which looks at the base in every step.
        """
        held = self.borrowed()
        weights = [weight for module in held[1:] for weight in module.parameters(False)]
        if not held or any(weight.dtype is not dtype for weight in weights):
            return self
        return NeuronStep(self, dtype)

    def borrowed(self) -> list[nn.Module]:
        """The base's norm, projections and FFN, if a step on a CPU may read their weights.

        There is none for an FFN that does not multiply its activation.
        """
        norm, ffn = self._base
        read = [*self._maps(), self.output()]
        readable = self._may_read(torch.device("cpu")) and is_readable_linear(self.output())
        if not readable or self._form.parts != 2:
            return []
        if any(linear.weight.is_inference() for linear in read):
            return []
        if rms_of(norm) is None or is_watched(norm) or is_watched(ffn):
            return []
        return [norm, *read, ffn]

    def rows(self) -> tuple[Tensor, Tensor | None]:
        """Copies of the base's weights of the chosen neurons, `[2 r, d]`,
        or without a gate `[r, d]`; and of biases."""
        maps = self._maps()
        weights = [linear.weight for linear in maps]
        biases = [linear.bias for linear in maps]

        def made() -> tuple[Tensor, Tensor | None]:
            chosen = [self.chosen(linear, linear.weight) for linear in maps]
            weight = torch.cat([rows for of_map in chosen for rows in of_map])
            if biases[0] is None:
                return weight, None
            chosen = [self.chosen(linear, linear.bias) for linear in maps]
            return weight, torch.cat([rows for of_map in chosen for rows in of_map])

        return self.derived(made, "rows", *weights, *biases, self.neurons)

    def chosen(self, projection: nn.Module, values: Tensor) -> list[Tensor]:
        """The chosen neurons' rows of a projection's weight or bias,
        once for each of the maps in it."""
        return [rows[self.neurons] for rows in self._form.split(projection, values)]

    def reads(self) -> tuple[nn.Module | None, list[Any], Any]:
        """The base's norm in front, its projections into the intermediate, and its activation."""
        norm, ffn = self._base
        return norm, self._maps(), ffn._modules[self._form.activation]

    def output(self) -> Any:
        """The FFN's projection from the intermediate."""
        return self._base[1]._modules[self._form.output]

    def _maps(self) -> list[Any]:
        """The projections into the intermediate, the one before the activation first."""
        return self._form.maps(self._base[1])

    def _activated(self, projected: Sequence[Tensor]) -> Tensor:
        """The intermediate from the outputs of the maps into it."""
        first, *others = projected
        hidden: Tensor = self._base[1]._modules[self._form.activation](first)
        return hidden * others[0] if others else hidden

    def _may_read(self, device: torch.device) -> bool:
        """Whether the weights of the projections may be read there, as one."""
        maps = self._maps()
        if not all(is_readable_linear(part) and part.weight.device == device for part in maps):
            return False
        return len({(linear.weight.dtype, linear.bias is None) for linear in maps}) == 1

    def borrowed_weights(self) -> int:
        """Weights of the base that one token is multiplied with."""
        return self._form.parts * len(self.neurons) * self.down.out_features

    @torch.no_grad()
    def energy(self, x_Nd: Tensor, weight_N: Tensor, metric_dd: Tensor | None = None) -> Tensor:
        """`sum_n weight_n h_nj^2 |W_down[:, j] L|^2` of every neuron of the FFN, `[m]`;
        of many rows, some are read.

        Without a metric `L`, which says what an error costs, it is the identity.
        """
        step = max(1, len(x_Nd) // _READ)
        x_Nd = x_Nd[::step]
        weight_N = weight_N[::step]
        parts = zip(x_Nd.split(_ROWS), weight_N.split(_ROWS))
        sums = (w @ self.whole(x).float().square() for x, w in parts)
        energy_m = total(sum(sums, torch.zeros(())))
        output_md = self.outputs(torch.arange(len(energy_m), device=x_Nd.device))
        if metric_dd is not None:
            output_md = output_md @ metric_dd.to(output_md)
        return energy_m * output_md.square().sum(1).to(energy_m)

    @torch.no_grad()
    def choose(self, energy_m: Tensor) -> None:
        """Take the neurons with the most energy."""
        self.neurons.copy_(energy_m.topk(len(self.neurons)).indices.sort().values)
        self.forget()

    @torch.no_grad()
    def outputs(self, neurons_r: Tensor) -> Tensor:
        """The FFN's own output of each of these neurons alone, float32 `[r, d]`."""
        down = self.output()
        plain = is_readable_linear(down) and is_whole(down.weight)
        if plain and down.weight.device == neurons_r.device:
            return output_weight(down)[:, neurons_r].T.float()
        count = neurons_of(self._base[1])
        assert count is not None
        units_rm = F.one_hot(neurons_r, count).to(self._dtype_of(self.down.weight))
        return (down(units_rm) - down(torch.zeros_like(units_rm[:1]))).float()

    @torch.no_grad()
    def input_weights(self) -> list[tuple[Tensor, Tensor]]:
        """Weight `[r, d]` and bias `[r]`, float32, of the chosen neurons in each map into the
        intermediate, by calls of the base's projections: they may be packed or elsewhere."""
        width = self.down.out_features
        points = torch.eye(width + 1, width, device=self.neurons.device)  # the last row is zero
        points = points.to(self._dtype_of(points))
        found = []
        for linear in self._maps():
            for given in self._form.given(linear, points):
                chosen = given[:, self.neurons].float()
                found.append(((chosen[:-1] - chosen[-1]).T, chosen[-1]))
        return found

    def whole(self, x: Tensor) -> Tensor:  # [..., d] -> [..., m]
        """The whole intermediate, by calls of the base's modules."""
        x = x.to(self._dtype_of(x))
        given = [self._form.given(linear, x) for linear in self._maps()]
        return self._activated([part for parts in given for part in parts])

    def _dtype_of(self, x: Tensor) -> torch.dtype:
        """The dtype that the FFN computes in, or the norm in front where the FFN's weights are
        packed; that of `x` where neither says."""
        held = (p.dtype for module in reversed(self.sources()) for p in module.parameters())
        return next((dtype for dtype in held if dtype in _COMPUTES), x.dtype)

    def has(self, neurons_r: Tensor) -> bool:
        """Whether the FFN has such neurons; waits for the device."""
        return bool(((neurons_r >= 0) & (neurons_r < (neurons_of(self._base[1]) or 0))).all())


class NeuronStep:
    """A branch that has something `borrowed` in decoding, with copies of the base's rows:
    `[B, 1, d] -> [B, 1, d]`, in few operators.

    The stream and the base's weights are of one dtype.
    """

    def __init__(self, branch: NeuronBranch, dtype: torch.dtype) -> None:
        self._norm, _, self._activation = branch.reads()
        self._branch = branch
        weight, self._eps = cast("tuple[Tensor, float]", rms_of(self._norm))
        self._scale = weight.detach().float()
        self._shape = weight.shape
        self._neurons = branch.neurons
        self._weight, self._bias = branch.rows()
        self._down, self._down_bias = branch.down.cast(dtype)

    def __call__(self, a: Tensor) -> Tensor:
        x = F.rms_norm(a.float(), self._shape, self._scale, self._eps).to(a.dtype)
        gate, up = F.linear(x, self._weight, self._bias).chunk(2, -1)
        return F.linear(self._activation(gate) * up, self._down, self._down_bias)

    def both(self, a: Tensor, index: Tensor) -> Tensor:
        """The FFN's update at the rows in `index`, the branch's at the others, `[B, 1, d]`.

        The neurons are columns of the FFN's intermediate, which is computed for every row: while
        rows are few, reading the weights is what takes the time, and those of the FFN are read for
        the rows in `index` anyway.
        """
        hidden = self._branch.whole(self._branch.normed(a))
        cheap = F.linear(hidden.index_select(-1, self._neurons), self._down, self._down_bias)
        full = self._branch.output()(hidden.index_select(0, index))
        return cheap.index_copy_(0, index, full)


def neurons_of(ffn: nn.Module) -> int | None:
    """The width `m` of an FFN that the branch can take neurons of; None for any other."""
    form = intermediate_of(ffn)
    if form is None:
        return None
    return form.width(ffn)
