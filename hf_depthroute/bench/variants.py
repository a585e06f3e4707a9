"""Variants of a model that are timed side by side on one set of weights.

* `base`: the untouched model.
* `disabled`: the adapter is there and switched off.
* `budget 1.0`: the adapter is on and every token runs full, but for static layers.
* `budget B`: the routed model.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..base.stack import unwrapped
from ..inference.calibration import active_routings, calibrate
from ..inference.restoring import snapshot
from ..parts.gates import GATES
from ..routing.stack import state_of
from ..routing.trace import RouteRecord, full_depth
from .timing import dtype_name

BASE = "base"
DISABLED = "disabled"
FULL = "budget 1.0"


def budget_name(budget: float) -> str:
    return f"budget {float(budget)}"


def dense_view(model: nn.Module) -> nn.Module:
    """A copy of a model's modules around the same tensors: the untouched base to compare with."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


class Variants:
    """Switches a routed model between its variants.

    Args:
        model: A `PeftModel` with an active depth-routed adapter; put into eval mode.
        base: The untouched base, from `dense_view` before the adapter was injected; it may be None.
        budgets: Below 1. An adapter that follows no budget is timed as it is, under its own.
        input_ids: `[B, T]`, tokens to calibrate every budget on; None: the adapter's thresholds.

    Raises:
        ValueError: No routed adapter is active.
    """

    def __init__(
        self,
        model: Any,
        base: nn.Module | None,
        budgets: Sequence[float],
        input_ids: torch.Tensor | None = None,
    ) -> None:
        self.model = model.eval()
        self.base = base
        self.config = active_routings(model)[0].active_config()
        self.follows_budget = self.config.takes_budget()
        self.budgets: tuple[float, ...] = (float(self.config.budget),)
        if self.follows_budget:
            self.budgets = tuple(float(budget) for budget in budgets if budget < 1.0)
        # All thresholds are found now: calibration must not run between timed rounds.
        self._thresholds = {1.0: snapshot(model)}
        for budget in self.budgets:
            if input_ids is not None and self.follows_budget:
                calibrate(model, [{"input_ids": input_ids}], budget=budget)
            self._thresholds[budget] = snapshot(model)
        there = {BASE: base is not None, DISABLED: True, FULL: self.follows_budget}
        self.names = [name for name, is_there in there.items() if is_there]
        self.reference = self.names[0]
        self.names += map(budget_name, self.budgets)
        # `generate` calls the model without PEFT's wrapper.
        self.inner: nn.Module = unwrapped(model)
        self._current: float | None = None

    @contextmanager
    def using(self, name: str) -> Iterator[nn.Module]:
        """The model of variant `name`, which behaves as such inside the block."""
        kind, _, budget = name.partition(" ")
        if kind == BASE:
            assert self.base is not None
            yield self.base
        elif kind == DISABLED:
            with full_depth(self.model):
                yield self.inner
        else:
            if float(budget) != self._current:
                self._thresholds[float(budget)]()
                self.config.budget = self._current = float(budget)
            yield self.inner

    def restore(self) -> None:
        """Give the adapter back its budget and its thresholds."""
        self._thresholds[1.0]()
        self._current = None

    def keeps_sequences(self) -> bool:
        """Whether a KV cache remembers decisions, so that no two variants can share one."""
        static = GATES[self.config.gate].static or self.config.static_layers is not None
        return static or self.config.granularity == "sequence"


def hold_in_base_dtype(model: nn.Module, base: nn.Module, modes: Sequence[str] | None) -> None:
    """Keep the adapter's weights in the base's dtype, as `autocast_adapter_dtype=False` does, where
    casts would be launches of their own, or compiled: on GPUs and in compiled modes."""
    weight = next(base.parameters())
    if weight.device.type == "cuda" or "compiled" in (modes or ()):
        for routing in active_routings(model):
            for group in routing.adapter_layer_names:
                getattr(routing, group).to(weight.dtype)


def adapter_dtype(model: nn.Module) -> str:
    """The dtype of the adapter's weights, such as `"float32"`; without any, the base's."""
    parts = (*active_routings(model), model)
    return dtype_name(next(weight for part in parts for weight in part.parameters()).dtype)


class PassCounter:
    """A recorder of what ran in forward passes of equal size."""

    def __init__(self) -> None:
        self._ran: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def __setitem__(self, layer_index: int, record: RouteRecord) -> None:
        mask = record.mask & record.real
        self._ran[layer_index].append(torch.stack([mask.float().mean(), mask.any().float()]))

    def shares(self) -> Mapping[int, tuple[float, float]]:
        """Per layer: the share of rows that ran full, and of passes in which any row did."""
        return {i: tuple(torch.stack(ran).mean(0).tolist()) for i, ran in sorted(self._ran.items())}


@contextmanager
def count_passes(model: nn.Module) -> Iterator[PassCounter]:
    """Count what every routed layer of `model` runs in the block."""
    counter = PassCounter()
    with state_of(model).override(recorders=(counter,)):
        yield counter
