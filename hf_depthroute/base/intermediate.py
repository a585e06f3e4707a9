"""How an FFN makes its intermediate, and the output from it: one table row per form.

Shapes: d model width, m width of the intermediate, n what a projection gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from .readable import is_readable

SILU = (nn.SiLU, type(ACT2FN["silu"]))
# A linear map of transformers' own, which computes what `nn.Linear` does.
_FALCON = "transformers.models.falcon.modeling_falcon.FalconLinear"


@dataclass(frozen=True)
class Intermediate:
    """The names of an FFN's modules.

    Args:
        projections: Into the intermediate; the one before the activation first, then the one that
            it is multiplied with, if any.
        activation: Between the two.
        output: From the intermediate.
        fused: Whether one projection gives both, one behind the other.
    """

    projections: tuple[str, ...]
    activation: str
    output: str
    fused: bool = False

    @property
    def in_each(self) -> int:
        """Maps that one projection makes."""
        return 2 if self.fused else 1

    @property
    def parts(self) -> int:
        """Maps into the intermediate: 2 where the activation is multiplied, otherwise 1."""
        return self.in_each * len(self.projections)

    @property
    def names(self) -> set[str]:
        """The names of all of them."""
        return {*self.projections, self.activation, self.output}

    def maps(self, ffn: nn.Module) -> list[Any]:
        """The projections."""
        return [ffn._modules[name] for name in self.projections]

    def split(self, projection: nn.Module, values: Tensor) -> tuple[Tensor, ...]:
        """The weight `[n, d]`, or a bias `[n]`, of each of the maps that a projection makes,
        from its parameter, whose weight GPT-2 has the other way round."""
        if values.ndim == 2 and isinstance(projection, Conv1D):
            values = values.T
        return values.chunk(self.in_each)

    def given(self, projection: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        """The output of each of its maps, `[..., d] -> [..., m]`; the projection is called."""
        made: Tensor = projection(x)
        return made.chunk(self.in_each, dim=-1)

    def width(self, ffn: nn.Module) -> int | None:
        """`m`; None if the projection does not say."""
        first: Any = ffn._modules[self.projections[0]]
        count = getattr(first, "out_features", getattr(first, "nf", None))
        if count is None:
            return None
        return int(count) // self.in_each


FORMS = (
    Intermediate(("gate_proj", "up_proj"), "act_fn", "down_proj"),  # Llama and most others
    Intermediate(("up_proj",), "act_fn", "down_proj"),  # Nemotron
    Intermediate(("gate_up_proj",), "activation_fn", "down_proj", fused=True),  # Phi-3, GLM
    Intermediate(("c_fc",), "act", "c_proj"),  # GPT-2, StarCoder 2
    Intermediate(("dense_h_to_4h",), "act", "dense_4h_to_h"),  # GPT-NeoX, Falcon
    Intermediate(("fc1",), "activation_fn", "fc2"),  # Phi
)


def intermediate_of(ffn: nn.Module) -> Intermediate | None:
    """The form of an FFN; None of a mixture and of any other."""
    names = ffn._modules.keys()
    return next((form for form in FORMS if form.names <= names), None)


def is_readable_linear(module: nn.Module) -> bool:
    """Whether the weights of a linear map may be read in place of a call."""
    kind = type(module)
    if f"{kind.__module__}.{kind.__qualname__}" == _FALCON:
        return is_readable(module, kind)
    return is_readable(module, nn.Linear, Conv1D)


def output_weight(output: Any) -> Tensor:
    """The weight `[d, m]` of a readable output projection."""
    weight: Tensor = output.weight
    return weight.T if isinstance(output, Conv1D) else weight
