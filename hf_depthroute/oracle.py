"""Counterfactual labels: what the loss of a token would have been on the other path of one layer.

Shapes: F streams (forks of one forward pass), B batch, T positions, S sampled positions, d model width.

The utility of running layer `l` full at position `t` is

    u*_{l,t} = CE~cheap_{l,t} - CE~full_{l,t},     CE~_{l,t} = sum_{delta=0}^{W-1} gamma^delta CE_{l,t+delta}

where the two trajectories fork at layer `l`. With `"all_full"` every other routed layer, before and after the fork,
runs full; with `"on_policy"` every other one follows the current gate.

The layer-wide fork with `"all_full"` is the oracle of "Revisiting Auxiliary Losses for Conditional Depth Routing: An
Empirical Study" (arXiv:2604.17228), which names `"on_policy"` as the variant to try. It forks
all positions of layer `l` at once, two trajectories per layer; a token's utility then also holds what its neighbours'
forks do to it through later attention. The exact fork changes one position at a time, and is the measure of that bias.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .arguments import ORACLES
from .forks import Prefix, observe_prefix, run_forks, token_losses


@dataclass(frozen=True)
class UtilityLabels:
    """Labels of one layer.

    Attributes:
        utility: Float32 `[B, T]`, `u*`; positive where the full path lowers the loss.
        valid: Bool `[B, T]`: real positions with at least one predicted token in their window.
    """

    utility: torch.Tensor
    valid: torch.Tensor


def prefix_utility(
    prefix: Prefix,
    labels_BT: torch.Tensor,
    kind: str = "all_full",
    window: int = 8,
    gamma: float = 0.5,
    layers: Collection[int] | None = None,
) -> dict[int, UtilityLabels]:
    """`u*` of every position by layer-wide forks of the observed forward pass.

    Args:
        prefix: From `observe_prefix`, after a forward pass.
        labels_BT: What the model is trained on, as in transformers: position `t` predicts `labels[:, t + 1]`; -100 is
            not predicted.
        kind: `"all_full"` or `"on_policy"`: what the other routed layers do.
        window: `W`. With 1, the label is the difference in the token's own loss.
        gamma: Decay of the window.
        layers: Indices of the layers to fork at; default: all routed layers.

    Returns:
        Labels by layer index.
    """
    on_policy = _is_on_policy(kind)

    def fork(full_BTd: torch.Tensor, cheap_BTd: torch.Tensor, trunk_BTd: torch.Tensor) -> torch.Tensor:
        return torch.stack([full_BTd, cheap_BTd]) if on_policy else cheap_BTd[None]  # the trunk itself is all full

    with prefix.replaying():
        streams_FBTd, forks = run_forks(prefix, on_policy, fork, layers)
        losses_FBT, counted_BT = token_losses(prefix, streams_FBTd, labels_BT)
    summed_FBT = _windowed(losses_FBT, window, gamma)
    valid_BT = _windowed(counted_BT.float(), window, gamma) > 0
    if prefix.token_mask is not None:
        valid_BT = valid_BT & prefix.token_mask
    return {
        index: UtilityLabels(summed_FBT[made[-1]] - summed_FBT[made[0] if on_policy else 0], valid_BT)
        for index, made in forks.items()
    }


def utility_labels(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    kind: str = "all_full",
    window: int = 8,
    gamma: float = 0.5,
    layers: Collection[int] | None = None,
) -> dict[int, UtilityLabels]:
    """`prefix_utility` of a batch: dict with `input_ids` and optionally `attention_mask` and `labels`, each `[B, T]`.

    In eval mode `"on_policy"` follows the causal thresholds; `calibration.use_selection(model, "topk")` changes that.

    Raises:
        ValueError: `kind` is unknown, or no depth-routed adapter is active.
    """
    with _observed(model, batch) as (prefix, labels_BT):
        return prefix_utility(prefix, labels_BT, kind, window, gamma, layers)


def exact_utility(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    positions: torch.Tensor,
    kind: str = "all_full",
    window: int = 8,
    gamma: float = 0.5,
) -> dict[int, torch.Tensor]:
    """`u*` at `positions` (int64 `[S]`), each forked alone: float32 `[B, S]` by layer index.

    Runs one trajectory per layer and position (two with `"on_policy"`); meant for a few positions.

    Raises:
        ValueError: `kind` is unknown, or no depth-routed adapter is active.
    """
    on_policy = _is_on_policy(kind)
    count = len(positions)

    def fork(full_BTd: torch.Tensor, cheap_BTd: torch.Tensor, trunk_BTd: torch.Tensor) -> torch.Tensor:
        here = F.one_hot(positions.to(trunk_BTd.device), trunk_BTd.shape[1]).bool()[:, None, :, None]  # [S, 1, T, 1]
        cheap = torch.where(here, cheap_BTd, trunk_BTd)
        return torch.cat([torch.where(here, full_BTd, trunk_BTd), cheap]) if on_policy else cheap

    with _observed(model, batch) as (prefix, labels_BT), prefix.replaying():
        streams_FBTd, forks = run_forks(prefix, on_policy, fork, None)
        losses_FBT, _ = token_losses(prefix, streams_FBTd, labels_BT)
    summed_FBT = _windowed(losses_FBT, window, gamma)
    result = {}
    for index, made in forks.items():
        cheap_SBT = summed_FBT[made.stop - count : made.stop]
        full_SBT = summed_FBT[made.start : made.start + count] if on_policy else summed_FBT[:1].expand_as(cheap_SBT)
        difference_SBT = cheap_SBT - full_SBT
        at = positions.to(difference_SBT.device)[:, None, None].expand(-1, difference_SBT.shape[1], 1)
        result[index] = difference_SBT.gather(-1, at)[..., 0].T.contiguous()
    return result


def refresh_cost(model: nn.Module, batch: Mapping[str, torch.Tensor], kind: str = "all_full", rounds: int = 5) -> float:
    """Time of one refresh of the labels over the time of one plain forward pass: medians of interleaved runs."""
    seconds: dict[str, list[float]] = {"refresh": [], "forward": []}
    with _observed(model, batch) as (prefix, labels_BT):
        for _ in range(rounds):
            with torch.no_grad():
                seconds["forward"].append(_timed(lambda: model(**_inputs(batch), use_cache=False), labels_BT))
            seconds["refresh"].append(_timed(lambda: prefix_utility(prefix, labels_BT, kind), labels_BT))
    return statistics.median(seconds["refresh"]) / statistics.median(seconds["forward"])


def _windowed(losses: torch.Tensor, window: int, gamma: float) -> torch.Tensor:
    """`sum_delta gamma^delta losses[..., t + delta]`, cut off at the end of the sequence."""
    summed = losses.clone()
    for delta in range(1, min(window, losses.shape[-1])):
        summed[..., :-delta] += gamma**delta * losses[..., delta:]
    return summed


def _is_on_policy(kind: str) -> bool:
    if kind not in ORACLES:
        raise ValueError(f"oracle {kind!r} is unknown; use one of: {', '.join(ORACLES)}")
    return kind == "on_policy"


@contextmanager
def _observed(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Iterator[tuple[Prefix, torch.Tensor]]:
    """The prefix of a forward pass over `batch`, and its labels."""
    inputs = _inputs(batch)
    with observe_prefix(model) as prefix:
        with torch.no_grad():
            model(**inputs, use_cache=False, logits_to_keep=1)
        yield prefix, batch.get("labels", inputs["input_ids"])


def _inputs(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}


def _timed(work: Callable[[], Any], on: torch.Tensor) -> float:
    def wait() -> None:
        if on.is_cuda:
            torch.cuda.synchronize(on.device)

    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start
