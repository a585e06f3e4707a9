"""Prompts in half precision on a CPU: the routed FFN of many tokens at once, in as few passes as there can be.

Where there are instructions for half precision, an operator on a narrow model costs as much as its arithmetic. So the
norm is taken once, in one operator, for the gate (`parts.joint.PromptMaps`) and for the rows that run the FFN. Scores
round in another way than the gate's own; in float32 the general pass stays, whose scores do not depend on who watches.

Shapes: N tokens, d model width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.sublayers import norm_of
from ..parts.branches import rms_of
from ..parts.joint import PromptMaps, prompt_maps
from ..routing.holder import Routing
from ..routing.plan import RoutePlan
from .frozen import FrozenParts, folds, parts_of


class Prompt(NamedTuple):
    """What is known of all tokens of a call before one of their paths runs.

    Attributes:
        normed: The stream over its root mean square, `[N, d]`.
        scale: `[d]`; times `normed` it is what the FFN reads.
        scores: Float32 `[N]`.
    """

    normed: Tensor
    scale: Tensor
    scores: Tensor


class PromptStep(FrozenParts):
    """`PromptMaps` of one layer, made again whenever what is in them changes."""

    _key: Any = None  # of the base's norm and the stream's dtype, in `_maps`
    _maps: PromptMaps | None = None

    def holds(self, holder: Routing, adapter: str) -> bool:
        """Whether it is of the adapter's gate and branch as they are now."""
        gate, branch = parts_of(holder, adapter)
        return self._parts[0] is gate and self._parts[1] is branch and self.usable()

    def read(self, norm: Any, stream: Tensor) -> Prompt | None:
        """The tokens of `stream`, `[B, T, d]`, in front of `norm`; None where norm and gate do not join."""
        folded = folds(norm)
        if folded is None:
            return None
        if self._key != (folded, stream.dtype):
            self._key, self._maps = (folded, stream.dtype), prompt_maps(rms_of(norm), self._parts[0], stream.dtype)
        if self._maps is None:
            return None
        normed, scores = self._maps.read(stream.reshape(-1, stream.shape[-1]))
        return Prompt(normed, norm.weight, scores)


def read_prompt(layer: Any, holder: Routing, plan: RoutePlan, stream: Tensor) -> Prompt | None:
    """The tokens of `stream`, `[B, T, d]`, in front of the routed FFN; None where the general pass has to run."""
    config = plan.config
    if stream.device.type != "cpu" or stream.dtype not in (torch.bfloat16, torch.float16) or layer.training:
        return None
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return None
    if stream.shape[1] == 1:  # a decoding step
        return None
    if not holder.family.plain or config.granularity != "token" or config.gate_input != "normed":
        return None
    if plan.adapter in holder.depth_route_memory or plan.gate.exits:
        return None
    if plan.rule != "threshold" or plan.mix != "hard" or plan.executor not in ("auto", "gathered"):
        return None
    step: PromptStep | None = holder.derived.get(("prompt", plan.adapter))
    if step is None or not step.holds(holder, plan.adapter):
        step = holder.derived["prompt", plan.adapter] = PromptStep(holder, plan.adapter)
    return step.read(norm_of(layer, holder.family, "ffn"), stream) if step.usable() else None
