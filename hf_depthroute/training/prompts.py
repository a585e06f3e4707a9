"""Adapters that route prompts alone train as they serve:
on what a prompt does to the text behind it.

Shapes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import default_data_collator

from ..base.lm_head import predicting
from ..data.batches import document_starts, prompts_of
from ..routing.stack import routings_of, state_of
from ..routing.trace import RouteTrace, run_in_full


def as_served(model: nn.Module, inputs: object) -> AbstractContextManager[None]:
    """Around a forward pass on `inputs`: with `phases="prefill"`,
    what predicts a label runs in full (`in_full`)."""
    active = (routing for routing in routings_of(model) if routing.adapter() is not None)
    config = next((routing.active_config() for routing in active), None)
    if config is None or config.phases != "prefill" or not isinstance(inputs, Mapping):
        return nullcontext()
    labels = inputs.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.ndim != 2:
        return nullcontext()
    return run_in_full(model, in_full(inputs, config.last_in_full))


def collate_behind_prompts(rows: list[object]) -> dict[str, Any]:
    """A collator for plain text: the first two thirds of every row are a prompt,
    and have no labels.

    Args:
        rows: Rows of one length, as for transformers' `default_data_collator`, with `labels`.
    """
    batch: dict[str, Any] = default_data_collator(rows)
    _, behind_BT = prompts_of(batch)
    has_label_BT = F.pad(behind_BT[:, :-1], (1, 0))
    return batch | {"labels": batch["labels"].masked_fill(~has_label_BT, -100)}


def in_full(inputs: Mapping[str, Any], tail: int) -> torch.Tensor:
    """The tokens of a batch for training that run in full where prompts alone are routed,
    bool `[B, T]`.

    They are those that predict a label, the last `tail` of the prompt before them, the one that
    predicts the first label included, and what stands behind the last label. A prompt is what has
    no label, as a completion-only collator leaves it; a conversation has several. A row whose every
    token has a label has no prompt: no token of it has to.

    Args:
        inputs: `input_ids` and `labels`, as in transformers, and optionally `attention_mask` and
            `position_ids`, each `[B, T]`.
        tail: At least 1.
    """
    labels_BT = inputs["labels"]
    mask = inputs.get("attention_mask")
    starts_BT = document_starts(inputs)
    if starts_BT is not None:  # what no token predicts: collators leave its label out
        labels_BT = labels_BT.masked_fill(starts_BT, 0)
    behind_BT = F.pad(predicting(labels_BT, mask), (0, 1))
    before_BT = F.pad(behind_BT.cumsum(1), (1, 0))
    ends_T = (
        torch.arange(labels_BT.shape[1], device=labels_BT.device)
        .add(tail)
        .clamp(max=labels_BT.shape[1])
    )
    soon_BT = before_BT[:, ends_T] > before_BT[:, :-1]
    later_BT = before_BT[:, -1:] > before_BT[:, :-1]
    prompt_BT = (labels_BT == -100) & later_BT
    if mask is not None:
        prompt_BT &= mask.bool().to(labels_BT.device)
    # No token predicts the first one, which may have no label.
    has_prompt_B1 = prompt_BT[:, 1:].any(1, keepdim=True)
    return (soon_BT | ~later_BT) & has_prompt_B1


def of_prompts(model: nn.Module, trace: RouteTrace) -> RouteTrace:
    """The trace of a pass inside `as_served`, whose real tokens are those that the
    gates decided about."""
    forced_BT = state_of(model).settings.in_full
    if forced_BT is None:
        return trace
    records = {}
    for index, record in trace.items():
        routed_BT = ~forced_BT.to(record.mask.device)
        records[index] = replace(
            record,
            token_mask=routed_BT if record.token_mask is None else record.token_mask & routed_BT,
        )
    return RouteTrace(records, trace.routings)
