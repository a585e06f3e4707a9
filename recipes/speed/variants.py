"""Variants of a model that are timed beside those of `hf-depthroute bench`.

* `without FFNs`: the base without the FFNs that are routed: what is left of its time when all of
  them are skipped.
* `masked B`: the same decisions by a plain mask-after-compute router, which runs both paths for
  every token.
* `tuned B`: every layer with the executor that `tune_execution` measured to be the fastest at this
  shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_depthroute.base.stack import stack_of
from hf_depthroute.bench.inference import Shares, Times, eta_of
from hf_depthroute.bench.variants import Variants, budget_name
from hf_depthroute.inference.autotune import tune_execution
from hf_depthroute.inference.calibration import active_routings
from hf_depthroute.parts.targets import TARGETS
from hf_depthroute.routing.stack import state_of

LEFT_OUT = "without FFNs"
Tuned = list[dict[tuple[str, bool, int], str]]  # by routed layer, the executors


class SpeedVariants(Variants):
    """`Variants`, with the mask-after-compute router, chosen executors,
    and the base without the FFNs that are routed.

    Args:
        model, base, budgets, input_ids: As for `Variants`.
        masked: Whether to include the mask-after-compute router.
        tune: Prompts `[B, T]` to choose executors on, for the variant with tuned ones; None:
            without it.
        decodes: Whether executors are chosen for decoding steps after the prompts, or for the
            prompts.
    """

    def __init__(
        self,
        model: Any,
        base: nn.Module | None,
        budgets: Sequence[float],
        input_ids: torch.Tensor | None = None,
        masked: bool = False,
        tune: torch.Tensor | None = None,
        decodes: bool = False,
    ) -> None:
        super().__init__(model, base, budgets, input_ids)
        self._before = self._executors()
        self._tuned: dict[float, Tuned] = {}
        # By budget: how many layers took which executor.
        self.chosen: dict[float, dict[str, int]] = {}
        wanted = "decode" if decodes else "prefill"
        for budget in self.budgets if tune is not None else ():
            self._set_executors([{} for _ in self._before])
            with self.using(budget_name(budget)):
                choices = tune_execution(model, tune, steps=8 if decodes else 0, repeats=3)
            self.chosen[budget] = dict(
                Counter(choice.executor for choice in choices if choice.step == wanted)
            )
            self._tuned[budget] = self._executors()
            self._set_executors(self._before)
        if base is not None and TARGETS[self.config.target].skips == ("ffn",):
            self.names.append(LEFT_OUT)
        self.names += [f"masked {budget}" for budget in self.budgets if masked]
        self.names += [f"tuned {budget}" for budget in self._tuned]

    @contextmanager
    def using(self, name: str) -> Iterator[nn.Module]:
        kind, _, budget = name.partition(" ")
        if name == LEFT_OUT:
            assert self.base is not None
            with _without_ffns(self.base, active_routings(self.model)):
                yield self.base
            return
        if kind not in ("masked", "tuned"):
            with super().using(name) as model:
                yield model
            return
        with super().using(budget_name(float(budget))) as model:
            if kind == "masked":
                with state_of(self.model).override(executor="masked"):
                    yield model
                return
            self._set_executors(self._tuned[float(budget)])
            try:
                yield model
            finally:
                self._set_executors(self._before)

    def restore(self) -> None:
        super().restore()
        self._set_executors(self._before)

    def _executors(self) -> Tuned:
        return [routing.tuned for routing in active_routings(self.model)]

    def _set_executors(self, tuned: Tuned) -> None:
        for routing, executors in zip(active_routings(self.model), tuned):
            routing.tuned = executors


class _Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


@contextmanager
def _without_ffns(base: nn.Module, routings: Sequence[Any]) -> Iterator[None]:
    family = routings[0].family
    layers = stack_of(base).layers
    ffns = [(layers[routing.layer_index], family.ffn) for routing in routings]
    kept = [getattr(layer, name) for layer, name in ffns]
    try:
        for layer, name in ffns:
            setattr(layer, name, _Nothing())
        yield
    finally:
        for (layer, name), ffn in zip(ffns, kept):
            setattr(layer, name, ffn)


def add_variants(measured: dict[str, Any], times: Times, shares: Shares) -> None:
    """Add to times of `measure_inference` those of `SpeedVariants`: `without_ffns`,
    and `masked` and `tuned` by budget.

    `eta_free` of a budget is that of a router that costs nothing and saves each skipped token's
    part of the FFNs' time.
    """
    variants = times.variants
    assert isinstance(variants, SpeedVariants)
    left_out = None
    if LEFT_OUT in variants.names:
        left_out = times.samples.ratio((LEFT_OUT, times.dense[1]), times.dense).value
    measured |= {
        "without_ffns": None if left_out is None else round(left_out, 4),
        "masked": {},
        "tuned": {},
    }
    for budget in shares:
        row = measured["budgets"][str(budget)]
        ideal, share = row["flops_routed_over_dense"], row["full_ratio"]
        row["eta_free"] = (
            None if left_out is None else eta_of(share + (1 - share) * left_out, ideal)
        )
        if (name := f"masked {budget}") in variants.names:
            eta = eta_of(times.over_dense(name).value, ideal)
            measured["masked"][str(budget)] = times.row(name, "masked") | {"eta": eta}
        if budget in variants.chosen:  # layers may have turned routing off, so there is no eta
            executors = {"executors": variants.chosen[budget]}
            measured["tuned"][str(budget)] = times.row(f"tuned {budget}", "tuned") | executors
