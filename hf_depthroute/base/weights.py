"""The weights of a base as its layers multiply with them, however few bits they are held in."""

from __future__ import annotations

from collections.abc import Iterator

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn


def weight_shapes(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every parameter below `module`, once each.

    A linear map has a weight `[out, in]` and perhaps a bias, whatever it keeps them in: in 4 bits
    two numbers share a byte, and other formats hold packed buffers and scales.
    """
    seen = set()
    for prefix, part in module.named_modules():
        held: dict[str, Tensor | None] = dict(part._parameters)
        shapes = {name: tuple(p.shape) for name, p in held.items() if p is not None}
        out = getattr(part, "out_features", None)
        read = getattr(part, "in_features", None)
        # LoRA's layers have the sizes of what they wrap, which is a module of its own.
        linear = not isinstance(part, BaseTunerLayer)
        if linear and isinstance(out, int) and isinstance(read, int):
            bias = getattr(part, "bias", None)
            held = {"weight": held.get("weight"), "bias": bias}
            shapes = {"weight": (out, read)}
            if isinstance(bias, Tensor):
                shapes["bias"] = tuple(bias.shape)
        for name, shape in shapes.items():
            key = id(part) if held[name] is None else id(held[name])
            if key not in seen:
                seen.add(key)
                yield f"{prefix}.{name}" if prefix else name, shape
