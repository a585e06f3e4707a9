"""Row ops: custom operators that compute the chosen rows only; Triton kernels on CUDA,
plain PyTorch elsewhere."""

from .ops import attend_rows, linear_rows, swiglu_rows

__all__ = ["attend_rows", "linear_rows", "swiglu_rows"]
