"""Row ops: full shapes in and out, computed at the chosen rows only, without a word to the host.

Custom operators of the namespace `hf_depthroute`: to `torch.compile` and to a CUDA graph each is
one call whose shapes do not depend on the mask, so a compiled model skips as the eager one does. On
CUDA they run Triton kernels that read the number of chosen rows on the device; elsewhere, and
without Triton, plain PyTorch. Arguments and shapes: `plain`.
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

from ...files.shown import DepthRouteWarning
from . import derivatives, plain

linear_rows = torch.library.custom_op("hf_depthroute::linear_rows", plain.linear, mutates_args=())
swiglu_rows = torch.library.custom_op("hf_depthroute::swiglu_rows", plain.swiglu, mutates_args=())
attend_rows = torch.library.custom_op("hf_depthroute::attend_rows", plain.attend, mutates_args=())


@functools.cache
def _on_cuda() -> ModuleType:
    """The module that launches Triton kernels; `plain`, with one warning, without Triton."""
    if importlib.util.find_spec("triton") is None:
        warnings.warn(
            "hf_depthroute: Triton is not installed, so routed layers run in plain PyTorch on "
            "CUDA: the host waits for the number of chosen rows in every routed layer, and CUDA "
            "graphs cannot be captured; pip install triton",
            DepthRouteWarning,
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
