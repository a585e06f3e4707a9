"""Which modules of a model the row ops can stand in for: they read weights directly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...base.intermediate import SILU
from ...base.readable import is_readable, is_watched


def is_plain_linear(module: Any, x: Tensor) -> bool:
    """Whether `module` computes `x W^T + b` in the dtype of `x` and nothing else."""
    return (
        is_readable(module, nn.Linear)
        and module.weight.dtype == x.dtype
        and module.weight.device == x.device
        and not torch.is_autocast_enabled(x.device.type)
    )


def is_swiglu(ffn: Any, x: Tensor) -> bool:
    """Whether `ffn` is `W_down (SiLU(W_gate x) * W_up x)` with plain linear maps without bias."""
    linears = [ffn._modules.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    return (
        is_readable(ffn._modules.get("act_fn"), *SILU)
        and not is_watched(ffn)
        and all(is_plain_linear(linear, x) and linear.bias is None for linear in linears)
    )
