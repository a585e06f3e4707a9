"""The quantile table of a layer's scores, from which the threshold of every budget is read,
and the controller.

Shapes: Q table entries, C routed layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..base.distributed import sum_over_processes, world_size
from ..parts.gate import Thresholds
from ..parts.rules import ALIKE

if TYPE_CHECKING:
    from .trace import RouteRecord

TABLE_SIZE = 201  # steps of half a percent
_NEVER = 1e-4  # a share of the tokens that is as good as none
# In the average, a step weighs what its tokens are of so many, and no more than `_MOST`: the tokens
# of one text are alike.
_AVERAGED = 2_048
_MOST = 0.25
NOT_FITTED = (
    "the thresholds of this adapter were never fitted to its scores, so the share of tokens that "
    "runs full is not the budget; call calibrate(model, batches), or train with a Trainer or with "
    "record_routes and routing_losses"
)


class Measured(NamedTuple):
    """The share of tokens in full on the text that a table was fitted to; for the model card.

    Attributes:
        budget: The budget asked for.
        full_ratio: The share that ran full.
        where: `"calibration"`, or `"training"`: since its last log entry, on the stream of the
            training rule.
    """

    budget: float
    full_ratio: float
    where: str


class ScoreQuantiles(Thresholds):
    """The quantiles of a layer's scores at `0, 0.005, ..., 1`; a call gives a budget's threshold.

    Before any training it is the logistic distribution's, `Q(x) = tau * log(x / (1 - x))`, for
    which a budget `rho` selects the tokens with `p >= 1 - rho`; `temperature` is `tau`.
    """

    def __init__(self, temperature: float) -> None:
        super().__init__()
        levels = torch.linspace(0, 1, TABLE_SIZE).clamp(1e-4, 1 - 1e-4)
        self.values: torch.Tensor
        self.updates: torch.Tensor
        self.register_buffer("values", temperature * torch.logit(levels))  # [Q]
        # 0: never tracked nor calibrated.
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.measured: Measured | None = None

    def forward(self, budget: float) -> torch.Tensor:  # -> []
        """The score that a fraction `budget` of the tokens reaches, interpolated linearly."""
        position = (1.0 - budget) * (TABLE_SIZE - 1)
        low = min(int(position), TABLE_SIZE - 2)
        values = self.values.float()
        return torch.lerp(values[low], values[low + 1], position - low)

    def fitted(self) -> bool:
        """Whether the table has been tracked in training or set by `calibrate`.

        Waits for the device.
        """
        # A table on disk cannot be read here.
        return self.updates.is_meta or self.updates.item() > 0

    @torch.no_grad()
    def set(self, table: torch.Tensor) -> None:
        self.values.copy_(table)
        self.updates.fill_(1)
        self.measured = None

    @torch.no_grad()
    def track(
        self, table: torch.Tensor, tokens: torch.Tensor | int = 0, decay: float = 0.95
    ) -> None:
        """Move towards the table of one more batch, which is of `tokens` tokens.

        The average starts at the first batch, not at the initial table. The more tokens a batch
        has, the sooner it forgets those before: scores move from step to step, and an average over
        many steps is one of gates that are no more.

        A table with NaN, of a batch without a single real token, or with infinity changes nothing.
        """
        known = table.isfinite().all()
        least = (
            torch.as_tensor(tokens / _AVERAGED).clamp(1.0 - decay, _MOST).to(self.updates.device)
        )
        weight = torch.maximum(1.0 / (self.updates + 1), least) * known
        self.values.lerp_(table.nan_to_num().to(self.values.dtype), weight.to(self.values.dtype))
        self.updates.add_(known)
        self.measured = None


class Expected(NamedTuple):
    """A layer's scores on the text of the calibration, for the rule of ranks.

    Attributes:
        table_Q: The layer's quantile table, by the budget that all layers hold together.
        shift: From the log-odds of that budget to those of the layer's own share.
    """

    table_Q: torch.Tensor
    shift: float

    def share(self, budget: float) -> float:
        """The share of the layer's tokens that a budget in (0, 1) runs in full."""
        return 1 / (1 + (1 - budget) / budget * math.exp(-self.shift))

    def share_above(self, scores_BT: torch.Tensor) -> torch.Tensor:
        """The share of tokens that reach each score, float32 `[B, T]`, linear in the table."""
        table_Q = self.table_Q.float()
        above = torch.searchsorted(table_Q, scores_BT.contiguous()).clamp(1, len(table_Q) - 1)
        low_BT = table_Q[above - 1]
        high_BT = table_Q[above]
        part = (scores_BT - low_BT) / (high_BT - low_BT).clamp(min=torch.finfo(torch.float32).tiny)
        level = (above - 1 + part.clamp(0, 1)) / (len(table_Q) - 1)
        return torch.sigmoid(torch.logit(1 - level, eps=_NEVER) + self.shift)


def share_shifts(shares: Mapping[int, float]) -> dict[int, float]:
    """From the log-odds of the shares' mean to those of each layer's share, in [0, 1]."""

    def log_odds(share: float) -> float:
        share = min(max(share, _NEVER), 1 - _NEVER)
        return math.log(share / (1 - share))

    together = sum(shares.values()) / len(shares)
    return {index: log_odds(share) - log_odds(together) for index, share in shares.items()}


