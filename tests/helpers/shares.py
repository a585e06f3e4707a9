"""Padded batches, and the share of their tokens that runs in full, counted by hand."""

from __future__ import annotations

import torch
from models import tokens
from peft import PeftModel

from hf_depthroute import record_routes


def text_batches(
    count: int = 4, batch: int = 8, length: int = 16, seed: int = 7
) -> list[dict[str, torch.Tensor]]:
    """Random batches; every row has its own amount of left padding, up to a third of its length."""
    batches = []
    for i in range(count):
        ids = tokens(batch, length, seed=seed + i)
        mask = (torch.arange(length) >= (torch.arange(batch) % (length // 3))[:, None]).long()
        batches.append({"input_ids": ids * mask, "attention_mask": mask})
    return batches


def run_ratio(model: PeftModel, batches: list[dict[str, torch.Tensor]]) -> dict[int, float]:
    """Fraction of the real tokens that run full in plain inference, counted by hand."""
    full: dict[int, int] = {}
    total = 0
    for batch in batches:
        real = batch["attention_mask"].bool()
        with torch.no_grad(), record_routes(model) as trace:
            model(**batch)
        for index, record in trace.items():
            full[index] = full.get(index, 0) + int(record.mask[real].sum())
        total += int(real.sum())
    return {index: count / total for index, count in full.items()}
