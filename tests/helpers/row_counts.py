"""How many rows the parts of a routed layer compute, and that they are those that were decided."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from models import decoder_layers
from peft import PeftModel
from torch import nn

from hf_depthroute import record_routes
from hf_depthroute.base.families import find_decoder, find_family
from hf_depthroute.base.projections import STYLES
from hf_depthroute.routing.stack import routings_of


@contextmanager
def counted_rows(model: PeftModel) -> Iterator[dict[str, dict[int, int]]]:
    """Per routed layer: rows that the routed modules really computed,
    rows that the trace says ran full, and all rows.

    Of an FFN, its rows; of an attention, the rows of its query and of its output projection; of
    experts, the pairs.
    """
    base = model.get_base_model()
    routings = routings_of(model)
    counts: dict[str, dict[int, int]] = {
        kind: {routing.layer_index: 0 for routing in routings}
        for kind in ("computed", "decided", "all")
    }
    handles = []
    modules = 1
    for routing in routings:
        counters = _counted_modules(decoder_layers(model)[routing.layer_index], routing)
        modules = len(counters)

        def count(
            _: nn.Module, inputs: tuple[torch.Tensor, ...], i: int = routing.layer_index
        ) -> None:
            counts["computed"][i] += inputs[0].shape[:-1].numel()

        handles += [module.register_forward_pre_hook(count) for module in counters]
    with record_routes(model) as trace:

        def count_decided(*_: object) -> None:
            for index, record in trace.items():
                counts["decided"][index] += modules * int(record.mask.sum())
                counts["all"][index] += modules * record.mask.numel()

        handles.append(find_decoder(base, find_family(base)).register_forward_hook(count_decided))
        try:
            yield counts
        finally:
            for handle in handles:
                handle.remove()


def _counted_modules(layer: nn.Module, routing: Any) -> list[nn.Module]:
    family, target = routing.family, routing.active_config().target
    ffn, attention = getattr(layer, family.ffn), getattr(layer, family.attention)
    if target == "ffn":
        return [ffn]
    if target == "experts":
        # The innermost module. Its hook runs after the one that leaves pairs out, which is
        # registered per call.
        return [_AfterOthers(routing.experts_of(layer))]
    queries = {} if family.queries is None else STYLES[family.queries].weights(attention)
    projections = [getattr(attention, name) for name, part in queries.items() if part == 1]
    return projections + ([ffn] if target == "block" else [])


class _AfterOthers:
    """Counts the rows that reach the experts' own forward, behind all hooks."""

    def __init__(self, experts: nn.Module) -> None:
        self.experts = experts

    def register_forward_pre_hook(self, hook: Any) -> _AfterOthers:
        forward = self.experts.forward

        def counted(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            hook(self.experts, (index[..., None],))  # one entry per pair
            return forward(x, index, weights)

        self.experts.forward = counted  # type: ignore[method-assign]
        return self

    def remove(self) -> None:
        del self.experts.forward


def assert_only_decided_rows_ran(counts: dict[str, dict[int, int]]) -> None:
    assert counts["computed"] == counts["decided"]
    assert 0 < sum(counts["computed"].values()) < sum(counts["all"].values())