class BudgetController(Thresholds):
    """A score threshold that training moves against the sign of the load error, without a loss.

        theta <- theta + step * sign(load - budget)

    The bias of "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts"
    (arXiv:2408.15664), on the other side of the comparison: `u - theta >= 0` decides, and no
    gradient reaches it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.threshold: torch.Tensor
        self.register_buffer("threshold", torch.zeros(()))

    @torch.no_grad()
    def move(self, load: torch.Tensor, budget: float, step: float) -> None:
        """One step; `load` is the recent share of tokens that ran full, `[]`."""
        self.threshold.add_(step * torch.sign(load.to(self.threshold) - budget))

    @torch.no_grad()
    def set(self, threshold: torch.Tensor) -> None:
        self.threshold.copy_(threshold)


def quantile_table(scores: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
    """Quantiles `[Q]` of `scores` over the entries where `keep` is true.

    Never waits for the device.

    NaN scores are left out. Without a single entry, the result is NaN.
    """
    flat = scores.detach().float().reshape(-1)
    valid = ~flat.isnan()
    if keep is not None:
        valid = keep.reshape(-1) & valid
    count = valid.sum()
    ordered = torch.where(valid, flat, torch.inf).sort().values
    last = (count - 1).clamp(min=0)
    position = torch.linspace(0, 1, TABLE_SIZE, device=flat.device) * last
    low = position.floor().long()
    high = torch.minimum(low + 1, last)
    table = torch.lerp(ordered[low], ordered[high], position - low)
    return torch.where(count > 0, table, torch.nan)


def threshold_table(scores: torch.Tensor) -> torch.Tensor:
    """A `quantile_table` to decide by, `[Q]`: no threshold stands among scores that are alike.

    A gate on what depends on the token alone, as before a first layer, gives all its occurrences
    one score, up to rounding, which would then decide about each of them. Such a threshold goes
    half-way to the next score, on the side where the share is nearer; the highest group runs in
    full. The scores are finite, of any shape, and not empty.
    """
    table = quantile_table(scores)
    ordered = scores.detach().float().reshape(-1).sort().values
    near = ALIKE * (1 + table.abs())
    first = torch.searchsorted(ordered, table - near)
    end = torch.searchsorted(ordered, table + near, right=True)  # of the scores like the table's
    wanted = torch.linspace(0, 1, TABLE_SIZE, device=ordered.device) * len(ordered)
    down = (wanted - first <= end - wanted) | (end == len(ordered))
    cut = torch.where(down, first, end).clamp(max=len(ordered) - 1)
    lower = torch.where(cut > 0, ordered[(cut - 1).clamp(min=0)], ordered[0] - 20 * near)
    moved = torch.where(end - first > 1, (lower + ordered[cut]) / 2, table)
    # Between two groups, what was interpolated may lie on either side.
    return moved.cummax(0).values


def table_through(knots: Mapping[float, float], fixed: float, size: int) -> torch.Tensor:
    """A table `[size]` through `{level: score}`, linear, never falling, exact at level `fixed`."""
    levels = np.array(sorted(knots))
    scores = np.array([knots[level] for level in levels])
    middle = int(np.searchsorted(levels, fixed))
    _never_falling(scores, middle, middle)
    table = np.interp(np.linspace(0, 1, size), levels, scores)
    position = fixed * (size - 1)
    low = min(int(position), size - 2)  # what is read at `fixed` lies between these two
    read = table[low] + (position - low) * (table[low + 1] - table[low])
    table[low : low + 2] += knots[fixed] - read
    _never_falling(table, low, low + 1)
    return torch.from_numpy(table).float()


def _never_falling(scores: np.ndarray, low: int, high: int) -> None:
    """Raise what follows `high` and lower what is before `low`, in place, until nothing falls."""
    scores[high:] = np.maximum.accumulate(scores[high:])
    scores[low::-1] = np.minimum.accumulate(scores[low::-1])


@torch.no_grad()
def quantile_tables(
    records: list[RouteRecord], pooled: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The `quantile_table` of each record's real tokens, and how many they are.

    Over processes these are the weighted mean and the sum.

    Every process gets the same tables, so thresholds never differ between ranks. With `pooled`, all
    records get the table of their scores together: the one threshold of a global budget.
    """
    if pooled:
        device = records[0].scores.device
        scores = torch.cat([record.scores.reshape(-1).to(device) for record in records])
        keep = torch.cat([record.real.reshape(-1).to(device) for record in records])
        tables = [quantile_table(scores, keep)]
        counts = [keep.sum() / len(records)]
    else:
        tables = [quantile_table(record.scores, record.real) for record in records]
        counts = [record.real.sum() for record in records]
    if world_size() > 1:
        device = tables[0].device
        counts_C1 = torch.stack([count.to(device) for count in counts])[:, None].float()
        tables_CQ = torch.stack([table.to(device) for table in tables])
        weighted = [tables_CQ.nan_to_num() * counts_C1, counts_C1]
        shared = sum_over_processes(torch.cat(weighted, dim=1))
        tables = list(shared[:, :-1] / shared[:, -1:])  # NaN where no process has a real token
        counts = list(shared[:, -1])
    found = list(zip(tables, counts))
    return found * len(records) if pooled else found
