"""The time that an option saves: that of a prompt with it in every layer that may have it.

FLOPs say little about the time of attention and of narrow products, and how much less depends on the machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..adapter.tuner import get_depth_routed_model
from ..base.distributed import each_of_all
from ..config.adapter import DepthRouteConfig
from .options import Option, StaticFit

_ROUNDS = 4  # every option once in each; the fastest counts


@torch.no_grad()
def time_savings(
    base: nn.Module, found: Mapping[int, Mapping[Option, StaticFit]], ids: torch.Tensor, tail: int
) -> dict[Option, float]:
    """The share of the time of a prompt that each option leaves out in one layer; below 0 where it takes longer.

    Args:
        base: The model, not routed; it is given back as it was.
        found: The options of each layer, by its index.
        ids: A prompt, `[1, T]`.
        tail: Tokens at its end that run in full.
    """
    layers: dict[Option, list[int]] = {}
    for index, options in found.items():
        for option in options:
            layers.setdefault(option, []).append(index)
    dense, seconds = float("inf"), dict.fromkeys(layers, float("inf"))
    for _ in range(_ROUNDS):
        dense = min(dense, _seconds(base, ids))
        for option, indices in layers.items():
            routed: Any = get_depth_routed_model(base, _config_of(option, indices, tail)).eval()
            seconds[option] = min(seconds[option], _seconds(routed, ids))
            routed.unload()
    saved = {option: (dense - seconds[option]) / dense / len(indices) for option, indices in layers.items()}
    return dict(each_of_all(saved)[0])  # every process has to choose alike


def _config_of(option: Option, layers: list[int], tail: int) -> DepthRouteConfig:
    return DepthRouteConfig(
        layers=layers,
        target=option.target,
        gate="sinks",
        branch=option.branch,
        branch_rank=option.rank,
        phases="prefill",
        prompt_tail=tail,
    )


def _seconds(model: Any, ids: torch.Tensor) -> float:
    """The faster of two passes: the first one makes what is kept."""
    found = []
    for _ in range(2):
        started = time.perf_counter()
        model(input_ids=ids, use_cache=True, logits_to_keep=1)
        if ids.is_cuda:
            torch.cuda.synchronize(ids.device)
        found.append(time.perf_counter() - started)
    return min(found)
