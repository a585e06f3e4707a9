"""Counterfactual labels, what the loss of a token would have been on the other path of one layer;
and losses by them.

Shapes: F streams (forks of one forward pass), C routed layers, B batch, T positions, P pairs, d
model width.

The utility of running layer `l` full at position `t` is

    u*_{l,t} = CE~cheap_{l,t} - CE~full_{l,t}
    CE~_{l,t} = sum_{delta=0}^{W-1} gamma^delta CE_{l,t+delta}

where the two trajectories fork at layer `l`. With `"all_full"` every other routed layer, before and
after the fork, runs full; with `"on_policy"` every other one follows the current gate.

The layer-wide fork with `"all_full"` is the oracle of "Revisiting Auxiliary Losses for Conditional
Depth Routing: An Empirical Study" (arXiv:2604.17228), which names `"on_policy"` as the variant to
try. It forks all positions of layer `l` at once, two trajectories per layer; a token's utility then
also holds what its neighbours' forks do to it through later attention. The exact fork changes one
position at a time, and is the measure of that bias.

`cgs` and the scale of its labels: "Counterfactual Gate Supervision Does Not Fix Gating Credit
Assignment in Engram-Style Conditional Memory" (FARS, Analemma;
gitlab.com/fars-a/counterfactual-gate-supervision).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ..base.distributed import sum_over_processes
from ..routing.stack import state_of
from ..routing.trace import RouteTrace
from .arguments import ORACLES
from .forks import Prefix, fork_losses, run_forks
from .trace_statistics import gate_cross_entropy, gate_logits, stack, token_mean

if TYPE_CHECKING:
    from .losses import LossInputs

NO_LABELS = (
    "util, rank and cgs label a token by the loss of the next few, and with phases='prefill' those "
    "that have a loss run in full; train prompts with distill_weight or the task's loss"
)
_RANKED = 256  # positions of a sequence that the rank loss compares with each other
_DECAY = 0.99  # of `LabelScale`, from one optimizer step to the next


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
        labels_BT: What the model is trained on, as in transformers: position `t` predicts
            `labels[:, t + 1]`; -100 is not predicted.
        kind: `"all_full"` or `"on_policy"`: what the other routed layers do.
        window: `W`. With 1, the label is the difference in the token's own loss.
        gamma: Decay of the window.
        layers: Indices of the layers to fork at; default: all routed layers.

    Returns:
        Labels by layer index.

    Raises:
        ValueError: The kind is unknown; or prompts alone are routed, whose tokens no such label is
            about.
    """
    differences, counted_BT = differences_of(
        prefix, labels_BT, kind, window, gamma, lambda path_BTd, trunk_BTd: path_BTd[None], layers
    )
    valid_BT = _windowed(counted_BT.float(), window, gamma, prefix.documents) > 0
    if prefix.context.token_mask is not None:
        valid_BT = valid_BT & prefix.context.token_mask
    return {
        index: UtilityLabels(difference_1BT[0], valid_BT)
        for index, difference_1BT in differences.items()
    }


def _windowed(
    losses: torch.Tensor, window: int, gamma: float, documents: torch.Tensor | None
) -> torch.Tensor:
    """`sum_delta gamma^delta losses[..., t + delta]`, cut off at the end of the document."""
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
    """`u*` of each fork `[K, B, T]` by layer index, and what is predicted.

    `place` puts a path into the trunk. The other arguments, and errors, are those of
    `prefix_utility`.
    """
    if kind not in ORACLES:
        raise ValueError(f"oracle {kind!r} is unknown; use one of: {', '.join(ORACLES)}")
    in_full = state_of(prefix.model).settings.in_full
    if in_full is not None and in_full.any():
        raise ValueError(NO_LABELS)
    on_policy = kind == "on_policy"  # otherwise the trunk itself is all full

    def fork(
        full_BTd: torch.Tensor, cheap_BTd: torch.Tensor, trunk_BTd: torch.Tensor
    ) -> torch.Tensor:
        cheap_KBTd = place(cheap_BTd, trunk_BTd)
        if on_policy:
            return torch.cat([place(full_BTd, trunk_BTd), cheap_KBTd])
        return cheap_KBTd

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


