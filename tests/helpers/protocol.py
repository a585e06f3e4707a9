"""Comparing two runs of a routed model: pinned (P), free in float32 (F), free in bfloat16 (B).

Hard routing is discontinuous, so outputs are compared with the decisions of one run replayed in the
other, and the decisions themselves are compared apart from that, up to ties within the arithmetic's
noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from moe.routers import routers
from peft import PeftModel

from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.trace import RouteTrace

FREE_MARGIN = 1e-4
PINNED_BAR = 1e-5


def thresholds(model: PeftModel) -> dict[int, float]:
    """The score threshold in force in every routed layer."""
    found = {}
    for routing in routings_of(model):
        plan = routing.plan(training=False)
        if plan is not None:
            found[routing.layer_index] = float(plan.threshold)
    return found


def gap(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first.detach().float() - second.detach().float()).abs().max())


def assert_pinned(routed_gap: float, base_gap: float, rounding: float = PINNED_BAR) -> None:
    """P: with the same decisions, routing adds no more error than the base model has in the
    same comparison.

    `rounding` is the gap that the arithmetic alone may leave; in bfloat16, `bfloat16_rounding` of
    the logits.
    """
    bar = max(2 * base_gap, rounding)
    assert routed_gap <= bar, (
        f"pinned gap {routed_gap:.2e} is above {bar:.2e}; the base's own gap is {base_gap:.2e}"
    )


def bfloat16_rounding(logits: torch.Tensor) -> float:
    """One unit in the last place of the largest logit: the base's own gap may happen to be zero."""
    return float(logits.float().abs().max()) * torch.finfo(torch.bfloat16).eps


def assert_free(model: PeftModel, first: RouteTrace, second: RouteTrace) -> None:
    """F: in float32, no decision differs where the score is further than 1e-4
    from the threshold."""
    assert list(first) == list(second)
    for index, threshold in thresholds(model).items():
        assert first[index].mask.shape == second[index].mask.shape
        differs = first[index].mask != second[index].mask
        clear = (first[index].scores - threshold).abs() > FREE_MARGIN
        assert not bool((differs & clear).any()), f"layer {index}: a clear decision differs"


def assert_first_flips_are_close(model: PeftModel, first: RouteTrace, second: RouteTrace) -> None:
    """B: a flip with none before it in depth or position has a margin under 0.05 standard
    deviations of the scores."""
    flipped_before: torch.Tensor | None = None
    for index, threshold in thresholds(model).items():
        one, two = first[index], second[index]
        differs = one.mask != two.mask
        margin = torch.where(differs, (one.scores - threshold).abs() / one.scores.std(), 0.0)
        moved = torch.zeros_like(differs)  # the base's own routers chose other experts
        if "expert_index" in one.extras:
            moved = (one.expert_index != two.expert_index).any(-1)
            differs, margin = differs.any(-1), margin.amax(-1)
        before = torch.zeros_like(differs) if flipped_before is None else flipped_before
        first_flips = differs & ~moved & ~before
        assert bool((margin[first_flips] < 0.05).all()), f"layer {index}: a first flip is not close"
        # A flip reaches all later positions of its sequence, from the next layer on.
        seen = (differs | moved).int().cumsum(dim=1).bool()
        flipped_before = seen if flipped_before is None else flipped_before | seen


@contextmanager
def pinned_experts(model: PeftModel, batch: int) -> Iterator[None]:
    """The base's own expert routers repeat, position by position,
    what they chose in the first pass inside the block.

    They are discrete too: in bfloat16 a rounding difference moves a token to another expert, and
    with pinned routes that is the base's error, not the routing's. Does nothing for a model without
    experts.
    """
    chosen: dict[int, torch.Tensor] = {}  # [B, T, K]
    cursor: dict[int, int] = {}

    def hook(index: int) -> Any:
        def repeat(
            router: Any, args: Any, out: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, ...] | None:
            logits, weights, picked = out
            steps = picked.unflatten(0, (batch, -1))
            if index not in chosen:
                chosen[index], cursor[index] = steps, 0
                return None
            start, length = cursor[index] % chosen[index].shape[1], steps.shape[1]
            cursor[index] = start + length
            again = chosen[index][:, start : start + length].flatten(0, 1)
            probs = logits.float().softmax(-1).gather(-1, again)
            if getattr(router, "norm_topk_prob", True):
                probs = probs / probs.sum(-1, keepdim=True)
            return logits, probs.to(weights.dtype), again

        return repeat

    base = model.get_base_model()
    found = routers(base) if hasattr(base.config, "num_experts_per_tok") else {}
    gathered = {
        h.layer_index for h in routings_of(model) if h.active_config().target in ("ffn", "block")
    }
    handles = [
        router.register_forward_hook(hook(index))
        for index, router in found.items()
        if index not in gathered
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def take(trace: RouteTrace, rows: torch.Tensor) -> RouteTrace:
    """The trace of the sequences `rows`, in that order."""
    return RouteTrace(
        {
            index: replace(
                record,
                mask=record.mask[rows],
                scores=record.scores[rows],
                probs=record.probs[rows],
                token_mask=None if record.token_mask is None else record.token_mask[rows],
                extras={name: value[rows] for name, value in record.extras.items()},
            )
            for index, record in trace.items()
        }
    )


def spread(trace: RouteTrace, columns: torch.Tensor, length: int) -> RouteTrace:
    """The trace laid out in a longer run: position `i` of row `b` goes to `columns[b, i]`,
    false elsewhere."""

    def widen(values: torch.Tensor) -> torch.Tensor:
        out = values.new_zeros(values.shape[0], length, *values.shape[2:])
        return out.scatter(1, _like(columns, values), values)

    return RouteTrace(
        {
            index: replace(
                record,
                mask=widen(record.mask),
                scores=widen(record.scores),
                probs=widen(record.probs),
                token_mask=None,
                extras={},
            )
            for index, record in trace.items()
        }
    )


def narrow(trace: RouteTrace, columns: torch.Tensor) -> RouteTrace:
    """The inverse of `spread`: the entries at `columns`, `[B, n]`."""
    return RouteTrace(
        {
            index: replace(
                record,
                mask=record.mask.gather(1, _like(columns, record.mask)),
                scores=record.scores.gather(1, _like(columns, record.mask)),
                probs=record.probs.gather(1, _like(columns, record.mask)),
                token_mask=None,
                extras={},
            )
            for index, record in trace.items()
        }
    )


def _like(columns: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Positions `[B, n]` as an index of `values` `[B, T]` or `[B, T, K]`."""
    return columns if values.ndim == 2 else columns[..., None].expand(-1, -1, values.shape[-1])
