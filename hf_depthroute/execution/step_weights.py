"""The adapter's weights as a decoding step on a CPU needs them: in the stream's dtype,
in few operators.

Shapes: B batch, d model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from ..base.readable import is_watched, is_whole
from ..parts.branches import TensorMap, rms_of, version_key
from ..parts.fused import FusedGateBranch, fuse
from ..parts.gate import Gate
from ..parts.neurons import NeuronBranch

if TYPE_CHECKING:
    from ..routing.plan import RoutePlan
    from ..routing.routing import Routing


class Prepared(NamedTuple):
    """Constants of a layer's steps, made from its weights in the stream's dtype; never changed.

    Attributes:
        dtype: The stream's dtype.
        folds: The state of the base's norm that is folded into `joint`.
        joint: Gate and branch as one; None if they do not join.
        score: The gate, `[B, 1, d]` to `[B]`; None with `joint`.
        branch: The branch, `[B, 1, d]` to the update; None without a branch, and with `joint`.
        recall: The memory, new tokens' n-grams to the update; None without a memory.
    """

    dtype: torch.dtype
    folds: Any
    joint: FusedGateBranch | None
    score: TensorMap | None
    branch: TensorMap | None
    recall: TensorMap | None


class StepWeights:
    """The adapter's weights of one layer, as its steps need them; several steps,
    and threads, share them.

    No score is wanted of them where the KV cache holds the decision.
    """

    def __init__(self, routing: Routing, plan: RoutePlan, scores: bool) -> None:
        gate = routing.gate(plan.adapter)
        branch = routing.depth_route_branch._modules.get(plan.adapter)
        self.memory: Any = routing.depth_route_memory._modules.get(plan.adapter)
        parts = [gate, branch, self.memory]
        if plan.rule == "predictor":  # it stands in for the gate
            gate = cast(Gate, routing.depth_route_predictor[plan.adapter])
            parts.append(gate)
        self._gate = gate if scores else None
        self._branch: Any = branch
        modules = [module for part in parts if part is not None for module in part.modules()]
        if isinstance(branch, NeuronBranch):
            modules += branch.borrowed()
        reads_norm = plan.config.gate_input != "residual"
        self.joins = (
            scores
            and reads_norm
            and plan.rule != "static"
            and plan.mix == "hard"
            and self.memory is None
        )
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._weights = [weight for m in modules for weight in m.parameters(recurse=False)]
        self._plain = all(is_whole(w) and w.device.type == "cpu" for w in self._weights)
        self._plain &= not any(is_watched(m) for m in modules)
        self.prompts = routing.prompts  # what is prepared serves one of them
        self._version = version_key(*self._weights)
        self._prepared: Prepared | None = None  # known at the first step

    def usable(self) -> bool:
        """Whether weights are plain and those of the start, and no hook watches their modules."""
        if not self._plain or any(self._hooks):
            return False
        return self._version is not None and self._version == version_key(*self._weights)

    def prepared(self, dtype: torch.dtype, norm: nn.Module) -> Prepared:
        """For a stream of `dtype` and the base's norm before gate and branch."""
        folds = _folds(norm) if self.joins else None
        held = self._prepared  # read once: another thread may put another one there
        if held is None or held.dtype is not dtype or held.folds != folds:
            held = self._prepared = self._prepare(dtype, norm, folds)
        return held

    def _prepare(self, dtype: torch.dtype, norm: nn.Module, folds: object) -> Prepared:
        gate = self._gate
        branch = self._branch
        recall = None
        if self.memory is not None:
            recall = self.memory.for_decoding(dtype)
        joins = folds is not None and dtype in (torch.float32, torch.bfloat16, torch.float16)
        if joins and gate is not None:
            joint = fuse(rms_of(norm), gate, branch, dtype)
            if joint is not None:
                return Prepared(dtype, folds, joint, None, None, recall)
        if branch is not None:
            branch = branch.for_decoding(dtype)
        score = None if gate is None else gate.for_decoding(dtype)
        return Prepared(dtype, folds, None, score, branch, recall)


def _folds(norm: nn.Module) -> tuple[int, int, int] | None:
    """Changes with what an RMS norm on the CPU does; None if that is more than its weight says."""
    weight = norm._parameters.get("weight")
    if weight is None or norm._modules or is_watched(norm):
        return None
    if not is_whole(weight) or weight.device.type != "cpu" or weight.is_inference():
        return None
    return id(norm), weight.data_ptr(), weight._version
