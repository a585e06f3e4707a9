"""Adapters that route prompts alone train as they serve:
on what a prompt does to the text behind it.

Shapes: B batch, T positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import nn
from transformers import default_data_collator

from ..data.batches import prompts_of
from ..routing.stack import state_of
from ..routing.trace import RouteTrace


def collate_behind_prompts(rows: list[object]) -> dict[str, Any]:
    """A collator for plain text: two thirds of every row are a prompt, and have no labels.

    The rows have one length, as for transformers' `default_data_collator`, and `labels`.
    """
    batch: dict[str, Any] = default_data_collator(rows)
    _, behind_BT = prompts_of(batch)
    has_label_BT = F.pad(behind_BT[:, :-1], (1, 0))
    return batch | {"labels": batch["labels"].masked_fill(~has_label_BT, -100)}


def of_prompts(model: nn.Module, trace: RouteTrace) -> RouteTrace:
    """The trace of a pass inside `as_served`, of the tokens that the gates decided about."""
    forced_BT = state_of(model).settings.in_full
    if forced_BT is None:
        return trace
    records = {}
    for index, record in trace.items():
        routed_BT = ~forced_BT.to(record.mask.device)
        if record.token_mask is not None:
            routed_BT = record.token_mask & routed_BT
        records[index] = replace(record, token_mask=routed_BT)
    return RouteTrace(records, trace.routings)
