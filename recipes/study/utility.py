"""Labels of the oracle for a batch, to compare gates with: of every position,
or exact ones of a few.

Shapes: B batch, T positions, S sampled positions, d model width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from hf_depthroute.data.batches import labels_of, model_inputs
from hf_depthroute.training.forks import Prefix, observe_prefix
from hf_depthroute.training.oracle import UtilityLabels, differences_of, prefix_utility


def utility_labels(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    kind: str = "all_full",
    window: int = 8,
    gamma: float = 0.5,
    layers: Collection[int] | None = None,
) -> dict[int, UtilityLabels]:
    """`prefix_utility` of a batch.

    A dict with `input_ids` and optionally `attention_mask`, `position_ids` and `labels`, each
    `[B, T]`. In eval mode `"on_policy"` follows the causal thresholds;
    `calibration.use_selection(model, "topk")` changes that.

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

    def place(path_BTd: torch.Tensor, trunk_BTd: torch.Tensor) -> torch.Tensor:
        # [S, 1, T, 1]
        here = F.one_hot(positions.to(trunk_BTd.device), trunk_BTd.shape[1]).bool()[
            :, None, :, None
        ]
        return torch.where(here, path_BTd, trunk_BTd)

    with _observed(model, batch) as (prefix, labels_BT):
        differences, _ = differences_of(prefix, labels_BT, kind, window, gamma, place)
    result = {}
    for index, difference_SBT in differences.items():
        at = positions.to(difference_SBT.device)[:, None, None].expand(
            -1, difference_SBT.shape[1], 1
        )
        result[index] = difference_SBT.gather(-1, at)[..., 0].T.contiguous()
    return result


@contextmanager
def _observed(
    model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Prefix, torch.Tensor]]:
    """The prefix of a forward pass over `batch`, and its labels."""
    with observe_prefix(model) as prefix:
        with torch.no_grad():
            model(**next(model_inputs(model, batch)), use_cache=False, logits_to_keep=1)
        yield prefix, labels_of(batch)