def util_loss(inputs: LossInputs) -> torch.Tensor | None:
    """`Huber(u, u*)` with delta 1, mean over labelled tokens and layers."""
    if inputs.utility is None:
        return None
    scores_CBT, labels_CBT, valid_CBT = _labelled(inputs.trace, inputs.utility)
    return token_mean(F.huber_loss(scores_CBT, labels_CBT, reduction="none"), valid_CBT).mean()


def rank_loss(inputs: LossInputs) -> torch.Tensor | None:
    """`softplus(-sign(u*_i - u*_j) (u_i - u_j))`, mean over pairs of a sequence's labelled tokens.

    All pairs `i != j`; of sequences longer than 256 tokens, the pairs among 256 positions drawn at
    random.
    """
    if inputs.utility is None:
        return None
    scores_CBT, labels_CBT, valid_CBT = _labelled(inputs.trace, inputs.utility)
    length = scores_CBT.shape[-1]
    if length > _RANKED:
        drawn = torch.randperm(length, device=scores_CBT.device)[:_RANKED]
        scores_CBT, labels_CBT, valid_CBT = (
            x[..., drawn] for x in (scores_CBT, labels_CBT, valid_CBT)
        )
    # The term is symmetric in i and j, so i < j is enough.
    length = scores_CBT.shape[-1]
    i, j = torch.triu_indices(length, length, offset=1, device=scores_CBT.device)
    order_CBP = torch.sign(labels_CBT[..., i] - labels_CBT[..., j])
    losses_CBP = F.softplus(-order_CBP * (scores_CBT[..., i] - scores_CBT[..., j]))
    return token_mean(losses_CBP, valid_CBT[..., i] & valid_CBT[..., j]).mean()


def cgs_loss(inputs: LossInputs) -> torch.Tensor | None:
    """Counterfactual gate supervision: `BCE(p, y)`, `y = sigmoid(dl / temperature)`, the mean."""
    if inputs.counterfactual is None:
        return None
    trace = RouteTrace({index: inputs.trace[index] for index in inputs.counterfactual})
    _, labels_CBT, valid_CBT = _labelled(trace, inputs.counterfactual)
    targets_CBT = torch.sigmoid(labels_CBT / inputs.counterfactual_temperature)
    return gate_cross_entropy(gate_logits(trace), targets_CBT, valid_CBT)


def _labelled(trace: RouteTrace, labels: Mapping[int, UtilityLabels]) -> tuple[torch.Tensor, ...]:
    """Scores, labels and validity, each `[C, B, T]`."""
    scores_CBT = stack([record.scores for record in trace.values()])
    labels_CBT = stack([labels[index].utility for index in trace]).to(scores_CBT.device)
    valid_CBT = stack([labels[index].valid for index in trace]).to(scores_CBT.device)
    return scores_CBT, labels_CBT, valid_CBT


class LabelScale:
    """The temperature of `y = sigmoid(dl / temperature)`, labels of `cgs`.

    It is a moving average over optimizer steps of the mean `|dl|`, in nats, of the labelled tokens
    of all processes. Where a step has several batches, those so far count together.
    """

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None  # a scalar; None before the first label
        self.begin_step()

    def begin_step(self) -> None:
        """The batches from here on are another optimizer step's."""
        self._before = self.value
        self._sums = torch.zeros(2)  # of `|dl|`, and of how many labels

    def update(self, labels: UtilityLabels) -> torch.Tensor:
        """The average with a batch's labels in it: a scalar, 1 where there never was a label."""
        total = (labels.utility.abs() * labels.valid).sum()
        sums_2 = torch.stack([total, labels.valid.sum().float()])
        self._sums = self._sums.to(sums_2) + sum_over_processes(sums_2)
        if self._sums[1] > 0:  # waits for the device, as making labels did
            size = self._sums[0] / self._sums[1]
            before = size if self._before is None else self._before
            self.value = torch.lerp(size, before, _DECAY).clamp(min=1e-6)
        if self.value is None:
            return sums_2.new_ones(())
        return self.value
