"""Cheap branches: the update of a skipped token in place of the FFN's.

The low-rank branch with its own norm is that of "Revisiting Auxiliary Losses for Conditional Depth
Routing: An Empirical Study" (arXiv:2604.17228).

Shapes: N rows, d model width, r rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

import torch
import torch.nn.functional as F
from accelerate.utils import align_module_device
from torch import Tensor, nn

T = TypeVar("T")
TensorMap = Callable[[Tensor], Tensor]


class TransientCache(dict[Any, Any]):
    """A cache of what is computed from weights; copies and pickles of a model have it empty."""

    def __reduce__(self) -> tuple[type[TransientCache], tuple[()]]:
        return TransientCache, ()


def version_key(*tensors: Tensor | None) -> tuple[tuple[int, int], ...] | None:
    """Changes with a write that PyTorch counts; None if nothing may be kept.

    A write through `tensor.data`, by NumPy or by a fused optimizer is not counted. So what is kept
    serves one prompt and its generation (`Routing.forget_prepared`). Graphs of a compiler and
    captured ones read long after: they keep nothing.
    """
    if torch.compiler.is_compiling():
        return None
    marks = []
    for t in tensors:  # plain statements: this runs in every layer of a decoding step
        if t is not None:
            if t.is_inference() or (t.is_cuda and torch.cuda.is_current_stream_capturing()):
                return None
            marks.append((t.data_ptr(), t._version))
    return tuple(marks)


class Deriving(nn.Module):
    """A module that keeps, in inference, one thing that is made of its weights.

    It is made again when the weights change, for a new prompt, and after `train()` or `eval()`.
    """

    def __init__(self, *args: object, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.forget()

    def forget(self) -> None:
        """Keep nothing; another cache, so that a thread that makes something now keeps it in the
        one before."""
        self._derived = TransientCache()

    def train(self, mode: bool = True) -> Self:
        self.forget()
        return super().train(mode)

    def derived(
        self, make: Callable[[], T], kind: object, *tensors: Tensor | None, keeps: bool = True
    ) -> T:
        """`make()`, or what it was for this `kind` while `tensors` are the same;
        nothing stays unless it `keeps`."""
        if not keeps or self.training or torch.is_grad_enabled():
            return make()
        now = version_key(*tensors)
        if now is None:
            return make()
        kept = self._derived
        held = kept.get("made")  # with its stamp in one entry: threads share it
        if held is not None and held[0] == (kind, now):
            return cast(T, held[1])
        made = make()
        kept["made"] = (kind, now), made
        return made


class MixedLinear(Deriving, nn.Linear):
    """A linear map that computes in its input's dtype whatever dtype its weights are stored in.

    PEFT keeps trainable adapter weights in float32 over a bfloat16 base. Casting the weight instead
    of the input keeps the matmul in the base's dtype (several times faster on CPUs and GPUs), with
    float32 master weights.

    Inference keeps the cast weights: casting them in every step of a generation costs as much as
    multiplying with them.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        bias = self.bias
        if weight.dtype != x.dtype:
            weight, bias = self.cast(x.dtype)
        return F.linear(x, weight, bias)

    def cast(self, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """Weight and bias in `dtype`."""
        weight = self.weight
        bias = self.bias

        def made() -> tuple[Tensor, Any]:
            return weight.to(dtype), None if bias is None else bias.to(dtype)

        # A parametrized weight is none of the parameters.
        return self.derived(made, dtype, weight, bias, keeps="weight" in self._parameters)


class LowRankBranch(nn.Module):
    """`FFN_cheap(LN_cheap(a)) = W_down SiLU(W_up LN_cheap(a))`, with `W_down = 0` at first:
    an identity residual.

    Args:
        norm: The norm before the routed part, copied: same kind, same starting values, its own
            parameters.
        width: `d`.
        rank: `r`.
        bias: Whether the linear maps have a bias; they do when the base FFN's do.
        copy_values: False where nothing before the routed part is normed (post-norm layers): `norm`
            is the one after it, and only its kind is copied; the values start at one, a bias at
            zero.
    """

    def __init__(
        self, norm: nn.Module, width: int, rank: int, bias: bool, copy_values: bool = True
    ) -> None:
        super().__init__()
        self.norm = copy_norm(norm)
        if not copy_values:
            with torch.no_grad():
                for name, parameter in self.norm.named_parameters():
                    parameter.fill_(0.0 if name == "bias" else 1.0)
        self.up = MixedLinear(width, rank, bias=bias)
        self.down = MixedLinear(rank, width, bias=bias)

    def reset_parameters(self, generator: torch.Generator) -> None:
        reset_linear(self.up, generator)
        nn.init.zeros_(self.down.weight)
        if self.down.bias is not None:
            nn.init.zeros_(self.down.bias)

    def forward(self, a: Tensor) -> Tensor:  # [..., d] -> [..., d]
        return self.down(self.hidden(self.normed(a).to(a.dtype)))

    # [..., d] -> [..., d], in the dtype of the norm's weights
    def normed(self, a: Tensor) -> Tensor:
        """`LN_cheap(a)`; CUDA has no layer norm of one dtype with weights of another."""
        weight = getattr(self.norm, "weight", None)
        if weight is not None and not isinstance(self.norm, RMSNorm):
            a = a.to(weight.dtype)
        return self.norm(a)

    def features(self, x: Tensor) -> Tensor:  # [..., d] -> [..., r]
        """The input of `down`, from the output of `normed`, in the dtype of the weights."""
        return self.hidden(x.to(self.up.weight.dtype))

    def hidden(self, x: Tensor) -> Tensor:  # [..., d] -> [..., r]
        """The input of `down`, from the output of `normed`, in the dtype of `x`."""
        return F.silu(self.up(x))

    def norm_for_decoding(self) -> TensorMap:
        """`normed`, in few operators where its norm can be."""
        if isinstance(self.norm, RMSNorm):
            return self.norm.for_decoding()
        return self.normed

    def for_decoding(self, dtype: torch.dtype) -> TensorMap:
        """The branch for decoding, with its present weights, `[B, 1, d] -> [B, 1, d]`."""
        up, up_bias = self.up.cast(dtype)
        down, down_bias = self.down.cast(dtype)
        norm = self.norm_for_decoding()
        return lambda a: F.linear(F.silu(F.linear(norm(a).to(dtype), up, up_bias)), down, down_bias)


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * w` in float32, as one call;
    norms of transformers take seven operators."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [..., d] -> [..., d], float32
        # The weight too: CUDA has one kernel where both are alike, and several otherwise.
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)

    def for_decoding(self) -> TensorMap:
        """The norm with its weight as it is now, `[..., d] -> [..., d]` in float32."""
        weight = self.weight.detach().float()
        shape = self.weight.shape
        eps = self.eps
        return lambda x: F.rms_norm(x.float(), shape, weight, eps)


def rms_of(norm: Any) -> tuple[Tensor, float] | None:
    """Weight and epsilon of a norm of transformers that is `w * x / rms(x)`; None for any other."""
    if hasattr(norm, "variance_epsilon") and type(norm).__name__.endswith("RMSNorm"):
        return norm.weight, norm.variance_epsilon
    return None


def copy_norm(norm: Any) -> nn.Module:
    """A float32 copy of the base's norm, without the hooks that accelerate may have put on it,
    and without what another PEFT method has put around it."""
    # Here, since `doctor` knows branches and does not import PEFT.
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    if isinstance(norm, BaseTunerLayer):
        norm = norm.get_base_layer()
    elif isinstance(norm, ModulesToSaveWrapper):
        norm = norm.original_module
    if (rms := rms_of(norm)) is not None:
        with align_module_device(norm):
            return RMSNorm(nn.Parameter(_known_values("weight", norm.weight)), rms[1])
    kind: type[nn.Module] = type(norm)
    copied: nn.Module = kind.__new__(kind)
    nn.Module.__init__(copied)
    skipped = {"_parameters", "_buffers", "_modules", "_hf_hook", "_old_forward", "forward"}
    for name, value in norm.__dict__.items():
        if name not in skipped and not name.endswith("_hooks"):
            copied.__dict__[name] = copy.copy(value)
    with align_module_device(norm):  # fetches the values of an offloaded norm
        for name, parameter in norm._parameters.items():
            if parameter is not None:
                parameter = nn.Parameter(_known_values(name, parameter))
            copied.register_parameter(name, parameter)
    return copied


def _known_values(name: str, parameter: Tensor) -> Tensor:
    """A float32 copy; of a parameter on the meta device, a norm's usual starting values."""
    if parameter.is_meta:
        start = 0.0 if name == "bias" else 1.0
        return torch.full(parameter.shape, start, dtype=torch.float32)
    return parameter.detach().clone().float()


def reset_linear(linear: nn.Linear, generator: torch.Generator) -> None:
    """PyTorch's default initialisation of `nn.Linear`, drawn from `generator`."""
    bound = linear.in_features**-0.5
    nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
    if linear.bias is not None:
        nn.init.uniform_(linear.bias, -bound, bound, generator=generator)
