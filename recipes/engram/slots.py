"""How a memory's table is used: which of its slots a text hits, and which of its n-grams share one.

Shapes: G distinct n-grams, N longest order, K heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from hf_depthroute.data.batches import document_starts, model_inputs, token_mask
from hf_depthroute.inference.calibration import active_routings
from hf_depthroute.parts.memory import MISSING, NgramMemory, shortest_order, suffixes


@dataclass(frozen=True)
class SlotUse:
    """Use of one layer's table. A look-up is an n-gram under one of the hashes of its order.

    Attributes:
        slots: Its slots.
        trained: Slots that are not zero: training has reached them.
        hit: Slots that the text looks up.
        lookups: Distinct look-ups of the text.
        collided: Those whose slot another n-gram of the text looks up too.
    """

    slots: int
    trained: int
    hit: int
    lookups: int
    collided: int


@torch.no_grad()
def slot_use(
    model: nn.Module, batches: Iterable[Mapping[str, Any]] | Mapping[str, Any]
) -> dict[int, SlotUse]:
    """Occupancy and collisions of every memory on a text; no forward pass.

        slot_use(model, [{"input_ids": ids}])[2].collided

    Args:
        model: A model whose active adapter has `target="memory"` or `branch="memory"`.
        batches: Dicts with `input_ids` and optionally `attention_mask` and `position_ids`, each
            `[B, T]`.

    Returns:
        `SlotUse` by layer index.

    Raises:
        ValueError: No such adapter is active, or a batch has no `input_ids`.
    """
    routings = active_routings(model)
    config = routings[0].active_config()
    if not config.has_memory:
        raise ValueError(
            f"slot_use: target={config.target!r} has no table of slots, nor has "
            f"branch={config.branch!r}"
        )
    seen_GN = torch.empty(0, config.ngram_order, dtype=torch.int64)
    pending: list[torch.Tensor] = []
    for batch in model_inputs(model, batches):
        real = token_mask(batch)
        ngrams = suffixes(
            batch["input_ids"], config.ngram_order, real, document_starts(batch)
        ).clamp(min=MISSING)
        pending.append(ngrams[real].cpu().unique(dim=0))
        # Each is sorted a few times, and not with every batch.
        if sum(map(len, pending)) > len(seen_GN):
            seen_GN, pending = torch.cat([seen_GN, *pending]).unique(dim=0), []
    seen_GN = torch.cat([seen_GN, *pending]).unique(dim=0)
    found = {}
    for routing in routings:
        memory = cast(NgramMemory, routing.depth_route_memory[routing.active_name()])
        hit = lookups = collided = 0
        for place, order in enumerate(range(shortest_order(config), config.ngram_order + 1)):
            ngrams_GN = torch.full_like(seen_GN, MISSING)
            ngrams_GN[:, :order] = seen_GN[:, :order]
            slots_GK = memory.slots(ngrams_GN.unique(dim=0)).unflatten(
                -1, (-1, config.memory_heads)
            )[:, place]
            for slots_G in slots_GK.unbind(dim=-1):
                counts = slots_G.unique(return_counts=True)[1]
                hit, lookups = hit + len(counts), lookups + len(slots_G)
                collided += int(counts[counts > 1].sum())
        trained = int(memory.table.ne(0).any(dim=-1).sum())
        found[routing.layer_index] = SlotUse(len(memory.table), trained, hit, lookups, collided)
    return found
