"""What the counterfactual labels of a training cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import nn

from hf_depthroute.data.batches import labels_of, model_inputs
from hf_depthroute.training.forks import observe_prefix
from hf_depthroute.training.oracle import prefix_utility


def refresh_cost(
    model: nn.Module, batch: Mapping[str, torch.Tensor], kind: str = "all_full", rounds: int = 5
) -> float:
    """Time of one refresh of the labels over the time of one plain forward pass:
    medians of interleaved runs."""
    seconds: dict[str, list[float]] = {"forward": [], "refresh": []}
    wait: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    inputs = next(model_inputs(model, batch))
    labels_BT = labels_of(batch)
    with observe_prefix(model) as prefix, torch.no_grad():
        model(**inputs, use_cache=False, logits_to_keep=1)
        runs = (
            lambda: model(**inputs, use_cache=False),
            lambda: prefix_utility(prefix, labels_BT, kind),
        )
        for what, run in [*zip(seconds, runs)] * rounds:
            wait()
            start = time.perf_counter()
            run()
            wait()
            seconds[what].append(time.perf_counter() - start)
    return statistics.median(seconds["refresh"]) / statistics.median(seconds["forward"])
