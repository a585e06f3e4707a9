"""Which modules of a model the row ops can stand in for: they read weights, and pass hooks and wrappers by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

_SILU = (nn.SiLU, type(ACT2FN["silu"]))


def is_plain_linear(module: Any, x: Tensor) -> bool:
    """Whether `module` computes `x W^T + b` in the dtype of `x` and nothing else: no hook, LoRA, shard or offload."""
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and module.weight.dtype == x.dtype
        and module.weight.device == x.device
        and _is_untouched(module)
        and not torch.is_autocast_enabled(x.device.type)
    )


def is_swiglu(ffn: Any, x: Tensor) -> bool:
    """Whether `ffn` is `W_down (SiLU(W_gate x) * W_up x)` with plain linear maps without bias."""
    linears = [ffn._modules.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    return (
        type(ffn._modules.get("act_fn")) in _SILU
        and _is_untouched(ffn)
        and all(is_plain_linear(linear, x) and linear.bias is None for linear in linears)
    )


def _is_untouched(module: nn.Module) -> bool:
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)
