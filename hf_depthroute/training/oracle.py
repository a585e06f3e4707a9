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

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from .arguments import ORACLES
from .forks import Prefix, fork_losses, run_forks


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
    differences, counted_BT = differences_of(
        prefix, labels_BT, kind, window, gamma, lambda path_BTd, trunk_BTd: path_BTd[None], layers
    )
    valid_BT = _windowed(counted_BT.float(), window, gamma, prefix.documents) > 0
    if prefix.token_mask is not None:
        valid_BT = valid_BT & prefix.token_mask
    return {index: UtilityLabels(difference_1BT[0], valid_BT) for index, difference_1BT in differences.items()}


def _windowed(losses: torch.Tensor, window: int, gamma: float, documents: torch.Tensor | None) -> torch.Tensor:
    """`sum_delta gamma^delta losses[..., t + delta]`, cut off at the end of the sequence, or of a packed document."""
    summed = losses.clone()
    for delta in range(1, min(window, losses.shape[-1])):
        later = losses[..., delta:]
        if documents is not None:
            later = later * (documents[..., delta:] == documents[..., :-delta])
        summed[..., :-delta] += gamma**delta * later
    return summed


def differences_of(
    prefix: Prefix,
    labels_BT: torch.Tensor,
    kind: str,
    window: int,
    gamma: float,
    place: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    layers: Collection[int] | None = None,
) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """`u*` of each fork `[K, B, T]` by layer index, and what is predicted; `place` puts a path into the trunk."""
    if kind not in ORACLES:
        raise ValueError(f"oracle {kind!r} is unknown; use one of: {', '.join(ORACLES)}")
    on_policy = kind == "on_policy"  # otherwise the trunk itself is all full

    def fork(full_BTd: torch.Tensor, cheap_BTd: torch.Tensor, trunk_BTd: torch.Tensor) -> torch.Tensor:
        cheap_KBTd = place(cheap_BTd, trunk_BTd)
        return torch.cat([place(full_BTd, trunk_BTd), cheap_KBTd]) if on_policy else cheap_KBTd

    with prefix.replaying():
        streams_FBTd, forks = run_forks(prefix, on_policy, fork, layers)
        losses_FBT, counted_BT = fork_losses(prefix, streams_FBTd, labels_BT)
    summed_FBT = _windowed(losses_FBT, window, gamma, prefix.documents)
    found = {}
    for index, made in forks.items():
        new = summed_FBT[made.start : made.stop]
        full_KBT, cheap_KBT = new.chunk(2) if on_policy else (summed_FBT[:1], new)
        found[index] = cheap_KBT - full_KBT
    return found, counted_BT
