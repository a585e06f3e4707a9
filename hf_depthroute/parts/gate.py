"""`Gate`: the base class of gates, and what a gate declares,
so that no other code compares their names.

And what gates share: their sizes, the float32 score head, and a gate as data.

Shapes: B batch, T positions, E experts, d model width, g rows of the gate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .branches import TensorMap, reset_linear

if TYPE_CHECKING:
    from ..base.lm_head import LMHead

GateOutput = dict[str, Tensor]


class GateSizes(Protocol):
    """The fields of `DepthRouteConfig` that gates read."""

    gate_hidden: int | None
    context_dim: int
    summary_dim: int
    action_dim: int


class ScoreMaps(NamedTuple):
    """A gate as `u = out . SiLU(weight x + bias) + out_bias`; without `out`,
    `u` is the one row of the first map.

    Attributes:
        weight: `[g, d]`.
        bias: `[g]`, or None.
        out: `[g]`, or None.
        out_bias: `[1]`, or None.
    """

    weight: Tensor
    bias: Tensor | None
    out: Tensor | None = None
    out_bias: Tensor | None = None


class ScoreHead(nn.Linear):
    """Float32 scores, also under autocast and over a bfloat16 model: `u = W x + b`,
    one per row of `W`."""

    def __init__(self, features: int, outputs: int = 1, bias: bool = True) -> None:
        super().__init__(features, outputs, bias=bias)

    # [..., features] -> [...], or [..., outputs] where several
    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self._score(x)
        return self._score(x)

    def _score(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        if self.out_features > 1:
            return F.linear(x.float(), self.weight.float(), bias)
        rows = x.float().reshape(-1, x.shape[-1])
        weight = self.weight.float().squeeze(0)
        if bias is None:
            return torch.mv(rows, weight).view(x.shape[:-1])
        # Not `len(rows)`: an exported program of any length must not take this one for the only
        # length.
        return torch.addmv(bias.expand(rows.shape[0]), rows, weight).view(x.shape[:-1])

    def for_decoding(self) -> TensorMap:
        """The one score of each row, `[B, 1, features] -> [B]`, with the present weights."""
        weight = self.weight.detach().float().squeeze(0)
        if self.bias is None:
            return lambda x: torch.mv(x.float().view(-1, x.shape[-1]), weight)
        bias = self.bias.detach().float()
        return lambda x: torch.addmv(bias, x.float().view(-1, x.shape[-1]), weight)


class Thresholds(nn.Module):
    """Numbers that scores are compared with: they go to the model's device, and keep their dtype
    where `model.to(dtype)` changes the model's. Rounded, they would decide otherwise."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def moved(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            return made if made.dtype is tensor.dtype else tensor.to(made.device)

        return super()._apply(moved, recurse)


