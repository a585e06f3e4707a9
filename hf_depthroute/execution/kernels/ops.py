"""Row ops: full shapes in and out, computed at the chosen rows only, without a word to the host.

Custom operators of the namespace `hf_depthroute`: to `torch.compile` and to a CUDA graph each is
one call whose shapes do not depend on the mask, so a compiled model skips as the eager one does. On
CUDA they run Triton kernels that read the number of chosen rows on the device; elsewhere, and
without Triton, plain PyTorch.

Legend: N rows, i and o input and output width, d model width, f FFN width, B sequences, T
positions, S keys, H query heads, G key-value heads, k head width.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import derivatives, plain


@torch.library.custom_op("hf_depthroute::linear_rows", mutates_args=())
def linear_rows(x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x W^T + b` at the rows in `mask`, zeros at the others.

    Args:
        x: `[N, i]`.
        mask: Bool `[N]`.
        weight: `[o, i]`, in the dtype of `x`.
        bias: `[o]`, or None.

    Returns:
        `[N, o]`.
    """
    return plain.linear(x, mask, weight, bias)


@torch.library.custom_op("hf_depthroute::swiglu_rows", mutates_args=())
def swiglu_rows(
    stream: Tensor,
    x: Tensor,
    mask: Tensor,
    scale: Tensor | None,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
) -> Tensor:
    """`stream + scale * W_down (SiLU(W_gate x) * W_up x)` at the rows in `mask`,
    `stream` at the others.

    Args:
        stream: `[N, d]`.
        x: `[N, d]`, what the FFN reads.
        mask: Bool `[N]`.
        scale: Float `[N]`; None is 1.
        w_gate: `[f, d]`, as the other weights in the dtype of `x`.
        w_up: `[f, d]`.
        w_down: `[d, f]`.

    Returns:
        `[N, d]`.
    """
    return plain.swiglu(stream, x, mask, scale, w_gate, w_up, w_down)


@torch.library.custom_op("hf_depthroute::attend_rows", mutates_args=())
def attend_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    allowed: Tensor | None,
    past: int,
    scaling: float,
) -> Tensor:
    """Softmax attention of the queries in `mask`, zeros at the others;
    query heads share key-value heads in order.

    Args:
        q: `[B, T, H, k]`.
        keys: `[B, G, S, k]` with any strides, as the values.
        values: `[B, G, S, k]`.
        mask: Bool `[B, T]`.
        allowed: `[B or 1, 1, T, S]`: bool, or a float that is added to the scores. None: query `t`
            sees keys `0 .. past + t`.
        past: Positions before the first query; without effect where `allowed` is given.
        scaling: What the scores are multiplied by.

    Returns:
        `[B, T, H, k]`.
    """
    return plain.attend(q, keys, values, mask, allowed, past, scaling)


@functools.cache
def _on_cuda() -> ModuleType:
    """The module that launches the Triton kernels; `plain`, with one warning,
    where Triton is missing."""
    if importlib.util.find_spec("triton") is None:
        warnings.warn(
            "hf_depthroute: Triton is not installed, so routed layers run in plain PyTorch on "
            "CUDA: the host waits for the number of chosen rows in every routed layer, and CUDA "
            "graphs cannot be captured; pip install triton",
            stacklevel=2,
        )
        return plain
    return importlib.import_module(".launch", __package__)


@linear_rows.register_fake
def _(x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@swiglu_rows.register_fake
@attend_rows.register_fake
def _(like: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


for op, name in ((linear_rows, "linear"), (swiglu_rows, "swiglu"), (attend_rows, "attend")):
    op.register_kernel("cuda")(lambda *inputs, name=name: getattr(_on_cuda(), name)(*inputs))
    op.register_autograd(
        derivatives.through(getattr(derivatives, name)), setup_context=derivatives.keep
    )
