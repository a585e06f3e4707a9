"""The scale of the labels of counterfactual gate supervision.

"Counterfactual Gate Supervision Does Not Fix Gating Credit Assignment in Engram-Style Conditional Memory" (FARS,
Analemma; gitlab.com/fars-a/counterfactual-gate-supervision): the temperature of `y = sigmoid(dl / temperature)`.
"""

from __future__ import annotations

import torch

from ..base.distributed import sum_over_processes
from .oracle import UtilityLabels

_DECAY = 0.99


class LabelScale:
    """A moving average over optimizer steps of the mean `|dl|`, in nats, of the labelled tokens of all processes.

    Where a step has several batches, those so far count together.

    Attributes:
        value: A scalar; None before the first label.
    """

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None
        self.begin_step()

    def begin_step(self) -> None:
        """The batches from here on are another optimizer step's."""
        self._before, self._sums = self.value, torch.zeros(2)  # of `|dl|`, and of how many labels

    def update(self, labels: UtilityLabels) -> torch.Tensor:
        """The average with a batch's labels in it: a scalar, 1 where there never was a label."""
        sums_2 = torch.stack([(labels.utility.abs() * labels.valid).sum(), labels.valid.sum().float()])
        self._sums = self._sums.to(sums_2) + sum_over_processes(sums_2)
        if self._sums[1] > 0:  # waits for the device, as making labels did
            size = self._sums[0] / self._sums[1]
            before = size if self._before is None else self._before
            self.value = torch.lerp(size, before, _DECAY).clamp(min=1e-6)
        return sums_2.new_ones(()) if self.value is None else self.value