def default_hidden(width: int, divisor: int = 4) -> int:
    """Hidden width of a gate by default; `d/4` in the MLP gate, as in arXiv:2604.17228."""
    return max(1, width // divisor)


class Gate(nn.Module, ABC):
    """From the residual stream to one score per token.

    A subclass overrides the declarations that are not its own.

    Args:
        width: `d`.
        config: The adapter's configuration.
        scores: How many scores a token gets: 1, or one per expert.

    Attributes:
        outputs: Names of its outputs besides the scores, kept in the trace.
        sizes: Fields of `DepthRouteConfig` that set how many weights it has.
        called: How messages name it.
        targets: The rows of `TARGETS` that it decides on; empty for all (of experts,
            `scores_experts` has a say too).
        granularities: What one of its decisions may cover, `"token"` or `"sequence"`; empty for
            both.
        scores_experts: Whether it can return one score per expert, `[B, T, E]`.
        selections: The rules that it can train with; empty for all.
        default_selection: The training rule where the configuration names none. Where tokens are
            not ranked (whole sequences, a global budget), `"threshold"` stands in for `"topk"`.
        default_threshold: The score that a token has to reach where the configuration names neither
            rule nor threshold; None: what the budget asks for.
        default_temperature: `tau` in `p = sigmoid(u / tau)`, where the configuration names none.
        reads: The `gate_input` that it always has; None for the configuration's.
        spares_layer_0: It never routes layer 0; where the configuration names no layers, it routes
            all others.
        static: It decides nothing: every token takes the cheap path, and the budget has no say.
        spares: Whom alone it lets run in full, in words, if nothing of it trains or is budgeted.
        exits: A token that takes the cheap path takes it in every later layer, too.
        reads_logits: `connect` gives it the final norm and the LM head.
        predicts_outcomes: It is trained on the outcomes of both paths, `z_full` and `z_cheap` in
            the trace, seen through a `TargetProjection`.
        soft: `p` weighs the two paths in inference, too: nothing is compared with a threshold, and
            no budget is held.
        scales_sublayers: `p` multiplies the update of each sublayer (arXiv:2605.05222), not that of
            the full path.
        scales_ffn: `p` multiplies the update of a block's FFN, for a token that runs, and `1 - p`
            the branch's, for one that does not; the attention's update is as it is
            (arXiv:2503.23798).
        is_fitted: `fit_router` can fit it, by its `fit`.
        hidden_divisor: The default of `gate_hidden` is the model's width divided by it.
    """

    outputs: ClassVar[tuple[str, ...]] = ()
    sizes: ClassVar[tuple[str, ...]] = ()
    called: ClassVar[str] = "the gate"
    targets: ClassVar[tuple[str, ...]] = ()
    granularities: ClassVar[tuple[str, ...]] = ()
    scores_experts: ClassVar[bool] = False
    selections: ClassVar[tuple[str, ...]] = ()
    default_selection: ClassVar[str] = "topk"
    default_threshold: ClassVar[float | None] = None
    default_temperature: ClassVar[float] = 2.0
    reads: ClassVar[str | None] = None
    spares_layer_0: ClassVar[bool] = False
    static: ClassVar[bool] = False
    spares: ClassVar[str] = ""
    exits: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = False
    predicts_outcomes: ClassVar[bool] = False
    soft: ClassVar[bool] = False
    scales_sublayers: ClassVar[bool] = False
    scales_ffn: ClassVar[bool] = False
    is_fitted: ClassVar[bool] = False
    hidden_divisor: ClassVar[int] = 4

    def __init__(self, width: int, config: object, scores: int = 1) -> None:
        super().__init__()

    def __init_subclass__(cls, **kwargs: object) -> None:
        """A subclass that scores in a way of its own does not decode in that of its parent."""
        super().__init_subclass__(**kwargs)
        if "forward" in vars(cls):
            for name in ("for_decoding", "score_maps"):
                if name not in vars(cls):
                    setattr(cls, name, getattr(Gate, name))

    @classmethod
    def follows_budget(cls) -> bool:
        """Whether a budget has a say: it is neither `static` nor one that `spares` some tokens."""
        return not (cls.static or cls.spares)

    @abstractmethod
    def forward(self, a: Tensor) -> GateOutput:
        """`"scores"`, float32 `[B, T]` or per expert `[B, T, E]`, of `a` `[B, T, d]`;
        and its `outputs` by name."""

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw the weights from `generator`; here, those of linear maps."""
        for linear in self.children():
            if isinstance(linear, nn.Linear):
                reset_linear(linear, generator)

    def weights_per_token(self) -> int:
        """Weights that one decision multiplies with, without biases; here, of linear maps."""
        return sum(part.weight.numel() for part in self.children() if isinstance(part, nn.Linear))

    def connect(self, lm_head: LMHead) -> None:
        """Take the model's `base.lm_head.LMHead`, where `reads_logits`."""

    def fit(self, a_Nd: Tensor, y_N: Tensor, seed: int, always_Sd: Tensor | None = None) -> None:
        """Fit the scores to `y` without training, where `is_fitted`.

        Args:
            a_Nd: The gate's input, float32.
            y_N: The scores to come close to, standardised.
            seed: Seed of whatever is drawn.
            always_Sd: The input of tokens that have to run in full, whatever their error.
        """
        raise NotImplementedError(f"{type(self).__name__} is not fitted")

    def for_decoding(self, dtype: torch.dtype) -> TensorMap:
        """The gate with its weights as they are now, in `dtype`: `[B, 1, d] -> [B]`,
        in as few operators as it can."""
        return lambda a: self(a)["scores"].view(-1)

    def score_maps(self) -> ScoreMaps | None:
        """The gate as data, for one score per token; None if it is not two linear maps with a SiLU
        between, or one."""
        return None
